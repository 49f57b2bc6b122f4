"""The event log of a job, which any number of clients can watch."""

import threading
import time
import uuid
from collections import deque
from collections.abc import Iterator

from collapipe.v1 import scheduler_pb2

Event = scheduler_pb2.WatchJobResponse

_KEPT_EVENTS = 2000
"""Number of events kept for late watchers. A long job drops its oldest events."""


class EventLog:
    """The events of one job, in order. Of the progress events, only the last of each cluster is kept."""

    def __init__(self) -> None:
        self.log_id = uuid.uuid4().hex
        self._started = time.monotonic()
        self._changed = threading.Condition()
        self._events: deque[tuple[int, Event]] = deque(maxlen=_KEPT_EVENTS)
        self._progress: dict[int, tuple[int, Event]] = {}
        self._num_events = 0
        self._closed = False

    def publish(self, event: Event) -> None:
        """Appends an event, and sets its time and its place in the log."""
        event.elapsed_seconds = time.monotonic() - self._started
        with self._changed:
            self._num_events += 1
            event.log_id, event.number = self.log_id, self._num_events
            if event.HasField("progress"):
                self._progress[event.progress.cluster_index] = (self._num_events, event)
            else:
                self._events.append((self._num_events, event))
            self._changed.notify_all()

    def close(self) -> None:
        """Ends the log. Watchers stop after its last event."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def watch(self, silence_seconds: float, seen: int = 0) -> Iterator[Event | None]:
        """Yields all kept and future events until the log is closed.

        It also yields `None` whenever no event has arrived for `silence_seconds`.

        Args:
            seen: Number of the last event that is left out.
        """
        while True:
            with self._changed:
                if seen == self._num_events and not self._closed:
                    self._changed.wait(silence_seconds)
                kept = [*self._events, *self._progress.values()]
                new_events = sorted((e for e in kept if e[0] > seen), key=lambda e: e[0])
                seen, closed = self._num_events, self._closed
            yield from (event for _, event in new_events)
            if closed:
                return
            if not new_events:
                yield None
