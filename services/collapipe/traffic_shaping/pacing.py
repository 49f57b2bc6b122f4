"""Holds what is sent over a link to its rate.

One interface: a sender says at which rate a frame goes, asks for a chunk size, and waits before every chunk. Pacing does
the waiting here; traffic control (`collapipe.traffic_shaping.traffic_control`) has the kernel do it.
"""

import time
from abc import ABC, abstractmethod
from collections.abc import Callable

_CHUNK_SECONDS = 0.02
"""What one chunk takes: the receiver sees a smooth stream, and a link that ends is not waited for."""
_LEAST_CHUNK_BYTES = 1024
_CATCH_UP_SECONDS = 0.05
"""A sender that was held up longer than this lost the time: it must not send a burst instead."""


class ShapedLink(ABC):
    """One direction of one link. Used by one thread."""

    @abstractmethod
    def chunk_bytes(self, rate_bps: float, largest: int) -> int:
        """Size of the chunks that a frame at a rate is to be cut into, at most `largest`."""

    @abstractmethod
    def begin(self, rate_bps: float) -> None:
        """A frame follows at once.

        Args:
            rate_bps: Its rate in bit/s; 0 is no limit.
        """

    @abstractmethod
    def wait(self, num_bytes: int) -> None:
        """Waits until a chunk would have crossed the link, before it is sent."""

    def close(self) -> None:
        """Ends what was set up for the link."""
        return


class Shaper(ABC):
    """Shapes the links that leave a host."""

    @abstractmethod
    def open(self, address: str) -> ShapedLink:
        """Shapes what is sent to a receiver.

        Args:
            address: Of the receiver, "host:port".
        """

    def close(self) -> None:
        """Ends what was set up for every link."""
        return


class PacedLink(ShapedLink):
    """Pacing inside the process: a chunk leaves when its last bit would have.

    Every chunk has a deadline that follows from the one before, so that a sleep that takes too long delays one chunk and
    not all that follow; what the last chunk of a frame was late, the next frame makes up for. The time between frames is
    not made up for: the receiver sees frames arrive, from their headers to their last bytes, at the rate.

    Args:
        clock: Seconds.
        sleep: Waits some of them.
    """

    def __init__(
        self,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._clock = clock
        self._sleep = sleep
        self._rate_bps = 0.0
        self._free_at = 0.0
        """When the link would have carried what was sent."""
        self._late_seconds = 0.0
        """How much later the last chunk was sent."""

    def chunk_bytes(self, rate_bps: float, largest: int) -> int:
        """What the rate carries in 20 ms, within bounds."""
        if not rate_bps:
            return largest
        return min(largest, max(_LEAST_CHUNK_BYTES, int(rate_bps * _CHUNK_SECONDS / 8)))

    def begin(self, rate_bps: float) -> None:
        """Begins a frame now, less what the last one was late."""
        self._rate_bps = rate_bps
        self._free_at = self._clock() - self._late_seconds
        self._late_seconds = 0.0

    def wait(self, num_bytes: int) -> None:
        """Waits for the deadline of a chunk."""
        if not self._rate_bps:
            return
        now = self._clock()
        self._free_at = max(self._free_at, now - _CATCH_UP_SECONDS)
        self._free_at += 8 * num_bytes / self._rate_bps
        if self._free_at > now:
            self._sleep(self._free_at - now)
        self._late_seconds = self._clock() - self._free_at


class PacedShaper(Shaper):
    """Shapes by pacing: needs no rights, and tells apart links that share an interface."""

    def open(self, address: str) -> ShapedLink:
        """Paces one link."""
        return PacedLink()
