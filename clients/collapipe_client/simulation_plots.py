"""Plots of a simulation, as SVG: every curve is labelled where it ends, and its band is the 95 % confidence interval."""

from collections.abc import Callable, Sequence
from pathlib import Path

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from collapipe.simulation import Interval, Scenario, StrategySummary

Measure = Callable[[StrategySummary], Interval | None]

_COLORS = {
    "dssra": "#0b6e4f",
    "pipeline": "#d1495b",
    "titanic": "#2e5eaa",
    "vanilla_fl": "#b8860b",
    "centralized": "#6c757d",
    "proportional": "#7b4ba0",
}
_INK = "black"
_WIDTH, _HEIGHT = 6.4, 3.6  # inches, of one panel
_LABEL_GAP = 0.055  # least distance of two labels, in heights of the panel
_RANGE_FOR_LOGARITHMS = 8.0

_DELAY = "delay of a round, s"
_MEMORY = "most memory of a device, GB"
_ENERGY = "energy of the busiest device,\nJ a round"
_BACKLOG = "mean backlog, rounds' budgets"
_AXES = {
    "penalty_weight": "penalty weight V",
    "devices_per_cluster": "devices of a cluster",
    "bandwidth": "bandwidth",
    "heterogeneity": "spread of speeds (most times faster or slower)",
    "energy_budget_joules": "energy budget of a device, J a round",
}


def draw_plots(
    scenario: Scenario, summaries: Sequence[StrategySummary], directory: Path
) -> list[Path]:
    """Draws what a scenario shows.

    Without a sweep: delay and memory of each strategy. With one: delay and memory against its parameter, backlog
    against V, and energy against budgets.

    Returns:
        The files.
    """
    with matplotlib.rc_context(
        {
            "svg.hashsalt": scenario.name,  # same numbers, same file
            "svg.fonttype": "none",  # text stays text
            "font.size": 9,
            "axes.spines.top": False,
            "axes.spines.right": False,
        }
    ):
        figures = _compare(summaries) if scenario.sweep is None else _sweep(scenario, summaries)
        files = []
        for name, figure in figures.items():
            path = directory / f"{name}.svg"
            figure.savefig(path, format="svg", bbox_inches="tight", metadata={"Date": None})
            files.append(path)
    return files


def _compare(summaries: Sequence[StrategySummary]) -> dict[str, Figure]:
    figures = {
        "delay": _bars(summaries, _delay, _DELAY, "s"),
        "memory": _bars(summaries, _memory, _MEMORY, "GB"),
    }
    if any(summary.budget_joules for summary in summaries):
        figures["energy"] = _bars(summaries, lambda s: s.energy_joules_max, _ENERGY, "J")
        figures["backlog"] = _bars(summaries, lambda s: s.backlog, _BACKLOG, "")
    return figures


def _sweep(scenario: Scenario, summaries: Sequence[StrategySummary]) -> dict[str, Figure]:
    assert scenario.sweep is not None
    parameter = scenario.sweep.parameter
    label = _AXES[parameter]
    if parameter == "bandwidth":
        label += ", Hz" if scenario.channel.kind == "radio" else ", bit/s"
    figures: dict[str, Figure] = {}
    if parameter == "penalty_weight":
        figure, (above, below) = _panels(2)
        _curves(above, summaries, _delay, _DELAY)
        _curves(below, summaries, lambda s: s.backlog, _BACKLOG)
        below.set_xlabel(label)
        figures["delay-and-backlog"] = figure
    else:
        figures["delay"] = _one_panel(summaries, _delay, _DELAY, label)
    if parameter == "energy_budget_joules":
        figures["energy"] = _one_panel(
            summaries, lambda s: s.energy_joules_max, _ENERGY, label, diagonal="budget"
        )
        figures["backlog"] = _one_panel(summaries, lambda s: s.backlog, _BACKLOG, label)
    figures["memory"] = _one_panel(summaries, _memory, _MEMORY, label)
    return figures


def _delay(summary: StrategySummary) -> Interval | None:
    return summary.delay_seconds


def _memory(summary: StrategySummary) -> Interval | None:
    found = summary.memory_bytes
    return found and Interval(found.median / 1e9, found.low / 1e9, found.high / 1e9)


