"""Shows a running job: as a live picture in a terminal, as lines of text elsewhere, or as lines of JSON."""

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from rich.console import Console, RenderableType
from rich.live import Live
from typing_extensions import Self

from collapipe.v1.scheduler_pb2 import WatchJobResponse
from collapipe_client.live_picture import render
from collapipe_client.message_json import to_document
from collapipe_client.reporting import Terminal
from collapipe_client.trouble import incident_lines, is_warning
from collapipe_client.view_state import JobView, apply_event, progress_lines

_SERVING_SECONDS = 5.0
"""Least time between two lines about how many processes serve."""
_MOST_WANTED = 12
"""Clusters whose hosts and links a snapshot has, at most."""


class Display:
    """Shows the events of a job. Use it in `with`.

    Args:
        console: Where notes are printed.
    """

    shows_snapshots = False

    def __init__(self, console: Console) -> None:
        self.view = JobView()
        """The state of the job after the events so far."""
        self._console = console
        self._noted: set[str] = set()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        pass

    def show(self, event: WatchJobResponse) -> None:
        """Updates the view, and shows the event."""
        self.view = apply_event(self.view, event)

    def take(self, snapshot: Mapping[str, Any]) -> None:
        """Shows a snapshot of the job: that of `CollaPipeClient.snapshot`."""

    def wanted_clusters(self) -> Sequence[int]:
        """Returns the clusters whose hosts and links the next snapshot should have: those that are furthest behind."""
        behind = sorted(self.view.clusters, key=lambda one: one.steps_done / (one.local_steps or 1))
        return [cluster.cluster_index for cluster in behind[:_MOST_WANTED]]

    def serving(self, num_serving: int, num_processes: int) -> None:
        """Shows how many processes of a testbed that starts serve already."""

    def note(self, message: str, *, is_warning: bool = False) -> None:
        """Shows a message that is not an event of the job."""
        self._noted.add(message)
        self._console.print(message, markup=False, highlight=False, soft_wrap=True)

    def _incident_lines(self, event: WatchJobResponse) -> list[str]:
        """Returns the lines of an event, without what was known of the data before the job began."""
        return [line for line in incident_lines(event) if line not in self._noted]


def make_display(as_json: bool) -> Display:
    """Chooses a display: JSON if asked for, a live picture in a terminal, and lines of text elsewhere."""
    console, notes = Terminal(), Terminal(stderr=True)
    if as_json:
        return JsonDisplay(notes)
    return LiveDisplay(console) if console.is_terminal else PlainDisplay(console, notes)


class JsonDisplay(Display):
    """Prints each event as a line of JSON. Notes go to the console, which is that of stderr."""

    def show(self, event: WatchJobResponse) -> None:
        super().show(event)
        kind = event.WhichOneof("event")
        if kind is not None:
            print(json.dumps(event_document(kind, event)), flush=True)


class PlainDisplay(Display):
    """Prints a line for each event, for a log file or a pipe. No line is printed twice in a row. Notes go to stderr."""

    def __init__(self, console: Console, notes: Console) -> None:
        super().__init__(notes)
        self._lines = console
        self._last = ""
        self._serving_at, self._num_serving = time.monotonic(), 0

    def show(self, event: WatchJobResponse) -> None:
        before = self.view
        super().show(event)
        for line in [*self._incident_lines(event), *progress_lines(before, self.view)]:
            if line != self._last:
                timed = f"[{self.view.elapsed_seconds:7.1f} s] {line}"
                self._lines.print(timed, markup=False, highlight=False, soft_wrap=True)
            self._last = line

    def serving(self, num_serving: int, num_processes: int) -> None:
        is_due = time.monotonic() - self._serving_at > _SERVING_SECONDS
        if is_due and num_serving != self._num_serving:
            self._serving_at, self._num_serving = time.monotonic(), num_serving
            self.note(f"{num_serving} of {num_processes} processes serve")


class LiveDisplay(Display):
    """Redraws a picture of the job four times a second. Notes and incidents appear above it."""

    shows_snapshots = True

    def __init__(self, console: Console) -> None:
        super().__init__(console)
        self._snapshot: Mapping[str, Any] = {}
        self._taken_at = 0.0
        self._serving = 0, 0
        self._heard_at = time.monotonic()
        self._live = Live(console=console, refresh_per_second=4, get_renderable=self._picture)

    def __enter__(self) -> Self:
        self._live.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._live.stop()

    def show(self, event: WatchJobResponse) -> None:
        super().show(event)
        if event.number:  # Not only a sign of life.
            self._heard_at = time.monotonic()
        for line in self._incident_lines(event):
            line = f"[{self.view.elapsed_seconds:7.1f} s] {line}"
            self.note(line, is_warning=is_warning(event))

    def take(self, snapshot: Mapping[str, Any]) -> None:
        self._snapshot, self._taken_at = snapshot, time.monotonic()

    def serving(self, num_serving: int, num_processes: int) -> None:
        self._serving = num_serving, num_processes

    def note(self, message: str, *, is_warning: bool = False) -> None:
        self._noted.add(message)
        style = "yellow" if is_warning else ""
        self._console.print(message, style=style, markup=False, highlight=False)

    def _picture(self) -> RenderableType:
        now, view = time.monotonic(), self.view
        if not view.ended:  # The clock goes on between events.
            view = replace(view, elapsed_seconds=view.elapsed_seconds + now - self._heard_at)
        return render(
            view,
            time.time(),
            self._snapshot,
            snapshot_age=now - self._taken_at,
            serving=self._serving,
            width=self._console.width,
            height=self._console.height,
        )


def event_document(kind: str, event: WatchJobResponse) -> dict[str, object]:
    """Turns an event into one flat document with its kind, its time and its fields."""
    return {
        "event": kind,
        "elapsed_seconds": event.elapsed_seconds,
        **to_document(getattr(event, kind)),
    }
