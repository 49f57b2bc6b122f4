"""Draws a running job for a terminal of any size: the picture that `live_view` shows again and again."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from collapipe.printable import printable
from collapipe_client.quantities import say_duration, say_mbit
from collapipe_client.trouble import say_trouble
from collapipe_client.view_state import (
    PREPARATION,
    ClusterView,
    JobView,
    StageView,
    late_words,
    say_evaluation,
    say_privacy_loss,
)

_STATE_STYLES = {"succeeded": "green", "failed": "red", "cancelled": "yellow"}
_WIDE = 110
"""With fewer columns, details are left out."""
_COLUMNS_OF_ROUND = 26
_MOST_NAMED = 4
_MOST_CHARACTERS = 600
"""Of a paragraph. The rest is cut, because it would push clusters out of the picture."""
_LEAST_ROWS = 3
"""Lines of a cluster: its steps, one host, and how many more it has."""


@dataclass(frozen=True)
class _Now:
    """The parts of a snapshot, by host and link."""

    hosts: Mapping[str, Mapping[str, Any]]
    links: Mapping[tuple[str, str], Mapping[str, Any]]
    marked: Mapping[str, str]
    """What holds a cluster back, by the host that is marked for it: "stage", "window", "link", "forward link" or "backward link"."""
    others: Sequence[Mapping[str, Any]]
    num_more_others: int

    @classmethod
    def of(cls, snapshot: Mapping[str, Any]) -> "_Now":
        details = list(snapshot.get("details", {}).values())
        marked: dict[str, str] = {}
        for detail in details:
            kind, _, number = (detail["bottleneck"] or "").rpartition(" ")
            pipeline = detail["pipeline"]
            # The edge server serves every cluster, and is the last stage of each.
            index = int(number) if number.isdigit() else len(pipeline) - 1
            if kind and index < len(pipeline) and "id" in pipeline[index]:
                marked[pipeline[index]["id"]] = "stage" if kind == "edge" else kind
        return cls(
            {host["id"]: host for d in details for host in d["pipeline"] if "id" in host},
            {(link["from"], link["to"]): link for d in details for link in d["links"]},
            marked,
            [host for d in details for host in d["others"]],
            sum(detail["more"] for detail in details),
        )


def render(
    view: JobView,
    now: float,
    snapshot: Mapping[str, Any] | None = None,
    *,
    snapshot_age: float = 0.0,
    serving: tuple[int, int] = (0, 0),
    width: int = 120,
    height: int = 60,
) -> RenderableType:
    """Draws a job.

    Args:
        now: Unix time in seconds.
        snapshot: That of `CollaPipeClient.snapshot`. Without one, rates, memory and the time left are missing.
        snapshot_age: Seconds since it was taken.
        serving: How many processes of a testbed serve, and how many there are.
    """
    snapshot = snapshot or {}
    has_rounds = bool(view.clusters or view.num_rounds_committed)
    above: list[RenderableType] = [_headline(view)]
    if has_rounds:
        above.append(_whole_job(view, snapshot, snapshot_age))
    if view.state == "preparing" or not view.state:
        above += _preparation(view, serving)
    message = "" if view.message in PREPARATION else view.message
    if message:
        above.append(_paragraph(message, _STATE_STYLES.get(view.state, "yellow")))
    if view.trouble is not None and (trouble := say_trouble(view.trouble, now, view.message)):
        above.append(_paragraph(trouble, "yellow"))
    below = [] if view.ended else _facts(view, snapshot, _Now.of(snapshot))
    if view.change:
        below.append(_paragraph(f"plan of {view.change}"))
    if view.rounds:
        below.append(_history(view, width))
    if view.evaluation is not None:
        below.append(_line(f"  {say_evaluation(view.evaluation)}", "bold"))
    if view.privacy_loss is not None:
        below.append(_line(f"  {say_privacy_loss(view.privacy_loss)}"))
    room = height - 1 - sum(_num_lines(part, width) for part in (*above, *below))
    return Group(*above, *_clusters(view, _Now.of(snapshot), room, width), *below)


def _headline(view: JobView) -> Text:
    text = _line(view.name or "job", "bold")
    text.append(f"  {view.state or 'starting'}", style=_STATE_STYLES.get(view.state, "cyan"))
    if view.round_index is not None and not view.ended:
        text.append(f"  round {view.round_index + 1}/{view.num_rounds}")
        if view.attempt:
            text.append(f" (attempt {view.attempt + 1})", style="yellow")
    elif view.num_rounds:
        text.append(f"  {view.num_rounds_committed}/{view.num_rounds} rounds committed")
    if late_words(view):
        text.append(f"  last round {late_words(view)}", style="yellow")
    text.append(f"  {say_duration(view.elapsed_seconds)}", style="dim")
    return text


def _whole_job(view: JobView, snapshot: Mapping[str, Any], snapshot_age: float) -> RenderableType:
    """Draws the part of the job that is done, and the time that is left."""
    shares = [c.steps_done / c.local_steps for c in view.clusters if c.local_steps]
    is_under_way = view.round_index is not None and view.round_index >= view.num_rounds_committed
    part = sum(shares) / len(shares) if shares and is_under_way else 0.0
    done = min((view.num_rounds_committed + part) / (view.num_rounds or 1), 1.0)
    facts = f"{done:.0%}"
    ends = (snapshot.get("status") or {}).get("ends")
    if ends and not view.ended and all(ends.values()):
        # The clock of the scheduler may differ from that of this machine.
        left = {name: at - snapshot["now"] - snapshot_age for name, at in ends.items()}
        low, middle, high = (max(left[name], 0.0) for name in ("low", "middle", "high"))
        facts += f"  {say_duration(middle)} left"
        if say_duration(low) != say_duration(high):
            facts += f" ({say_duration(low)} to {say_duration(high)})"
        if snapshot["status"].get("ends_by") == "the plan":
            facts += ", by the plan"
    return _row("  whole job", ProgressBar(total=1.0, completed=done, width=20), facts)


def _preparation(view: JobView, serving: tuple[int, int]) -> list[RenderableType]:
    """Draws the steps until the first round."""
    num_serving, num_processes = serving
    table = Table.grid(padding=(0, 1))
    if num_processes:
        bar = ProgressBar(total=num_processes, completed=num_serving, width=12)
        table.add_row("  starting processes", bar, f"{num_serving} of {num_processes}")
    began = view.steps_began
    for index, name in enumerate(PREPARATION):
        after = next((began[i] for i in range(index + 1, len(PREPARATION)) if i in began), None)
        if after is not None:
            took = f"{after - began[index]:.1f} s" if index in began else "done before"
            table.add_row(f"  {name}", ProgressBar(total=1, completed=1, width=12), took)
        elif index in began:
            seconds = f"{view.elapsed_seconds - began[index]:.0f} s so far"
            table.add_row(f"  {name}", ProgressBar(total=None, pulse=True, width=12), seconds)
        else:
            bar = ProgressBar(total=1, completed=0, width=12)
            table.add_row(Text(f"  {name}", style="dim"), bar, "")
    return [table]


def _facts(view: JobView, snapshot: Mapping[str, Any], now: _Now) -> list[RenderableType]:
    """Says what holds the job back, what it waits for, and which hosts take no part."""
    lines: list[RenderableType] = []
    held_back = (snapshot.get("job") or {}).get("held_back") or ()
    if held_back and view.round_index is not None:
        share = held_back[0].get("share")
        source = "" if held_back[0].get("is_measured") else ", as predicted"
        busy = "" if share is None else f", {share:.0%} busy{source}"
        lines.append(_paragraph(f"bottleneck{busy}: {held_back[0]['by']}", "red"))
    waiting = [c for c in view.clusters if c.waiting_for and view.round_index is not None]
    if waiting and not view.message:
        slowest = min(waiting, key=lambda c: c.steps_done / (c.local_steps or 1))
        lines.append(_line(f"  waits for: cluster {slowest.cluster_index}, {slowest.waiting_for}"))
    by_state: dict[str, list[str]] = {}
    # The line about the trouble of the job tells of these.
    told = {host.host_id for host in view.trouble.missing} if view.trouble is not None else set()
    for host in (*now.hosts.values(), *now.others):
        if host.get("id") in told:
            continue
        states = ("lost", "suspected", "idle") if view.clusters else ("lost", "suspected")
        if host.get("state") in states:
            by_state.setdefault(host["state"], []).append(host["id"])
    if by_state:
        said = [f"{state}: {_names(ids)}" for state, ids in by_state.items()]
        more = f"; {now.num_more_others} more hosts" if now.num_more_others else ""
        style = "yellow" if by_state.keys() != {"idle"} else ""
        lines.append(_line(f"  {'; '.join(said)}{more}", style))
    return lines


def _history(view: JobView, width: int) -> Text:
    shown = view.rounds[-max(1, (width - 9) // _COLUMNS_OF_ROUND) :]
    said = [
        f"{one.number}: {one.seconds:.1f} s"
        + (f", loss {one.loss:.4f}" if one.loss is not None else "")
        for one in shown
    ]
    return _line(f"  rounds {'   '.join(said)}")


def _clusters(view: JobView, now: _Now, room: int, width: int) -> Iterable[RenderableType]:
    """Draws as many clusters and hosts as there is room for, the slowest ones, and counts the others."""
    clusters = () if view.ended else view.clusters
    wanted = sum(1 + len(cluster.stages) for cluster in clusters)
    rows = [1 + len(cluster.stages) for cluster in clusters]
    if wanted > room and clusters:
        num_shown = max(1, min(len(clusters), (room - 1) // _LEAST_ROWS))
        behind = sorted(
            clusters,
            key=lambda c: (
                c.steps_done / (c.local_steps or 1),
                not any(stage.host_id in now.marked for stage in c.stages),
            ),
        )
        shown = {cluster.cluster_index for cluster in behind[:num_shown]}
        hidden = [c for c in clusters if c.cluster_index not in shown]
        each = max(_LEAST_ROWS, (room - bool(hidden)) // num_shown)
        clusters = tuple(c for c in clusters if c.cluster_index in shown)
        rows = [each] * len(clusters)
    else:
        hidden = []
    for cluster, most in zip(clusters, rows, strict=True):
        yield _cluster_line(cluster, is_trained=view.num_rounds_committed == view.num_rounds)
        yield _stage_table(cluster, now, most - 1, width)
    if hidden:
        steps = [cluster.steps_done for cluster in hidden]
        at = "to".join(dict.fromkeys(f" {step} " for step in (min(steps), max(steps))))
        total = hidden[0].local_steps or "?"
        yield _line(f"  and {len(hidden)} more clusters, at step{at}of {total}", "dim")


def _cluster_line(cluster: ClusterView, *, is_trained: bool) -> RenderableType:
    facts = f"step {cluster.steps_done}/{cluster.local_steps or '?'}"
    if is_trained:
        facts = "evaluates the model"
    elif cluster.loss is not None:
        facts += f"  loss {cluster.loss:.4f}"
    if cluster.samples_per_second and not is_trained:
        facts += f"  {cluster.samples_per_second:.1f} samples/s"
    bar = ProgressBar(total=cluster.local_steps or 1, completed=cluster.steps_done, width=20)
    return _row(f"  cluster {cluster.cluster_index}", bar, facts)


def _stage_table(cluster: ClusterView, now: _Now, most: int, width: int) -> RenderableType:
    """Draws the hosts of a pipeline in at most so many lines: the busiest ones, and how many more there are."""
    busy = {s.host_id: _busy(s, now) for s in cluster.stages}
    shown = {s.host_id for s in cluster.stages}
    if len(cluster.stages) > most:
        # The one that holds the cluster back comes first.
        ranked = sorted(shown, key=lambda name: (name in now.marked, busy[name]), reverse=True)
        shown = set(ranked[: max(1, most - 1)])
    table = Table.grid(padding=(0, 1))
    for part in ("mark", "host", "units", "busy", "memory", "link"):
        justify, least = _COLUMNS.get(part, (None, None))
        table.add_column(
            no_wrap=True, overflow="ellipsis", justify=justify or "left", min_width=least
        )
    next_of = {one.host_id: other.host_id for one, other in pairwise(cluster.stages)}
    for stage in cluster.stages:
        if stage.host_id not in shown:
            continue
        mark, share = now.marked.get(stage.host_id, ""), busy[stage.host_id]
        is_slow = mark in ("stage", "window")
        link = now.links.get((stage.host_id, next_of.get(stage.host_id, "")), {})
        rates = _say_link(link, width)
        table.add_row(
            Text("  >" if mark else "   ", style="red"),
            Text(printable(stage.host_id), style="red" if is_slow else ""),
            Text(stage.units),
            Text(f"{share:4.0%} busy", style="red" if is_slow else ""),
            _say_memory(now.hosts.get(stage.host_id, {}), width),
            Text(rates, style="red" if mark.endswith("link") else ""),
        )
    rest = [busy[s.host_id] for s in cluster.stages if s.host_id not in shown]
    if not rest:
        return table
    plural = "s" if len(rest) > 1 else ""
    more = f"      and {len(rest)} more host{plural}, {min(rest):.0%} to {max(rest):.0%} busy"
    return Group(table, _line(more, "dim"))


_COLUMNS: Mapping[str, tuple[Any, int]] = {
    "mark": ("left", 3),
    "busy": ("right", 9),
    "memory": ("right", 10),
}
"""Where the text of a column stands, and its least width."""


def _busy(stage: StageView, now: _Now) -> float:
    share = now.hosts.get(stage.host_id, {}).get("busy")
    return stage.busy_ratio if share is None else float(share)


def _say_memory(host: Mapping[str, Any], width: int) -> str:
    """Says what the plan needs of the memory that is allowed, or what the process has held."""
    needs, limit, held = (host.get(f"{name}_bytes") for name in ("needs", "limit", "memory"))
    if limit and needs is not None:
        of = "/" if width < _WIDE else " of "
        unit, size = ("GB", 1e9) if limit >= 1e9 else ("MB", 1e6)
        return f"{needs / size:.3g}{of}{limit / size:.3g} {unit}"
    return f"{held / 1e6:.0f} MB" if held else ""


def _say_link(link: Mapping[str, Any], width: int) -> str:
    """Says what a link carries to the next host and back, and its limit if there is room."""
    rates = [link.get("forward_bps"), link.get("backward_bps")]
    if not any(rates):
        return ""
    forward, backward = (say_mbit(rate or 0.0) for rate in rates)
    if width < _WIDE:
        return f"->{forward} <-{backward} Mbit/s"
    limit = link.get("limit_bps")
    return f"-> {forward} <- {backward} Mbit/s" + (f" of {say_mbit(limit)}" if limit else "")


def _names(ids: Sequence[str]) -> str:
    more = f" and {len(ids) - _MOST_NAMED} more" if len(ids) > _MOST_NAMED else ""
    return ", ".join(ids[:_MOST_NAMED]) + more


def _line(text: str, style: str = "") -> Text:
    """Returns text for one line. What does not fit ends with dots."""
    return Text(printable(text), style=style, no_wrap=True, overflow="ellipsis")


def _paragraph(text: str, style: str = "") -> Padding:
    """Returns text that goes on in further lines, with the same indent."""
    words = printable(" ".join(text.split()))
    if len(words) > _MOST_CHARACTERS:
        words = f"{words[: _MOST_CHARACTERS - 1]}…"
    return Padding(Text(words, style=style), (0, 0, 0, 2), expand=False)


def _row(name: str, bar: ProgressBar, facts: str) -> Table:
    line = Table.grid(padding=(0, 1))
    line.add_column(no_wrap=True, min_width=11)
    line.add_column(no_wrap=True, min_width=bar.width)
    line.add_column(no_wrap=True, overflow="ellipsis")
    line.add_row(name, bar, facts)
    return line


def _num_lines(part: RenderableType, width: int) -> int:
    if isinstance(part, Padding) and isinstance(part.renderable, Text):
        return 1 + len(part.renderable.plain) // max(width - 3, 1)
    return part.row_count if isinstance(part, Table) else 1
