"""The interface of shapers, and pacing: shaping inside the process.

A sender tells its link the rate of a frame, asks for the size of the chunks, and waits before each chunk.
With pacing, the sender sleeps. With traffic control (`collapipe.traffic_shaping.tc.service_shaper`), it does
not wait, because the kernel delays the packets.
"""

import time
from abc import ABC, abstractmethod
from collections.abc import Callable

_CHUNK_SECONDS = 0.02
"""Time of one chunk on the link. Short chunks give the receiver a smooth stream, and let a link end soon."""
_MIN_CHUNK_BYTES = 1024
_MAX_CATCH_UP_SECONDS = 0.05
"""A sender that was delayed for longer catches up this much only. More would be a burst."""


class ShapedLink(ABC):
    """One direction of a link. Only one thread may use it."""

    @abstractmethod
    def chunk_bytes(self, rate_bps: float, largest: int) -> int:
        """Returns the size of the chunks of a frame, at most `largest`."""

    @abstractmethod
    def begin(self, rate_bps: float) -> None:
        """Begins a frame with a rate in bit/s; 0 means no limit."""

    @abstractmethod
    def wait(self, num_bytes: int) -> None:
        """Waits before a chunk is sent, until the chunk would have crossed the link."""

    def close(self) -> None:
        """Ends the shaping of this link."""
        return


class Shaper(ABC):
    """Shapes the links that leave a host."""

    @abstractmethod
    def open(self, address: str) -> ShapedLink:
        """Shapes the link to the receiver at an address "host:port"."""

    def close(self) -> None:
        """Ends the shaping of all links."""
        return


class PacedLink(ShapedLink):
    """Sends each chunk when the last bit of the chunk would have left.

    The deadline of a chunk follows from the deadline before it. So a sleep that takes too long delays one
    chunk, but not all chunks after it. If the last chunk of a frame is late, the next frame catches up. It
    does not catch up the pause between the frames, so that each frame arrives at its rate.
    """

    def __init__(
        self,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._clock = clock
        self._sleep = sleep
        self._rate_bps = 0.0
        self._deadline = 0.0
        """When the link would have carried all chunks so far."""
        self._late_seconds = 0.0
        """How long after its deadline the last chunk was sent."""

    def chunk_bytes(self, rate_bps: float, largest: int) -> int:
        if not rate_bps:
            return largest
        return min(largest, max(_MIN_CHUNK_BYTES, int(rate_bps * _CHUNK_SECONDS / 8)))

    def begin(self, rate_bps: float) -> None:
        self._rate_bps = rate_bps
        self._deadline = self._clock() - self._late_seconds
        self._late_seconds = 0.0

    def wait(self, num_bytes: int) -> None:
        if not self._rate_bps:
            return
        now = self._clock()
        self._deadline = max(self._deadline, now - _MAX_CATCH_UP_SECONDS)
        self._deadline += 8 * num_bytes / self._rate_bps
        if self._deadline > now:
            self._sleep(self._deadline - now)
        self._late_seconds = self._clock() - self._deadline


class PacedShaper(Shaper):
    """Paces every link. It needs no rights, and distinguishes links to the same address."""

    def open(self, address: str) -> ShapedLink:
        return PacedLink()
