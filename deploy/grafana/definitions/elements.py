"""What all dashboards are made of: a few kinds of panels that are always described, have a unit, and ask one data source."""

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

DATA_SOURCE = DataSourceRef(type_val="prometheus", uid="collapipe-prometheus")
"""Of provisioning/datasources."""
TAG = "collapipe"
MIN_STEP = "5s"
"""Least step of a query. $__rate_interval is then at least four of them: a mini-batch of a slow device lasts seconds."""

IN_CLUSTER = 'cluster=~"$cluster"'
OF_MEMBER = 'service=~"$member"'
ON_LINK = 'link=~"$member>.+|.+>$member"'
STAGE = "{{service}} (stage {{stage}})"

PERCENT, SECONDS, BYTES, BITS_PER_SECOND = "percentunit", "s", "bytes", "bps"
BYTES_PER_SECOND, WATTS, COUNT, NONE = "binBps", "watt", "short", "none"
SAMPLES_PER_SECOND = "suffix: samples/s"

Query = tuple[str, str]
"""PromQL, and the legend of its series."""


@dataclass(frozen=True)
class Definition:
    """One dashboard: `answers` is its first row, what holds the job back; `panels` show how it came to that."""

    uid: str
    title: str
    description: str
    answers: Sequence[Any]
    panels: Sequence[Any]


def answer(
    title: str,
    query: Query,
    unit: str,
    description: str,
    *,
    thresholds: Sequence[tuple[float, str]] = (),
    names: bool = True,
    no_value: str = "no data",
    decimals: int | None = None,
) -> Any:
    """A large figure that says who or what it is.

    Args:
        title: Of the panel.
        query: Asked as of now; a `topk(1, ...)` names the one that matters.
        unit: Grafana's name of it.
        description: How to read it.
        thresholds: From which value on it has which colour; green below.
        names: Whether the legend is shown beside the value.
        no_value: Shown without data.
        decimals: Of the value; Grafana chooses when not given.
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
    queries: Sequence[Query],
    unit: str,
    description: str,
    *,
    stacked: bool = False,
    steps: bool = False,
    bars: bool = False,
    most: float | None = None,
    least: float | None = 0.0,
    thresholds: Sequence[tuple[float, str]] = (),
    span: int = 12,
) -> Any:
    """Lines over time.

    Args:
        title: Of the panel.
        queries: One or more.
        unit: Grafana's name of it.
        description: How to read it.
        stacked: Whether they add up.
        steps: Whether a value holds until the next one.
        bars: Bars instead of lines.
        most: Soft upper end of the axis.
        least: Lower end of the axis.
        thresholds: Dashed lines from which on something is wrong.
        span: Width, of 24.
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
    for query, ref_id in zip(queries, "ABCDEF", strict=False):
        panel.with_target(_target(query, ref_id).range())
    return _described(panel, title, unit, description)


def timeline(
    title: str, query: Query, unit: str, description: str, thresholds: Sequence[tuple[float, str]]
) -> Any:
    """One bar a series, coloured by its value over time."""
    panel = (
        statetimeline.Panel()
        .merge_values(True)
        .line_width(0)
        .fill_opacity(70)
        .show_value(common.VisibilityMode.AUTO)
        .thresholds(_thresholds(thresholds))
        .color_scheme(dashboard_builders.FieldColor().mode(FieldColorModeId.THRESHOLDS))
        .with_target(_target(query, "A").range())
        .height(8)
        .span(12)
    )
    return _described(panel, title, unit, description)


def build(definition: Definition, all_dashboards: Sequence[Definition]) -> Any:
    """Makes the dashboard, with links to the others.

    Args:
        definition: What is on it.
        all_dashboards: Every one, in order.
    """
    board = (
        dashboard_builders.Dashboard(definition.title)
        .uid(definition.uid)
        .description(definition.description)
        .tags([TAG])
        .timezone("browser")
        .refresh("5s")
        .time("now-15m", "now")
        .editable()
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
    board.with_row(dashboard_builders.Row("How it got there").id(next(numbers)).collapsed(False))
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
