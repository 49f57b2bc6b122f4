"""Draws the main panels of the dashboards as one picture, from a Prometheus server that has scraped a job.

    python deploy/grafana/picture.py --prometheus URL --start UNIX --end UNIX docs/pictures/dashboards.png

Queries, units, titles and thresholds come from dashboards/*.json. matplotlib draws instead of Grafana.
`--event UNIX=TEXT` marks a point in time.
"""

import argparse
import json
import math
import re
import urllib.parse
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, MultipleLocator
from panels import Panel, panels, to_promql

mpl.use("Agg")
import matplotlib.pyplot as plt

ANSWERS = (
    "collapipe-pipeline/Slowest stage",
    "collapipe-pipeline/Bubble ratio of the worst cluster",
    "collapipe-links/Fullest link",
    "collapipe-training/Speed",
)
GRAPHS = (
    "collapipe-scheduler/Segments over time",
    "collapipe-training/Round time, predicted and observed",
    "collapipe-pipeline/Computing",
    "collapipe-pipeline/Waiting",
    "collapipe-links/Goodput",
    "collapipe-links/Use of the links",
)
STEP_SECONDS = 2.0
BACKGROUND, SURFACE, INK, FAINT = "#111217", "#181b1f", "#d8d9da", "#9aa0a6"
EVENT = "#ff7a66"
COLORS = {"green": "#3d9a50", "orange": "#e0752d", "red": "#d44a3a"}
LINES = (
    *("#73bf69", "#f2cc0c", "#5794f2", "#ff9830", "#b877d9", "#f2495c", "#56d6d6"),
    *("#ffffff", "#a16a3b", "#ff9ad5", "#4f7a28", "#9c9fa6", "#c4d600", "#7c6cf0"),
)
_PREFIXES = ((1e9, "G"), (1e6, "M"), (1e3, "k"))


@dataclass(frozen=True)
class Line:
    """One series of a panel."""

    name: str
    times: list[float]
    """Seconds since the start of the picture."""
    values: list[float]


def main() -> None:
    """Runs the command."""
    parser = argparse.ArgumentParser(description="Draws the main panels of the dashboards.")
    parser.add_argument("--prometheus", required=True, metavar="URL")
    parser.add_argument("--start", required=True, type=float, metavar="UNIX")
    parser.add_argument("--end", required=True, type=float, metavar="UNIX")
    parser.add_argument(
        "--at", type=float, metavar="UNIX", help="time of the large figures; default: --end"
    )
    parser.add_argument("--event", action="append", default=[], metavar="UNIX=TEXT")
    parser.add_argument("--title", default="CollaPipe dashboards")
    parser.add_argument("file", type=Path)
    draw(parser.parse_args())


def draw(arguments: argparse.Namespace) -> None:
    """Queries Prometheus and writes the picture."""
    url, start, end = arguments.prometheus, arguments.start, arguments.end
    at = arguments.at or end
    events = []
    for event in arguments.event:
        moment, _, words = event.partition("=")
        events.append((float(moment) - start, words))
    by_name = {panel.name: panel for panel in panels()}
    plt.rcParams.update({"font.size": 9, "text.color": INK, "font.family": "DejaVu Sans"})
    figure = plt.figure(figsize=(13.0, 10.0), facecolor=BACKGROUND)
    figure.text(0.05, 0.978, arguments.title, fontsize=13, fontweight="bold", va="center")
    shown = f"Time in minutes. The large figures show the time {_clock(at - start)}."
    figure.text(0.05, 0.956, shown, color=FAINT, va="center")
    for number, (moment, words) in enumerate(events):
        place = 0.956 - 0.02 * number
        text = f"┊ {_clock(moment)}  {words}"
        figure.text(0.985, place, text, color=EVENT, ha="right", va="center", weight="bold")
    grid = figure.add_gridspec(
        1, len(ANSWERS), left=0.05, right=0.985, top=0.925, bottom=0.815, wspace=0.06
    )
    for index, name in enumerate(ANSWERS):
        panel = by_name[name]
        (target,) = panel.targets
        axes = figure.add_subplot(grid[0, index])
        _draw_answer(axes, panel, _ask_now(url, target.expression, target.legend, at))
    # The space between the columns is for the legends.
    grid = figure.add_gridspec(
        len(GRAPHS) // 2,
        2,
        left=0.05,
        right=0.845,
        top=0.755,
        bottom=0.035,
        hspace=0.3,
        wspace=0.56,
    )
    for index, name in enumerate(GRAPHS):
        axes = figure.add_subplot(grid[index // 2, index % 2])
        panel = by_name[name]
        lines = [
            line
            for target in panel.targets
            for line in _ask_range(url, target.expression, target.legend, start, end)
        ]
        _draw_graph(axes, panel, lines, end - start)
        for moment, _ in events:
            axes.axvline(moment, color=EVENT, linewidth=1.2, linestyle=(0, (4, 2)))
    arguments.file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(arguments.file, dpi=96, facecolor=BACKGROUND)


def _draw_answer(axes: Axes, panel: Panel, found: list[tuple[str, float]]) -> None:
    """Draws a panel as Grafana draws a stat: the value and its legend, on the colour of its threshold."""
    name, value = found[0] if found else ("", math.nan)
    color = "green"
    for step in panel.document["fieldConfig"]["defaults"]["thresholds"]["steps"]:
        if step["value"] is None or value >= step["value"]:
            color = step["color"]
    axes.set_facecolor(COLORS[color])
    axes.set(xticks=[], yticks=[])
    axes.spines[:].set_visible(False)
    axes.set_title(panel.title, loc="left", fontsize=9.5, color=INK)
    text = "no data" if math.isnan(value) else _say(value, panel.unit)
    shows_name = panel.document["options"]["textMode"] == "value_and_name" and name
    style: dict[str, Any] = {"ha": "center", "va": "center", "color": "white"}
    axes.text(0.5, 0.6, text, fontsize=24 if len(text) < 10 else 19, weight="bold", **style)
    axes.text(0.5, 0.17, name if shows_name else "", fontsize=10.5, **style)


def _draw_graph(axes: Axes, panel: Panel, lines: list[Line], seconds: float) -> None:
    custom = panel.document["fieldConfig"]["defaults"].get("custom", {})
    axes.set_facecolor(SURFACE)
    axes.set_title(
        f"{panel.title}  ({panel.dashboard.removeprefix('collapipe-')})",
        loc="left",
        color=INK,
        fontsize=9.5,
    )
    lines = sorted(lines, key=lambda line: line.name)
    colors = {line.name: LINES[index % len(LINES)] for index, line in enumerate(lines)}
    where = "steps-post" if custom.get("lineInterpolation") == "stepAfter" else "default"
    if custom.get("stacking", {}).get("mode") == "normal":
        moments = sorted({moment for line in lines for moment in line.times})
        stacks = [_at_each(line, moments) for line in lines]
        axes.stackplot(
            moments,
            stacks,
            labels=[line.name for line in lines],
            colors=[colors[line.name] for line in lines],
            step="post" if where != "default" else None,
            alpha=0.85,
        )
    else:
        for line in lines:
            axes.plot(
                *_with_gaps(line),
                label=line.name,
                color=colors[line.name],
                linewidth=1.6,
                drawstyle=where,
            )
    axes.set_xlim(0, seconds)
    top = axes.get_ylim()[1]
    soft = custom.get("axisSoftMax")
    axes.set_ylim(0, max(top, soft or 0.0))
    if custom.get("thresholdsStyle", {}).get("mode") == "dashed":
        for step in panel.document["fieldConfig"]["defaults"]["thresholds"]["steps"]:
            if step["value"] is not None:
                axes.axhline(step["value"], color=COLORS[step["color"]], linestyle=":", linewidth=1)
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: _say(value, panel.unit)))
    axes.xaxis.set_major_locator(MultipleLocator(60 if seconds > 150 else 30))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: _clock(value)))
    axes.tick_params(colors=FAINT, labelsize=8, length=0)
    axes.grid(color="#2c3235", linewidth=0.6)
    axes.set_axisbelow(True)
    axes.spines[:].set_visible(False)
    axes.legend(
        loc="upper left",
        bbox_to_anchor=(1.0, 1.03),
        fontsize=7.5,
        facecolor=BACKGROUND,
        edgecolor="none",
        labelcolor=INK,
        handlelength=1.2,
        labelspacing=0.35,
    )


