"""Draws plots of a simulation as SVG files. The band of a curve is its 95 % confidence interval."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from collapipe.simulation import Interval, Scenario, StrategySummary

_COLOURS = {
    "dssra": "#0b6e4f",
    "pipeline": "#d1495b",
    "titanic": "#2e5eaa",
    "titanic_best": "#17becf",
    "vanilla_fl": "#b8860b",
    "centralized": "#6c757d",
    "proportional": "#7b4ba0",
}
_GREY = "#6c757d"
_BLACK = "black"
_WIDTH, _HEIGHT = 6.4, 3.6  # of one panel, in inches
_RANGE_FOR_LOGARITHMS = 8.0
"""An axis is logarithmic if its largest value is more than this many times its smallest."""


@dataclass(frozen=True)
class _Measure:
    """A quantity to plot.

    Args:
        label: Its name on an axis.
        value: Returns its value in a summary; `None` if the strategy was infeasible.
    """

    label: str
    unit: str
    value: Callable[[StrategySummary], Interval | None]


def _memory_gigabytes(summary: StrategySummary) -> Interval | None:
    found = summary.memory_bytes
    return found and Interval(found.median / 1e9, found.low / 1e9, found.high / 1e9)


_DELAY = _Measure("delay of a round, s", "s", lambda summary: summary.delay_seconds)
_MEMORY = _Measure("largest memory of a device, GB", "GB", _memory_gigabytes)
_ENERGY = _Measure(
    "energy of the busiest device,\nJ a round", "J", lambda summary: summary.energy_joules_max
)
_BACKLOG = _Measure("mean backlog, in budgets of a round", "", lambda summary: summary.backlog)

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


def draw_plots(
    scenario: Scenario, summaries: Sequence[StrategySummary], directory: Path
) -> list[Path]:
    """Draws bars for each strategy, or curves over the swept parameter if there is one. Returns the files."""
    with matplotlib.rc_context(
        {
            "svg.hashsalt": scenario.name,  # The same numbers give the same file.
            "svg.fonttype": "none",  # Text stays text.
            "font.size": 9,
            "axes.spines.top": False,
            "axes.spines.right": False,
        }
    ):
        if scenario.sweep is None:
            figures = _bar_figures(summaries)
        else:
            figures = _curve_figures(scenario, scenario.sweep.parameter, summaries)
        files = []
        for name, figure in figures.items():
            path = directory / f"{name}.svg"
            figure.savefig(path, format="svg", bbox_inches="tight", metadata={"Date": None})
            files.append(path)
    return files


def _bar_figures(summaries: Sequence[StrategySummary]) -> dict[str, Figure]:
    measures = {"delay": _DELAY, "memory": _MEMORY}
    if any(summary.budget_joules for summary in summaries):
        measures |= {"energy": _ENERGY, "backlog": _BACKLOG}
    figures = {}
    for name, measure in measures.items():
        figures[name], (axes,) = _panels(1)
        _draw_bars(axes, summaries, measure)
    return figures


def _curve_figures(
    scenario: Scenario, parameter: str, summaries: Sequence[StrategySummary]
) -> dict[str, Figure]:
    label = _AXES[parameter]
    if parameter == "bandwidth":
        label += ", Hz" if scenario.channel.kind == "radio" else ", bit/s"
    figures = {}
    for name, measures in _FIGURES.get(parameter, _OTHER_FIGURES).items():
        figures[name], panels = _panels(len(measures))
        for axes, measure in zip(panels, measures, strict=True):
            with_budget = parameter == "energy_budget_joules" and measure is _ENERGY
            _draw_curves(axes, summaries, measure, "budget" if with_budget else None)
        panels[-1].set_xlabel(label)
    return figures


def _panels(count: int) -> tuple[Figure, list[Axes]]:
    figure = Figure(figsize=(_WIDTH, _HEIGHT * count), layout="constrained")
    panels = figure.subplots(count, 1, sharex=True, squeeze=False)
    return figure, list(panels[:, 0])


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
            values, medians, color=colour, marker="o", markersize=3, linewidth=1.5, label=strategy
        )
        lows, highs = [f.low for _, f in points], [f.high for _, f in points]
        axes.fill_between(values, lows, highs, color=colour, alpha=0.18, linewidth=0)
        drawn += medians
    axes.set_ylabel(measure.label)
    axes.grid(axis="y", alpha=0.25)
    values = sorted({summary.value for summary in summaries if summary.value is not None})
    if diagonal is not None:
        axes.plot(values, values, color=_BLACK, linewidth=0.8, linestyle=":", label=diagonal)
    if _is_wide(values):
        axes.set_xscale("log")
    if _is_wide(drawn):
        axes.set_yscale("log")
    else:
        axes.set_ylim(bottom=0)
    axes.legend(loc="center left", bbox_to_anchor=(1.01, 0.5), frameon=False)


def _draw_bars(axes: Axes, summaries: Sequence[StrategySummary], measure: _Measure) -> None:
    largest = 0.0
    for row, summary in enumerate(summaries):
        found = measure.value(summary)
        if found is None:
            axes.text(0, row, " infeasible", verticalalignment="center", color=_GREY)
            continue
        bars = axes.barh(
            row,
            found.median,
            height=0.6,
            color=_COLOURS[summary.strategy],
            xerr=[[found.median - found.low], [found.high - found.median]],
        )
        axes.bar_label(bars, [f"{found.median:.3g} {measure.unit}"], padding=5)
        largest = max(largest, found.high)
    axes.set_yticks(range(len(summaries)), [summary.strategy for summary in summaries])
    axes.invert_yaxis()
    axes.set_xlim(0, largest * 1.2 or 1)
    axes.set_xlabel(measure.label)


def _is_wide(values: Sequence[float]) -> bool:
    return bool(values) and min(values) > 0 and max(values) / min(values) > _RANGE_FOR_LOGARITHMS
