"""The interface of shapers, and pacing: shaping inside the process.

A sender asks its link for the size of its chunks, and waits before each chunk. With pacing, the sender
sleeps. With traffic control (`collapipe.traffic_shaping.tc.service_shaper`), it does not wait, because the
kernel delays the packets.
"""

import itertools
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from enum import IntEnum

_QUANTUM_SECONDS = 0.02
"""Time of one chunk on the link. Short chunks give the receiver a smooth stream, and traffic that goes first
waits for one chunk at most."""
_MIN_QUANTUM_BYTES = 1024
_MAX_CATCH_UP_SECONDS = 0.05
"""A sender that was delayed for longer catches up this much only. More would be a burst. For as long, traffic
that goes later leaves the link to the next chunk of a burst. So a short delay of its sender costs nothing."""
_MAX_QUEUEING_SECONDS = 4.0
"""A chunk that has waited for longer goes next. Otherwise, a busy link would silence a transfer of weights
until its receiver gives it up."""


class Traffic(IntEnum):
    """The kinds of traffic on a link. The kind with the lower number goes first."""

    CONTROL = 0
    ACTIVATIONS = 1
    """Activations, their gradients, and probes."""
    WEIGHTS = 2


Wait = Callable[[int, float], None]
"""Waits until a chunk may leave, given its bytes and the rate of the link in bit/s; 0 means no limit."""


class ShapedLink(ABC):
    """One direction of a link. All threads of a host that send over it share its rate."""

    address = ""
    """Where the receiver serves, "host:port"; empty if that is unknown."""

    @abstractmethod
    def quantum_bytes(self, rate_bps: float, largest: int) -> int:
        """Returns the size of the chunks that this rate needs, at most `largest`."""

    @abstractmethod
    def burst(self, traffic: Traffic) -> AbstractContextManager[Wait]:
        """Begins chunks that follow each other closely, such as those of a frame."""

    def limit(self, rate_bps: float) -> None:
        """Takes a rate before anything is sent; 0 means no limit."""
        return


class Shaper(ABC):
    """Shapes the links that leave a host."""

    @abstractmethod
    def open(self) -> ShapedLink:
        """Shapes the link to one receiver."""

    def close(self) -> None:
        """Ends the shaping of all links."""
        return


@dataclass(frozen=True, eq=False)
class _Waiting:
    """A chunk that waits for its turn."""

    traffic: Traffic
    number: int
    since: float


@dataclass(eq=False)
class _Burst:
    traffic: Traffic
    has_begun: bool = False
    holds_until: float = 0.0
    """Until when traffic that goes later leaves the link to the next chunk of this burst."""


class PacedLink(ShapedLink):
    """Sends each chunk when the last bit of the chunk would have left, one chunk at a time.

    The deadline of a chunk follows from the deadline before it. So a sleep that takes too long delays one
    chunk, but not all chunks after it. If the last chunk of a burst is late, the next burst catches up. It
    does not catch up a pause in which nothing was sent, so that each frame arrives at its rate.
    """

    def __init__(
        self,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._clock = clock
        self._sleep = sleep
        self._changed = threading.Condition()
        self._numbers = itertools.count()
        self._waiting: list[_Waiting] = []
        self._bursts: list[_Burst] = []
        self._is_sending = False
        self._free_since = 0.0
        """When the last chunk ended. All waiting threads compare with this moment, so they agree who is next."""
        self._deadline = 0.0
        """When the link would have carried all chunks so far."""
        self._late_seconds = 0.0
        """How long after its deadline the last chunk was sent."""

    def quantum_bytes(self, rate_bps: float, largest: int) -> int:
        if not rate_bps:
            return largest
        return min(largest, max(_MIN_QUANTUM_BYTES, int(rate_bps * _QUANTUM_SECONDS / 8)))

    @contextmanager
    def burst(self, traffic: Traffic) -> Iterator[Wait]:
        burst = _Burst(traffic)

        def wait(num_bytes: int, rate_bps: float) -> None:
            if rate_bps:
                self._send(burst, 8 * num_bytes / rate_bps)

        try:
            yield wait
        finally:
            with self._changed:
                if burst in self._bursts:
                    self._bursts.remove(burst)
                    self._changed.notify_all()

    def _send(self, burst: _Burst, seconds: float) -> None:
        """Waits for the turn of a chunk, and then for the time that the link needs for the chunk."""
        with self._changed:
            if not burst.has_begun and not self._is_sending and not self._waiting:
                self._deadline = self._clock() - self._late_seconds
                self._late_seconds = 0.0
            if not burst.has_begun:
                burst.has_begun = True
                self._bursts.append(burst)
            chunk = _Waiting(burst.traffic, next(self._numbers), self._clock())
            self._waiting.append(chunk)
            while (pause := self._seconds_until_turn(chunk)) != 0:
                self._changed.wait(pause)
            self._waiting.remove(chunk)
            self._is_sending = True
            now = self._clock()
            deadline = max(self._deadline, now - _MAX_CATCH_UP_SECONDS) + seconds
            self._deadline = deadline
        if deadline > now:
            self._sleep(deadline - now)
        with self._changed:
            self._is_sending = False
            now = self._free_since = self._clock()
            self._late_seconds = now - deadline
            burst.holds_until = now + _MAX_CATCH_UP_SECONDS
            self._changed.notify_all()

    def _seconds_until_turn(self, chunk: _Waiting) -> float | None:
        """Returns 0 if a chunk may be sent; `None` if another chunk has to be sent first."""

        def order(waiting: _Waiting) -> tuple[int, int]:
            is_overdue = self._free_since - waiting.since > _MAX_QUEUEING_SECONDS
            return (-1 if is_overdue else waiting.traffic), waiting.number

        if self._is_sending or min(self._waiting, key=order) is not chunk:
            return None
        rank = order(chunk)[0]
        holds = [burst.holds_until for burst in self._bursts if burst.traffic < rank]
        return max(max(holds, default=0.0) - self._clock(), 0.0)


class PacedShaper(Shaper):
    """Paces every link. It needs no rights, and distinguishes links to the same address."""

    def open(self) -> ShapedLink:
        return PacedLink()
