"""Shows a running job: as a live picture in a terminal, as lines of text elsewhere, or as lines of JSON."""

import json
import time

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text
from typing_extensions import Self

from collapipe.v1.scheduler_pb2 import WatchJobResponse
from collapipe_client.message_json import to_document
from collapipe_client.trouble import incident_lines, say_trouble
from collapipe_client.view_state import (
    ClusterView,
    JobView,
    apply_event,
    late_words,
    progress_lines,
    say_evaluation,
    say_privacy_loss,
)

_STEP_BAR_WIDTH = 24
_BUSY_BAR_WIDTH = 12
_STATE_STYLES = {"succeeded": "green", "failed": "red", "cancelled": "yellow"}


class Display:
    """Shows the events of a job. Use it in `with`."""

    def __init__(self, console: Console) -> None:
        self.view = JobView()
        """The state of the job after the events so far."""
        self._console = console

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        pass

    def show(self, event: WatchJobResponse) -> None:
        """Updates the view, and shows the event."""
        self.view = apply_event(self.view, event)

    def note(self, message: str) -> None:
        """Shows a message that is not an event of the job."""
        self._console.print(message, markup=False, highlight=False, soft_wrap=True)


def make_display(console: Console, as_json: bool) -> Display:
    """Chooses a display: JSON if asked for, a live picture in a terminal, and lines of text elsewhere."""
    if as_json:
        return JsonDisplay(Console(stderr=True))
    return LiveDisplay(console) if console.is_terminal else PlainDisplay(console)


class JsonDisplay(Display):
    """Prints each event as a line of JSON. Notes go to the console, which is that of stderr."""

    def show(self, event: WatchJobResponse) -> None:
        super().show(event)
        kind = event.WhichOneof("event")
        if kind is not None:
            print(json.dumps(event_document(kind, event)), flush=True)


class PlainDisplay(Display):
    """Prints lines for a log file or a pipe."""

    def show(self, event: WatchJobResponse) -> None:
        before = self.view
        super().show(event)
        for line in [*incident_lines(event), *progress_lines(before, self.view)]:
            self.note(f"[{self.view.elapsed_seconds:7.1f} s] {line}")


class LiveDisplay(Display):
    """Redraws a picture of the job four times a second. Notes and incidents appear above it."""

    def __init__(self, console: Console) -> None:
        super().__init__(console)
        self._live = Live(
            console=console,
            refresh_per_second=4,
            get_renderable=lambda: render(self.view, time.time()),
        )

    def __enter__(self) -> Self:
        self._live.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._live.stop()

    def show(self, event: WatchJobResponse) -> None:
        super().show(event)
        for line in incident_lines(event):
            self.note(f"[{self.view.elapsed_seconds:7.1f} s] {line}")

    def note(self, message: str) -> None:
        self._console.print(message, markup=False, highlight=False)


def event_document(kind: str, event: WatchJobResponse) -> dict[str, object]:
    """Turns an event into one flat document with its kind, its time and its fields."""
    return {
        "event": kind,
        "elapsed_seconds": event.elapsed_seconds,
        **to_document(getattr(event, kind)),
    }


def render(view: JobView, now: float) -> RenderableType:
    """Draws a job. `now` is the Unix time in seconds."""
    parts: list[RenderableType] = [_headline(view)]
    if view.message:
        parts.append(Text(f"  {view.message}", style=_STATE_STYLES.get(view.state, "yellow")))
    if view.trouble is not None:
        trouble = say_trouble(view.trouble, now, view.message)
        parts.append(Text(f"  {trouble}", style="yellow"))
    for cluster in view.clusters:
        parts += [_cluster_line(cluster, view.ended), _stage_table(cluster)]
    if view.evaluation is not None:
        parts.append(Text(f"  {say_evaluation(view.evaluation)}", style="bold"))
    if view.privacy_loss is not None:
        parts.append(Text(f"  {say_privacy_loss(view.privacy_loss)}"))
    return Group(*parts)


def _headline(view: JobView) -> RenderableType:
    text = Text()
    text.append(view.name or "job", style="bold")
    text.append(f"  {view.state or 'submitted'}", style=_STATE_STYLES.get(view.state, "cyan"))
    if view.round_index is not None and not view.ended:
        text.append(f"  round {view.round_index + 1}/{view.num_rounds}")
        if view.attempt:
            text.append(f" (attempt {view.attempt + 1})", style="yellow")
    elif view.num_rounds:
        text.append(f"  {view.num_rounds_committed}/{view.num_rounds} rounds committed")
    if late_words(view):
        text.append(f"  last round {late_words(view)}", style="yellow")
    text.append(f"  {view.elapsed_seconds:.0f} s", style="dim")
    return text


def _cluster_line(cluster: ClusterView, job_ended: bool) -> RenderableType:
    facts = Text(f"step {cluster.steps_done}/{cluster.local_steps or '?'}")
    if cluster.loss is not None:
        facts.append(f"  loss {cluster.loss:.4f}")
    if cluster.samples_per_second:
        facts.append(f"  {cluster.samples_per_second:.1f} samples/s")
    if cluster.waiting_for and not job_ended:
        facts.append(f"  {cluster.waiting_for}", style="yellow")
    steps = ProgressBar(
        total=cluster.local_steps or 1, completed=cluster.steps_done, width=_STEP_BAR_WIDTH
    )
    line = Table.grid(padding=(0, 1))
    line.add_row(f"  cluster {cluster.cluster_index}", steps, facts)
    return line


def _stage_table(cluster: ClusterView) -> RenderableType:
    table = Table.grid(padding=(0, 1))
    for stage in cluster.stages:
        table.add_row(
            "   ",
            Text(stage.host_id),
            Text(stage.units),
            ProgressBar(total=1.0, completed=stage.busy_ratio, width=_BUSY_BAR_WIDTH),
            f"{100 * stage.busy_ratio:.0f} % busy",
        )
    return table
