"""Draws the curves of a job, and the parts of its rounds."""

from collections.abc import Mapping, Sequence

from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from collapipe_client.job_report import PARTS, JobRecords, parts_of
from collapipe_client.plot_files import Plot, panels, style

_COLOURS = ("#4a7fd0", "#d1495b", "#1a9a6c", "#b8860b", "#9a6cc0", "#1296a8", "#7d8790")
"""They can be told apart from a white and from a dark background."""
_MOST_CHARACTERS = 60
"""Of a name in a plot. Longer ones would make the curves small."""
_MOST_MARKED = 40
"""Curves with more points have no marks."""
_MOST_QUEUES = len(_COLOURS)

Curve = tuple[Sequence[float], Sequence[float]]
"""The x and the y values."""


def draw_plots(records: JobRecords) -> list[Plot]:
    """Draws everything that the records have values for. Without a committed round, that is nothing."""
    rounds = records.rounds
    plots = []
    places = [place for place, _ in records.losses]
    if places:
        plots.append(
            _curves(
                records,
                "loss",
                "Loss",
                "loss",
                {"mean over the clusters": (places, [loss for _, loss in records.losses])},
                "of each step. Whole numbers on the axis are ends of rounds.",
            )
        )
    for name in records.metrics:
        curve = records.curve("metrics", name)
        defined = f"{records.definitions[name]}; " if name in records.definitions else ""
        caption = f"{defined}on the held-out rows, after each round that measured it."
        title = name.replace("_", " ")
        plots.append(
            _curves(
                records,
                f"metric-{name}",
                f"{title[0].upper()}{title[1:]}",
                name,
                {f"{name} on held-out rows": curve},
                caption,
            )
        )
    speed = {"all clusters": records.curve("samples_per_second")}
    caption = "that all clusters together trained in a second of training."
    plots.append(
        _curves(records, "speed", "Samples per second", "samples/s", speed, caption, from_zero=True)
    )
    times = {
        "took": records.curve("seconds_without_evaluation"),
        "predicted": records.curve("predicted_seconds"),
    }
    caption = "without its evaluation, as it was, and as the scheduler predicted it."
    plots.append(
        _curves(records, "time", "Time of a round", "time, s", times, caption, from_zero=True)
    )
    plots.append(_parts(records))
    queues = sorted({host for r in rounds for host in r.get("queues", ())})[:_MOST_QUEUES]
    if queues:
        curves = {host: records.curve("queues", host) for host in queues}
        caption = "Energy that each device has used beyond its budget so far."
        unit = "backlog, budgets of a round"
        plots.append(_curves(records, "queues", "Energy backlog", unit, curves, caption))
    return [plot for plot in plots if plot is not None]


def _curves(
    records: JobRecords,
    name: str,
    title: str,
    label: str,
    curves: Mapping[str, Curve],
    caption: str,
    *,
    from_zero: bool = False,
) -> Plot | None:
    """Draws curves over the rounds; returns `None` if none has a point."""
    drawn = {what: curve for what, curve in curves.items() if curve and len(curve[0])}
    if not drawn:
        return None
    title, label = _cut(title), _cut(label)
    with style(name):
        figure, (axes,) = panels(title, records.subtitle)
        for colour, (what, (x, y)) in zip(_COLOURS, drawn.items(), strict=False):
            marker = "o" if len(x) <= _MOST_MARKED else ""
            dashes = "--" if what == "predicted" else "-"
            axes.plot(
                x,
                y,
                dashes,
                color=colour,
                linewidth=1.5,
                marker=marker,
                markersize=3,
                label=_cut(what),
            )
        _finish(axes, label, from_zero)
        figure.legend(loc="outside lower left", ncols=2, frameon=False, fontsize=8)
    first = "" if caption[0].isupper() else f"{title} "
    return Plot(name, title, f"{first}{caption}", figure)


def _cut(name: str) -> str:
    return name if len(name) <= _MOST_CHARACTERS else f"{name[: _MOST_CHARACTERS - 1]}…"


def _parts(records: JobRecords) -> Plot | None:
    """Draws bars of the parts of each round, in the cluster that took longest."""
    parts = {r["round"]: found for r in records.rounds if (found := parts_of(r))}
    if not parts:
        return None
    title = "Parts of a round"
    with style("parts"):
        figure, (axes,) = panels(title, records.subtitle)
        base = dict.fromkeys(parts, 0.0)
        for colour, name in zip(_COLOURS, (*PARTS.values(), "other"), strict=False):
            heights = [found[name] for found in parts.values()]
            width = 0.8 * records.every
            axes.bar(
                list(parts), heights, width, bottom=list(base.values()), color=colour, label=name
            )
            base = {number: base[number] + found[name] for number, found in parts.items()}
        _finish(axes, "time, s", from_zero=True)
        figure.legend(loc="outside lower left", ncols=3, frameon=False, fontsize=8)
    caption = (
        "What each round was spent on, in the cluster that took longest. “other” is the average, the commit and what the "
        "scheduler did."
    )
    return Plot("parts", title, caption, figure)


def _finish(axes: Axes, label: str, from_zero: bool) -> None:
    axes.set_xlabel("round")
    axes.set_ylabel(label)
    axes.grid(axis="y", alpha=0.25)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    if from_zero:
        axes.set_ylim(bottom=0)
