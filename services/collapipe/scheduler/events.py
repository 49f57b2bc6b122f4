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
    """The events of one job, in order."""

    def __init__(self) -> None:
        self._started = time.monotonic()
        self._changed = threading.Condition()
        self._events: deque[Event] = deque(maxlen=_KEPT_EVENTS)
        self._num_events = 0
        self._closed = False

    def publish(self, event: Event) -> None:
        """Appends an event."""
        event.elapsed_seconds = time.monotonic() - self._started
        with self._changed:
            self._events.append(event)
            self._num_events += 1
            self._changed.notify_all()

    def close(self) -> None:
        """No event follows."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def watch(self, silence_seconds: float) -> Iterator[Event | None]:
        """Yields every event kept and to come, and `None` after each silence, until the log is closed."""
        position = 0
        while True:
            with self._changed:
                if position == self._num_events and not self._closed:
                    self._changed.wait(silence_seconds)
                oldest = self._num_events - len(self._events)
                news = list(self._events)[max(position - oldest, 0) :]
                position, closed = self._num_events, self._closed
            if closed and not news:
                return
            if news:
                yield from news
            else:
                yield None