def _panels(count: int) -> tuple[Figure, list[Axes]]:
    figure = Figure(figsize=(_WIDTH, _HEIGHT * count), layout="constrained")
    panels = figure.subplots(count, 1, sharex=True, squeeze=False)
    return figure, list(panels[:, 0])


def _one_panel(
    summaries: Sequence[StrategySummary],
    measure: Measure,
    name: str,
    label: str,
    diagonal: str | None = None,
) -> Figure:
    figure, (axes,) = _panels(1)
    _curves(axes, summaries, measure, name, diagonal)
    axes.set_xlabel(label)
    return figure


def _curves(
    axes: Axes,
    summaries: Sequence[StrategySummary],
    measure: Measure,
    name: str,
    diagonal: str | None = None,
) -> None:
    """Draws a curve for each strategy; where it is infeasible there is a gap.

    Args:
        axes: Where.
        summaries: Of a sweep.
        measure: What is drawn.
        name: Of what is drawn.
        diagonal: Name of a line on which measure and swept value are equal; `None` for no such line.
    """
    ends: list[tuple[float, float, str]] = []
    drawn: list[float] = []
    for strategy in dict.fromkeys(summary.strategy for summary in summaries):
        points = sorted(
            (summary.value, found)
            for summary in summaries
            if summary.strategy == strategy
            and summary.value is not None
            and (found := measure(summary)) is not None
        )
        if not points:
            continue
        values = [value for value, _ in points]
        medians = [found.median for _, found in points]
        color = _COLORS[strategy]
        axes.plot(values, medians, color=color, marker="o", markersize=3, linewidth=1.5)
        lows, highs = [f.low for _, f in points], [f.high for _, f in points]
        axes.fill_between(values, lows, highs, color=color, alpha=0.18, linewidth=0)
        ends.append((values[-1], medians[-1], strategy))
        drawn += medians
    axes.set_ylabel(name)
    axes.grid(axis="y", alpha=0.25)
    values = sorted({summary.value for summary in summaries if summary.value is not None})
    if diagonal is not None:
        axes.plot(values, values, color=_INK, linewidth=0.8, linestyle=":")
        ends.append((values[-1], values[-1], diagonal))
    if _is_wide(values):
        axes.set_xscale("log")
    if _is_wide(drawn):
        axes.set_yscale("log")
    else:
        axes.set_ylim(bottom=0)
    _label_ends(axes, ends)


def _label_ends(axes: Axes, ends: Sequence[tuple[float, float, str]]) -> None:
    """Writes names right of the panel, at the heights where curves end, moved apart where they would overlap."""
    to_panel = axes.transData + axes.transAxes.inverted()
    heights = sorted(
        (float(to_panel.transform((value, end))[1]), strategy) for value, end, strategy in ends
    )
    least = 0.0
    for height, strategy in heights:
        least = max(height, least)
        axes.text(
            1.02,
            least,
            strategy,
            color=_COLORS.get(strategy, _INK),
            transform=axes.transAxes,
            verticalalignment="center",
        )
        least += _LABEL_GAP


def _bars(summaries: Sequence[StrategySummary], measure: Measure, name: str, unit: str) -> Figure:
    figure, (axes,) = _panels(1)
    labels, most = [], 0.0
    for row, summary in enumerate(summaries):
        labels.append(summary.strategy)
        found = measure(summary)
        if found is None:
            axes.text(0, row, " infeasible", verticalalignment="center", color="#6c757d")
            continue
        axes.barh(row, found.median, height=0.6, color=_COLORS[summary.strategy])
        axes.plot([found.low, found.high], [row, row], color=_INK, linewidth=1.2)
        axes.annotate(
            f"{found.median:.3g} {unit}",
            (max(found.high, found.median), row),
            xytext=(5, 0),
            textcoords="offset points",
            verticalalignment="center",
        )
        most = max(most, found.high)
    axes.set_yticks(range(len(labels)), labels)
    axes.invert_yaxis()
    axes.set_xlim(0, most * 1.2 or 1)
    axes.set_xlabel(name)
    return figure


def _is_wide(values: Sequence[float]) -> bool:
    return bool(values) and min(values) > 0 and max(values) / min(values) > _RANGE_FOR_LOGARITHMS
