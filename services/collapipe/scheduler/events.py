"""What happened in a job, for everybody who watches it."""

import threading
import time
from collections import deque
from collections.abc import Iterator

from collapipe.v1 import scheduler_pb2

Event = scheduler_pb2.WatchJobResponse

_KEPT_EVENTS = 2000
"""Events that a late watcher still gets; a long job forgets its oldest."""


class EventLog:
    """The events of one job, in order. Of each cluster's progress only the last is kept."""

    def __init__(self) -> None:
        self._started = time.monotonic()
        self._changed = threading.Condition()
        self._events: deque[tuple[int, Event]] = deque(maxlen=_KEPT_EVENTS)
        self._progress: dict[int, tuple[int, Event]] = {}
        self._num_events = 0
        self._closed = False

    def publish(self, event: Event) -> None:
        """Appends an event."""
        event.elapsed_seconds = time.monotonic() - self._started
        with self._changed:
            self._num_events += 1
            if event.HasField("progress"):
                self._progress[event.progress.cluster_index] = (self._num_events, event)
            else:
                self._events.append((self._num_events, event))
            self._changed.notify_all()

    def close(self) -> None:
        """No event follows."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def watch(self, silence_seconds: float) -> Iterator[Event | None]:
        """Yields every event kept and to come, and `None` after each silence, until the log is closed."""
        seen = 0
        while True:
            with self._changed:
                if seen == self._num_events and not self._closed:
                    self._changed.wait(silence_seconds)
                kept = [*self._events, *self._progress.values()]
                news = sorted((item for item in kept if item[0] > seen), key=lambda item: item[0])
                seen, closed = self._num_events, self._closed
            yield from (event for _, event in news)
            if closed:
                return
            if not news:
                yield None
