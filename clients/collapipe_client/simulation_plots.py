"""Draws plots of a simulation: bars for each strategy, or curves over the swept parameter."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from collapipe.simulation import Interval, Scenario, StrategySummary
from collapipe_client.plot_files import Plot, panels, style
from collapipe_client.report_page import TEXT_COLOUR
from collapipe_client.simulation_report import on_devices, say_runs

_COLOURS = {
    "dssra": "#1a9a6c",
    "pipeline": "#d1495b",
    "titanic": "#4a7fd0",
    "titanic_best": "#1296a8",
    "vanilla_fl": "#b8860b",
    "centralized": "#7d8790",
    "proportional": "#9a6cc0",
}
"""They can be told apart from a white and from a dark background."""
_GREY = "#7d8790"
_RANGE_FOR_LOGARITHMS = 8.0
"""An axis is logarithmic if its largest value is more than this many times its smallest."""


@dataclass(frozen=True)
class _Measure:
    """A quantity to plot.

    Args:
        name: As a title has it.
        label: Its name on an axis, with its unit.
        value: Returns its value in a summary; `None` if the strategy was infeasible.
    """

    name: str
    label: str
    unit: str
    value: Callable[[StrategySummary], Interval | None]


def _memory_gigabytes(summary: StrategySummary) -> Interval | None:
    found = summary.memory_bytes
    return found and Interval(found.median / 1e9, found.low / 1e9, found.high / 1e9)


_DELAY = _Measure(
    "Time of a round", "time of a round, s", "s", lambda summary: summary.delay_seconds
)
_MEMORY = _Measure("Memory of the device that needs most", "memory, GB", "GB", _memory_gigabytes)
_ENERGY = _Measure(
    "Energy of the busiest device",
    "energy of a round, J",
    "J",
    lambda summary: summary.energy_joules_max,
)
_BACKLOG = _Measure(
    "Energy used beyond the budget",
    "mean backlog, round budgets",
    "",
    lambda summary: summary.backlog,
)

_AXES = {
    "penalty_weight": "penalty weight V",
    "clusters": "clusters",
    "devices_per_cluster": "devices of a cluster",
    "bandwidth": "bandwidth",
    "heterogeneity": "spread of speeds (largest factor between devices)",
    "energy_budget_joules": "energy budget of a device, J a round",
}
"""Label of the horizontal axis, by swept parameter."""
_FIGURES: dict[str, dict[str, list[_Measure]]] = {
    "penalty_weight": {"delay-and-backlog": [_DELAY, _BACKLOG], "memory": [_MEMORY]},
    "energy_budget_joules": {
        "delay": [_DELAY],
        "energy": [_ENERGY],
        "backlog": [_BACKLOG],
        "memory": [_MEMORY],
    },
}
"""By swept parameter: for each figure, its measures from top to bottom."""
_OTHER_FIGURES = {"delay": [_DELAY], "memory": [_MEMORY]}


def draw_plots(scenario: Scenario, summaries: Sequence[StrategySummary]) -> list[Plot]:
    """Draws bars for each strategy, or curves over the swept parameter if there is one."""
    if scenario.sweep is None:
        named = {"delay": [_DELAY], "memory": [_MEMORY]}
        if any(summary.budget_joules for summary in summaries):
            named |= {"energy": [_ENERGY], "backlog": [_BACKLOG]}
    else:
        named = _FIGURES.get(scenario.sweep.parameter, _OTHER_FIGURES)
    return [_plot(name, scenario, summaries, measures) for name, measures in named.items()]


def _plot(
    name: str,
    scenario: Scenario,
    summaries: Sequence[StrategySummary],
    measures: Sequence[_Measure],
) -> Plot:
    title = " and ".join(
        measure.name if index == 0 else measure.name.lower()
        for index, measure in enumerate(measures)
    )
    what, spread = "bars", "whiskers are"
    with style(name):
        figure, drawn = panels(title, say_runs(scenario), len(measures))
        for axes, measure in zip(drawn, measures, strict=True):
            if scenario.sweep is None:
                _draw_bars(axes, summaries, measure)
            else:
                with_budget = scenario.sweep.parameter == "energy_budget_joules"
                diagonal = "budget" if with_budget and measure is _ENERGY else None
                _draw_curves(axes, summaries, measure, diagonal)
        if scenario.sweep is not None:
            what, spread = "points", "bands are"
            drawn[-1].set_xlabel(_axis(scenario, scenario.sweep.parameter))
        _draw_legend(figure, drawn, scenario)
    apart = ""
    if any(summary.strategy == "centralized" for summary in summaries):
        drawn_as = "hatched" if scenario.sweep is None else "dashed"
        apart = f" centralized is {drawn_as}: one host holds the whole model there, and no device takes part."
    caption = (
        f"{title}. {say_runs(scenario)}. The {what} are medians over the seeds, and the {spread} their 95 % confidence "
        f"intervals (bootstrap).{apart}"
    )
    return Plot(name, title, caption, figure)


def _axis(scenario: Scenario, parameter: str) -> str:
    if parameter != "bandwidth":
        return _AXES[parameter]
    return f"{_AXES[parameter]}, {'Hz' if scenario.channel.kind == 'radio' else 'bit/s'}"


def _draw_legend(figure: Figure, drawn: Sequence[Axes], scenario: Scenario) -> None:
    """Says what the strategies look like, and what the spread around a median is."""
    count = len(scenario.seed_list)
    interval = f"95 % confidence interval of the median over {count} seeds"
    if count == 1:
        interval = "one seed, so no confidence interval"
    entries: dict[str, Artist] = {}
    if scenario.sweep is None:
        entries["median"] = Patch(color=_GREY)
        entries[interval] = Line2D([], [], color=TEXT_COLOUR, marker="|", markersize=7)
    else:
        for axes in drawn:
            for handle, label in zip(*axes.get_legend_handles_labels(), strict=True):
                entries.setdefault(label, handle)
        entries[interval] = Patch(color=_GREY, alpha=0.3)
    figure.legend(
        entries.values(),
        entries.keys(),
        loc="outside lower left",
        ncols=2,
        frameon=False,
        fontsize=8,
    )


def _draw_curves(
    axes: Axes, summaries: Sequence[StrategySummary], measure: _Measure, diagonal: str | None
) -> None:
    """Draws a curve for each strategy over the values for which it is feasible.

    Args:
        diagonal: Label of a line on which the measure equals the swept value; `None` for no line.
    """
    drawn: list[float] = []
    for strategy in dict.fromkeys(summary.strategy for summary in summaries):
        points = sorted(
            (summary.value, found)
            for summary in summaries
            if summary.strategy == strategy
            and summary.value is not None
            and (found := measure.value(summary)) is not None
        )
        if not points:
            continue
        values = [value for value, _ in points]
        medians = [found.median for _, found in points]
        colour = _COLOURS[strategy]
        axes.plot(
            values,
            medians,
            color=colour,
            marker="o",
            markersize=3,
            linewidth=1.5,
            linestyle="--" if strategy == "centralized" else "-",
            label=strategy,
        )
        lows, highs = [f.low for _, f in points], [f.high for _, f in points]
        axes.fill_between(values, lows, highs, color=colour, alpha=0.18, linewidth=0)
        drawn += medians
    axes.set_ylabel(measure.label)
    axes.grid(axis="y", alpha=0.25)
    values = sorted({summary.value for summary in summaries if summary.value is not None})
    if diagonal is not None:
        axes.plot(values, values, color=TEXT_COLOUR, linewidth=0.8, linestyle=":", label=diagonal)
    if _is_wide(values):
        axes.set_xscale("log")
    if _is_wide(drawn):
        axes.set_yscale("log")
    else:
        axes.set_ylim(bottom=0)


def _draw_bars(axes: Axes, summaries: Sequence[StrategySummary], measure: _Measure) -> None:
    largest = 0.0
    apart = [summary for summary in summaries if summary.strategy == "centralized"]
    compared = on_devices(summaries)
    rows = [*range(len(compared)), *(len(compared) + 0.5 for _ in apart)]
    for row, summary in zip(rows, [*compared, *apart], strict=True):
        found = measure.value(summary)
        if found is None:
            axes.text(0, row, " infeasible", verticalalignment="center", color=_GREY)
            continue
        bars = axes.barh(
            row,
            found.median,
            height=0.6,
            color=_COLOURS[summary.strategy],
            hatch="///" if summary in apart else "",
            xerr=[[found.median - found.low], [found.high - found.median]],
            error_kw={"ecolor": TEXT_COLOUR, "capsize": 3},
        )
        axes.bar_label(bars, [f"{found.median:.3g} {measure.unit}"], padding=5)
        largest = max(largest, found.high)
    names = [summary.strategy for summary in compared] + ["centralized\n(one host)" for _ in apart]
    axes.set_yticks(rows, names)
    axes.set_ylabel("strategy")
    if apart:
        axes.axhline(len(compared) - 0.25, color=_GREY, linewidth=0.8, linestyle=":")
    axes.invert_yaxis()
    axes.set_xlim(0, largest * 1.25 or 1)
    axes.set_xlabel(measure.label)


def _is_wide(values: Sequence[float]) -> bool:
    return bool(values) and min(values) > 0 and max(values) / min(values) > _RANGE_FOR_LOGARITHMS
