"""Records what this process does and when: the source of `collapipe trace`.

A span is an interval of work or of waiting. Recording one takes about a microsecond, so it is always on.
"""

import struct
import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

_CAPACITY = 65_536
_MOST_ROUNDS = 1024
_MOST_LABELS = 4096
_OTHER = ("(other)", "(other)", "", "")

_RECORD = struct.Struct("<ddqiiiH")


@dataclass(frozen=True, kw_only=True)
class Span:
    """An interval on a track, in seconds of `time.perf_counter` of this process.

    Args:
        track: What cannot do two things at once, such as a link. Spans of one track follow each other or nest.
        peer: The host at the other end of a link; empty without one.
        codec: Empty if the span moves no tensors.
        step: -1 means none, as for `micro_batch` and `unit`.
        num_bytes: Bytes that moved; 0 for none.
    """

    track: str
    name: str
    started: float
    ended: float
    peer: str = ""
    codec: str = ""
    step: int = -1
    micro_batch: int = -1
    unit: int = -1
    num_bytes: int = 0


@dataclass
class Moved:
    """The bytes that a span moves, counted while it lasts."""

    num_bytes: int = 0


class SpanLog:
    """The last spans of a process, in a ring of fixed size. It is thread-safe.

    A round lasts until its job begins the next one or is over, and all spans that end meanwhile belong to it. So the code
    that records needs no label. A host works for one job at a time, but a round of an edge server or a scheduler has the spans of the
    jobs beside it, too.
    """

    def __init__(self, capacity: int = _CAPACITY) -> None:
        # Bytes other than zero make the memory resident now. So recording never looks like a leak.
        self._ring = bytearray(b"\xff") * (capacity * _RECORD.size)
        self._capacity = capacity
        self._count = 0
        self._rounds: deque[tuple[tuple[str, int, int], int]] = deque(maxlen=_MOST_ROUNDS)
        """Each attempt at a round, with the number of spans before it."""
        self._labels: dict[tuple[str, str, str, str], int] = {_OTHER: 0}
        """The number of each combination of track, name, peer and codec."""
        self._lock = threading.Lock()

    def begin_round(self, job_id: str, round_index: int, attempt: int) -> None:
        """Makes an attempt at a round the current one of its job. Several sessions on a host may begin the same one."""
        key = (job_id, round_index, attempt)
        with self._lock:
            if not self._rounds or self._rounds[-1][0] != key:
                self._rounds.append((key, self._count))

    def end_job(self, job_id: str) -> None:
        """Ends the current round of a job that is over."""
        self.begin_round(job_id, -1, -1)

    def record(
        self,
        track: str,
        name: str,
        started: float,
        *,
        ended: float | None = None,
        peer: str = "",
        codec: str = "",
        step: int = -1,
        micro_batch: int = -1,
        unit: int = -1,
        num_bytes: int = 0,
    ) -> None:
        """Records a span; see `Span`. Without `ended`, it ends now.

        Texts must come from a small set. Numbers belong into the other arguments.
        """
        label = (track, name, peer, codec)
        ended = time.perf_counter() if ended is None else ended
        with self._lock:
            number = self._labels.get(label)
            if number is None:
                number = self._add(label)
            offset = self._count % self._capacity * _RECORD.size
            _RECORD.pack_into(
                self._ring, offset, started, ended, num_bytes, step, micro_batch, unit, number
            )
            self._count += 1

    @contextmanager
    def span(self, track: str, name: str, *, unit: int = -1) -> Iterator[Moved]:
        """Records the block as a span, even if it raises. The block may count bytes in the yielded object."""
        started, moved = time.perf_counter(), Moved()
        try:
            yield moved
        finally:
            self.record(track, name, started, unit=unit, num_bytes=moved.num_bytes)

    def of_round(self, job_id: str, round_index: int, attempt: int) -> Iterator[Span]:
        """Yields the spans of an attempt that are still in the ring, in the order in which they ended."""
        with self._lock:
            ring, labels = bytes(self._ring), list(self._labels)
            begun = [entry for entry in self._rounds if entry[0][0] == job_id]
            ends = [*(first for _, first in begun), self._count][1:]
            ranges = [
                range(max(first, self._count - self._capacity), end)
                for (key, first), end in zip(begun, ends, strict=True)
                if key == (job_id, round_index, attempt)
            ]
        for positions in ranges:
            for position in positions:
                offset = position % self._capacity * _RECORD.size
                started, ended, num_bytes, step, micro_batch, unit, number = _RECORD.unpack_from(
                    ring, offset
                )
                track, name, peer, codec = labels[number]
                yield Span(
                    track=track,
                    name=name,
                    started=started,
                    ended=ended,
                    peer=peer,
                    codec=codec,
                    step=step,
                    micro_batch=micro_batch,
                    unit=unit,
                    num_bytes=num_bytes,
                )

    def _add(self, label: tuple[str, str, str, str]) -> int:
        """Returns the number of a new label. It is 0 if there are too many, so that their memory is bounded."""
        if len(self._labels) == _MOST_LABELS:
            return 0
        return self._labels.setdefault(label, len(self._labels))


SPANS = SpanLog()
"""The spans of this process."""
