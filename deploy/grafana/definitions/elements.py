"""The building blocks of all dashboards: panels with a unit, a description and a data source."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from grafana_foundation_sdk.builders import common as common_builders
from grafana_foundation_sdk.builders import dashboard as dashboard_builders
from grafana_foundation_sdk.builders import prometheus, stat, statetimeline, timeseries
from grafana_foundation_sdk.models import common
from grafana_foundation_sdk.models.dashboard import (
    DashboardLinkType,
    DataSourceRef,
    FieldColorModeId,
    Threshold,
    ThresholdsMode,
    VariableHide,
    VariableOption,
    VariableRefresh,
)

DATA_SOURCE = DataSourceRef(type_val="prometheus", uid="${data_source}")
"""The Prometheus that is chosen at the top of a dashboard."""
TAG = "collapipe"
MIN_STEP = "5s"
"""Shortest step of a query, so $__rate_interval is 20 s: a mini-batch of a slow device takes seconds."""

IN_CLUSTER = 'cluster=~"$cluster"'
OF_MEMBER = 'service=~"$member"'
ON_LINK = 'link=~"$member>.+|.+>$member"'
STAGE = "{{service}} (stage {{stage}})"

PERCENT, SECONDS, BYTES, BITS_PER_SECOND = "percentunit", "s", "bytes", "bps"
BYTES_PER_SECOND, WATTS, COUNT, NONE = "binBps", "watt", "short", "none"
SAMPLES_PER_SECOND = "suffix: samples/s"

Query = tuple[str, str]
"""An expression in PromQL, and the legend of its series."""


@dataclass(frozen=True)
class Definition:
    """One dashboard."""

    uid: str
    title: str
    description: str
    answers: Sequence[Any]
    """The panels of the first row, which show what holds the job back."""
    panels: Sequence[Any]
    """The panels below, with the details."""


def answer(
    title: str,
    query: Query,
    unit: str,
    description: str,
    *,
    thresholds: Sequence[tuple[float, str]] = (),
    names: bool = True,
    no_value: str = "no job trains",
    decimals: int | None = None,
) -> Any:
    """Returns a panel with one large figure.

    Args:
        title: Title of the panel.
        query: Evaluated for the present time, usually `topk(1, ...)`.
        unit: In Grafana's notation.
        description: How to read the panel.
        thresholds: Values with the colour that applies from there on; below them, the panel is green.
        names: Whether the legend stands beside the value.
        no_value: What is shown without data: the reason.
        decimals: Decimals of the value; with `None`, Grafana chooses.
    """
    text = common.BigValueTextMode.VALUE_AND_NAME if names else common.BigValueTextMode.VALUE
    panel = (
        stat.Panel()
        .text_mode(text)
        .color_mode(common.BigValueColorMode.BACKGROUND)
        .graph_mode(common.BigValueGraphMode.NONE)
        .reduce_options(common_builders.ReduceDataOptions().calcs(["lastNotNull"]))
        .no_value(no_value)
        .thresholds(_thresholds(thresholds))
        .with_target(_target(query, "A").instant())
        .height(5)
        .span(6)
    )
    if decimals is not None:
        panel.decimals(decimals)
    return _described(panel, title, unit, description)


def graph(
    title: str,
    queries: Query | list[Query],
    unit: str,
    description: str,
    *,
    stacked: bool = False,
    steps: bool = False,
    bars: bool = False,
    most: float | None = None,
    least: float | None = 0.0,
    thresholds: Sequence[tuple[float, str]] = (),
    no_value: str = "no job trained in this time",
    span: int = 12,
) -> Any:
    """Returns a panel with lines over time.

    Args:
        title: Title of the panel.
        queries: One query or several.
        unit: In Grafana's notation.
        description: How to read the panel.
        stacked: Whether the lines are stacked.
        steps: Whether a value holds until the next one.
        bars: Whether bars are drawn instead of lines.
        most: Upper end of the axis, unless a value is higher.
        least: Lower end of the axis.
        thresholds: Values with the colour of the dashed line that is drawn there.
        no_value: As in `answer`.
        span: Width of the panel; 24 is the whole width.
    """
    panel = (
        timeseries.Panel()
        .line_width(2)
        .fill_opacity(70 if stacked or bars else 0)
        .span_nulls(30_000)
        .show_points(common.VisibilityMode.NEVER)
        .legend(
            common_builders.VizLegendOptions()
            .show_legend(True)
            .display_mode(common.LegendDisplayMode.TABLE)
            .placement(common.LegendPlacement.RIGHT)
            .calcs(["lastNotNull"])
        )
        .tooltip(
            common_builders.VizTooltipOptions()
            .mode(common.TooltipDisplayMode.MULTI)
            .sort(common.SortOrder.DESCENDING)
        )
        .color_scheme(
            dashboard_builders.FieldColor().mode(FieldColorModeId.PALETTE_CLASSIC_BY_NAME)
        )
        .no_value(no_value)
        .height(8)
        .span(span)
    )
    if stacked:
        panel.stacking(common_builders.StackingConfig().mode(common.StackingMode.NORMAL).group("A"))
    if steps:
        panel.line_interpolation(common.LineInterpolation.STEP_AFTER)
    if bars:
        panel.draw_style(common.GraphDrawStyle.BARS)
    if least is not None:
        panel.min(least)
    if most is not None:
        panel.axis_soft_max(most)
    if thresholds:
        panel.thresholds(_thresholds(thresholds))
        panel.thresholds_style(
            common_builders.GraphThresholdsStyleConfig().mode(
                common.GraphThresholdsStyleMode.DASHED
            )
        )
    all_queries = queries if isinstance(queries, list) else [queries]
    for query, ref_id in zip(all_queries, "ABCDEF", strict=False):
        panel.with_target(_target(query, ref_id).range())
    return _described(panel, title, unit, description)


def timeline(
    title: str, query: Query, unit: str, description: str, thresholds: Sequence[tuple[float, str]]
) -> Any:
    """Returns a panel with one bar for each series, coloured by its value over time."""
    panel = (
        statetimeline.Panel()
        .merge_values(True)
        .line_width(0)
        .fill_opacity(70)
        .show_value(common.VisibilityMode.AUTO)
        .thresholds(_thresholds(thresholds))
        .color_scheme(dashboard_builders.FieldColor().mode(FieldColorModeId.THRESHOLDS))
        .with_target(_target(query, "A").range())
        .no_value("no host is scraped")
        .height(8)
        .span(12)
    )
    return _described(panel, title, unit, description)


def by_cluster(expression: str, function: str = "max") -> Query:
    """Returns a query with one series for each cluster."""
    return f"{function} by (cluster) ({expression})", "cluster {{cluster}}"


def by_service(expression: str, function: str = "max") -> Query:
    """Returns a query with one series for each host."""
    return f"{function} by (service) ({expression})", "{{service}}"


def by_link(metric: str) -> Query:
    """Returns the query of a gauge of all chosen links."""
    return f"max by (link) ({metric}{{{ON_LINK}}})", "{{link}}"


def slowest_stage() -> Any:
    """Returns the panel that names the stage which computes most."""
    return answer(
        "Slowest stage",
        (
            f"topk(1, stage:busy_seconds:rate1m{{{IN_CLUSTER}}} + stage:update_seconds:rate1m{{{IN_CLUSTER}}})",
            STAGE,
        ),
        PERCENT,
        "The stage that computes for the largest share of the time; the others wait for it. Near 100 %, the pipeline is as "
        "fast as this host: fewer blocks there, or a faster device, would help. Far below, links or transfers of weights "
        "hold the job back (dashboards Links and Training).",
        decimals=0,
    )


def round_time() -> Any:
    """Returns the panel of predicted and observed round times."""
    return graph(
        "Round time, predicted and observed",
        [
            ("max(collapipe_round_predicted_seconds) > 0", "predicted"),
            ("max(collapipe_round_observed_seconds) > 0", "observed"),
        ],
        SECONDS,
        "The last round that was predicted from measurements. After a change of devices or links, the two lines differ for "
        "one round. If they differ for longer, the scheduler's model of a round does not fit.",
        steps=True,
    )


def build(definition: Definition, all_dashboards: Sequence[Definition]) -> Any:
    """Builds a dashboard, with links to the others."""
    board = (
        dashboard_builders.Dashboard(definition.title)
        .uid(definition.uid)
        .description(definition.description)
        .tags([TAG])
        .timezone("browser")
        .refresh("5s")
        .time("now-15m", "now")
        .editable()
        .with_variable(
            dashboard_builders.DatasourceVariable("data_source")
            .label("Data source")
            .type(DATA_SOURCE.type_val)
        )
        .with_variable(_variable("cluster", "collapipe_stage_steps_total, cluster", "Cluster"))
        .with_variable(
            _variable(
                "member",
                f'collapipe_stage_steps_total{{{IN_CLUSTER}, host_role!="edge_server"}}, service',
                "Hosts of the clusters",
            ).hide(VariableHide.HIDE_VARIABLE)
        )
        .annotation(
            dashboard_builders.AnnotationQuery()
            .name("Firing alerts")
            .datasource(DATA_SOURCE)
            .enable(True)
            .icon_color("red")
            .expr('ALERTS{alertstate="firing", severity!="info"}')
        )
    )
    for other in all_dashboards:
        if other is not definition:
            board.link(
                dashboard_builders.DashboardLink(other.title)
                .type(DashboardLinkType.LINK)
                .url(f"/d/{other.uid}")
                .tooltip(other.description)
                .include_vars(True)
                .keep_time(True)
            )
    numbers = itertools.count(1)
    board.with_row(
        dashboard_builders.Row("What holds the job back").id(next(numbers)).collapsed(False)
    )
    for panel in definition.answers:
        board.with_panel(panel.id(next(numbers)))
    board.with_row(dashboard_builders.Row("Details").id(next(numbers)).collapsed(False))
    for panel in definition.panels:
        board.with_panel(panel.id(next(numbers)))
    return board.build()


def _described(panel: Any, title: str, unit: str, description: str) -> Any:
    return panel.title(title).unit(unit).description(description).datasource(DATA_SOURCE)


def _target(query: Query, ref_id: str) -> Any:
    expression, legend = query
    return (
        prometheus.Dataquery()
        .expr(" ".join(expression.split()))
        .legend_format(legend)
        .ref_id(ref_id)
        .datasource(DATA_SOURCE)
        .interval(MIN_STEP)
    )


def _thresholds(steps: Sequence[tuple[float, str]]) -> Any:
    found = [Threshold(value=None, color="green")]
    found += [Threshold(value=value, color=color) for value, color in steps]
    return dashboard_builders.ThresholdsConfig().mode(ThresholdsMode.ABSOLUTE).steps(found)


def _variable(name: str, values: str, label: str) -> dashboard_builders.QueryVariable:
    query: dict[str, object] = {"query": f"label_values({values})", "refId": f"values-{name}"}
    return (
        dashboard_builders.QueryVariable(name)
        .label(label)
        .datasource(DATA_SOURCE)
        .query(query)
        .refresh(VariableRefresh.ON_TIME_RANGE_CHANGED)
        .include_all(True)
        .multi(True)
        .current(VariableOption(selected=True, text=["All"], value=["$__all"]))
    )
