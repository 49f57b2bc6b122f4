"""The event log of a job, which any number of clients can watch."""

import itertools
import random
import threading
import time
import uuid
from collections import deque
from collections.abc import Iterable, Iterator

from collapipe.v1 import scheduler_pb2

Event = scheduler_pb2.WatchJobResponse

_KEPT_EVENTS, _KEPT_BYTES = 2000, 8 << 20
"""Number and bytes of the events kept for late watchers. A long or large job drops its oldest events, but keeps the last one."""

_RARE = ("incident", "data_note", "warning")
_RARE_SHARE = 4
"""These kinds of events have limits of their own, so that frequent events do not displace them: both limits, divided by this."""

_PROGRESS_SHARE = 0.1
"""Share of a processor core that progress may take for all watchers of a job together."""

_MESSAGE_SECONDS, _REPORT_SECONDS = 2e-4, 5e-6
"""About the processor time for a message to a watcher, and for the progress of each cluster in it (782 bytes, with 11 stages)."""

_BATCH_BYTES = 256 << 10
"""Most bytes of a batch, without the few bytes of its frame. A larger event is sent alone."""

_LEAST_PAUSE_SECONDS = 0.2
"""Least mean time from one progress of a watcher to the next, unless another event comes."""


class _Kept:
    """The last events of some kinds, with their numbers.

    Args:
        share: Its part of both limits, as a divisor.
    """

    def __init__(self, share: int) -> None:
        self._share = share
        self._events: deque[tuple[int, Event]] = deque()
        self._num_bytes = 0

    def append(self, number: int, event: Event) -> None:
        self._events.append((number, event))
        self._num_bytes += event.ByteSize()
        while len(self._events) > 1 and (
            len(self._events) > _KEPT_EVENTS // self._share
            or self._num_bytes > _KEPT_BYTES // self._share
        ):
            self._num_bytes -= self._events.popleft()[1].ByteSize()

    def after(self, seen: int) -> Iterator[tuple[int, Event]]:
        """Yields the events with a number above `seen`, the last one first."""
        return itertools.takewhile(lambda kept: kept[0] > seen, reversed(self._events))


class EventLog:
    """The events of one job, in order. Of the progress events, only the last of each cluster is kept.

    Every watcher gets other events at once. With many watchers or clusters, a watcher gets progress less often. It then never gets
    progress that is older than another event that it got. Progress events that follow each other are sent in batches.
    """

    def __init__(self) -> None:
        self.log_id = uuid.uuid4().hex
        self.began = time.time()
        """When the log began, in Unix seconds."""
        self._started = time.monotonic()
        self._changed = threading.Condition()
        self._events, self._rare = _Kept(1), _Kept(_RARE_SHARE)
        self._progress: dict[int, tuple[int, Event]] = {}
        self._num_events = 0
        self._last_other = 0
        """Number of the last event that is no progress."""
        self._num_watchers = 0
        self._closed = False

    def publish(self, event: Event) -> None:
        """Appends an event, and sets its time and its place in the log."""
        with self._changed:
            event.elapsed_seconds = self.elapsed_seconds
            self._num_events += 1
            event.log_id, event.number = self.log_id, self._num_events
            if event.HasField("progress"):
                self._progress[event.progress.cluster_index] = (self._num_events, event)
            else:
                kept = self._rare if event.WhichOneof("event") in _RARE else self._events
                kept.append(self._num_events, event)
                self._last_other = self._num_events
                self._changed.notify()

    @property
    def elapsed_seconds(self) -> float:
        """Seconds since the log began, as events have them."""
        return time.monotonic() - self._started

    def kept(self) -> list[Event]:
        """Returns the kept events in order, with the last progress of each cluster."""
        with self._changed:
            return self._after(0, takes_progress=True)

    def close(self) -> None:
        """Ends the log. Watchers stop after its last event."""
        with self._changed:
            self._closed = True
            self._changed.notify()

    def watch(self, silence_seconds: float, seen: int = 0) -> Iterator[Event | None]:
        """Yields all kept and future events until the log is closed. An item may be a batch of progress events.

        It also yields `None` whenever no event has arrived for `silence_seconds`.

        Args:
            seen: Number of the last event that is left out.
        """
        with self._changed:
            self._num_watchers += 1
        try:
            yield from self._watch(silence_seconds, seen)
        finally:
            with self._changed:
                self._num_watchers -= 1

    def _watch(self, silence_seconds: float, seen: int) -> Iterator[Event | None]:
        progress_at = heard_at = time.monotonic()
        while True:
            with self._changed:
                if not self._closed and self._last_other <= seen:
                    wait_until = min(progress_at, heard_at + silence_seconds)
                    self._changed.wait(max(wait_until - time.monotonic(), 0.0))
                new_events, closed = [], self._closed
                is_due = time.monotonic() >= progress_at
                has_others = self._last_other > seen
                if closed or has_others or is_due:
                    pause = progress_pause(self._num_watchers, len(self._progress))
                    takes_progress = is_due or pause <= _LEAST_PAUSE_SECONDS
                    new_events = self._after(seen, takes_progress=takes_progress)
                    seen = self._num_events
                    if takes_progress:
                        # Otherwise watchers that began together would always get progress at the same time.
                        progress_at = time.monotonic() + pause * random.uniform(0.5, 1.5)
                if has_others or closed:
                    # One watcher wakes the next one. If all woke at once, heartbeats would wait for hundreds of threads. CPython wakes
                    # the one that has waited longest. Otherwise, some would get the event only at their next sign of life.
                    self._changed.notify()
            yield from _in_batches(new_events)
            if closed:
                return
            if not new_events and time.monotonic() >= heard_at + silence_seconds:
                yield None
            elif not new_events:
                continue
            heard_at = time.monotonic()

    def _after(self, seen: int, *, takes_progress: bool) -> list[Event]:
        """Returns the kept events with a number above `seen`, in order."""
        new_events = [*self._events.after(seen), *self._rare.after(seen)]
        if takes_progress:
            new_events += [kept for kept in self._progress.values() if kept[0] > seen]
        return [event for _, event in sorted(new_events, key=lambda kept: kept[0])]


def progress_pause(num_watchers: int, num_clusters: int) -> float:
    """Returns the mean time in seconds from one progress of a watcher to the next, if nothing else happens."""
    seconds = _MESSAGE_SECONDS + num_clusters * _REPORT_SECONDS
    return max(num_watchers * seconds / _PROGRESS_SHARE, _LEAST_PAUSE_SECONDS)


def _in_batches(events: Iterable[Event]) -> Iterator[Event]:
    """Puts progress events that follow each other into batches."""
    batch, num_bytes = list[Event](), 0
    for event in events:
        is_progress = event.HasField("progress")
        size = event.ByteSize() if is_progress else 0
        if batch and (not is_progress or num_bytes + size > _BATCH_BYTES):
            yield _one_message(batch)
            batch, num_bytes = [], 0
        if is_progress:
            batch.append(event)
            num_bytes += size
        else:
            yield event
    if batch:
        yield _one_message(batch)


def _one_message(batch: list[Event]) -> Event:
    last = batch[-1]
    if len(batch) == 1:
        return last
    return Event(
        elapsed_seconds=last.elapsed_seconds, log_id=last.log_id, number=last.number, batch=batch
    )