def _with_gaps(line: Line) -> tuple[list[float], list[float]]:
    """Returns times and values with a gap wherever data is missing for more than 30 s."""
    times, values = line.times[:1], line.values[:1]
    for moment, value in zip(line.times[1:], line.values[1:], strict=True):
        if moment - times[-1] > 30:
            times.append(moment)
            values.append(math.nan)
        times.append(moment)
        values.append(value)
    return times, values


def _at_each(line: Line, moments: Sequence[float]) -> list[float]:
    known = dict(zip(line.times, line.values, strict=True))
    return [known.get(moment, 0.0) for moment in moments]


def _clock(seconds: float) -> str:
    return f"{int(seconds) // 60}:{int(seconds) % 60:02d}"


def _ask(url: str, path: str, form: dict[str, str]) -> list[dict[str, Any]]:
    data = urllib.parse.urlencode(form).encode()
    with urllib.request.urlopen(f"{url}/api/v1/{path}", data, timeout=30) as answer:
        document = json.load(answer)
    rows: list[dict[str, Any]] = document["data"]["result"]
    return rows


def _ask_now(url: str, expression: str, legend: str, at: float) -> list[tuple[str, float]]:
    rows = _ask(url, "query", {"query": to_promql(expression), "time": f"{at:.3f}"})
    return [(_name(row["metric"], legend), float(row["value"][1])) for row in rows]


def _ask_range(url: str, expression: str, legend: str, start: float, end: float) -> list[Line]:
    form = {"query": to_promql(expression), "step": f"{STEP_SECONDS:g}"}
    form |= {"start": f"{start:.3f}", "end": f"{end:.3f}"}
    found = []
    for row in _ask(url, "query_range", form):
        points = [(float(at) - start, float(value)) for at, value in row["values"]]
        points = [point for point in points if not math.isnan(point[1])]
        if any(value for _, value in points):  # series that are always 0 are left out
            times, values = zip(*points, strict=True)
            found.append(Line(_name(row["metric"], legend), list(times), list(values)))
    return found


def _name(labels: dict[str, str], legend: str) -> str:
    return re.sub(r"\{\{\s*(\w+)\s*\}\}", lambda match: labels.get(match[1], ""), legend)


def _say(value: float, unit: str) -> str:
    """Formats a value as Grafana would, for the units of the drawn panels."""
    if unit == "percentunit":
        return f"{100 * value:.0f} %"
    if unit == "s":
        return f"{value:.3g} s" if value >= 1 or not value else f"{1e3 * value:.3g} ms"
    if unit == "bps":
        for factor, prefix in _PREFIXES:
            if value >= factor:
                return f"{value / factor:.3g} {prefix}bit/s"
        return f"{value:.3g} bit/s"
    return f"{value:.3g} {unit.removeprefix('suffix:').strip()}".strip()


if __name__ == "__main__":
    main()
