"""The disciplines that shape the packets to one address, and their arguments for tc.

netem, and not htb, limits the rate of an emulated network. netem computes the departure of each packet from
the packet before it, so a late timer does not reduce the rate. With a rate, netem also keeps packets in
order in spite of jitter.
"""

import math
from dataclasses import astuple, dataclass
from typing import Any

from collapipe.emulation.network_profiles import LinkConditions

_FRAME_BYTES = 1514
_MEAN_PACKET_BYTES = 512
_MIN_PACKETS_PER_SECOND = 1000
"""The queue of a slow link has room for this many packets per second of delay. If the opposite direction is
faster, its acknowledgements also wait in this queue."""
_MIN_QUEUE_FRAMES = 64
"""The queue counts small packets like full frames, so a shorter queue would drop small packets too early."""
_MAX_QUEUE_FRAMES = 100_000
_UNLIMITED_BPS = 100_000_000_000
"""netem keeps packets in order only if it has a rate, so links without a limit get this one."""
_BURST_SECONDS = 0.002
_RELATIVE_TOLERANCE = 0.001
"""tc shows rates in whole bytes per second."""
_ABSOLUTE_TOLERANCE = 1e-6
"""The kernel stores times in ticks of its clock, and losses as fractions of 2**32."""


@dataclass(frozen=True)
class Discipline:
    """How the packets of an htb class are limited: by the class, or by a queueing discipline below it."""

    @property
    def class_arguments(self) -> str:
        """The arguments of the htb class. By default, the class only sorts packets."""
        return "htb rate 10gbit burst 1mb cburst 1mb quantum 60000"

    @property
    def leaf_arguments(self) -> str:
        """The arguments of the discipline below the class, if there is one."""
        return ""

    def matches(self, other: "Discipline") -> bool:
        """Returns whether the kernel would treat packets the same."""
        return type(self) is type(other) and all(
            math.isclose(mine, its, rel_tol=_RELATIVE_TOLERANCE, abs_tol=_ABSOLUTE_TOLERANCE)
            for mine, its in zip(astuple(self), astuple(other), strict=True)
        )

    def can_replace(self, other: "Discipline") -> bool:
        """Returns whether the kernel can change the other into this one and keep the waiting packets."""
        return type(self) is type(other)


@dataclass(frozen=True)
class ClassRate(Discipline):
    """A rate of the class itself."""

    rate_bps: float

    @property
    def class_arguments(self) -> str:
        rate, burst = f"{self.rate_bps:.0f}bit", _burst_bytes(self.rate_bps)
        return f"htb rate {rate} ceil {rate} burst {burst} cburst {burst} quantum {_FRAME_BYTES}"


@dataclass(frozen=True)
class Netem(Discipline):
    """Rate, delay, jitter and loss. The queue is limited in packets."""

    rate_bps: float
    delay_seconds: float
    jitter_seconds: float
    loss_ratio: float
    limit_packets: int

    @property
    def leaf_arguments(self) -> str:
        return (
            f"netem limit {self.limit_packets} "
            f"delay {1e6 * self.delay_seconds:.1f}us {1e6 * self.jitter_seconds:.1f}us "
            f"loss random {100 * self.loss_ratio:.5f}% rate {self.rate_bps:.0f}bit"
        )


@dataclass(frozen=True)
class TokenBucket(Discipline):
    """Only a rate, for kernels without netem. The queue is limited in bytes."""

    rate_bps: float
    burst_bytes: int
    latency_seconds: float

    @property
    def leaf_arguments(self) -> str:
        return (
            f"tbf rate {self.rate_bps:.0f}bit burst {self.burst_bytes} "
            f"latency {1e6 * self.latency_seconds:.0f}us"
        )

    def can_replace(self, other: Discipline) -> bool:
        # A waiting packet larger than the new burst would never leave, nor would the packets behind it.
        return isinstance(other, TokenBucket) and self.burst_bytes >= other.burst_bytes


def discipline_for(conditions: LinkConditions, has_netem: bool) -> Discipline | None:
    """Returns the discipline that gives a link its conditions, or `None` if the link needs none.

    Without netem, only the rate is emulated.
    """
    rate = conditions.rate_bps
    if has_netem:
        return None if conditions.is_ideal else _netem_for(conditions)
    if rate is None:
        return None
    min_latency_seconds = 8 * _MIN_QUEUE_FRAMES * _FRAME_BYTES / rate
    return TokenBucket(rate, _burst_bytes(rate), max(conditions.queue_seconds, min_latency_seconds))


def read_discipline(qdisc: dict[str, Any]) -> Discipline | None:
    """Reads one discipline from the output of `tc -j qdisc show`; `None` if it is of another kind."""
    options = qdisc["options"]
    if qdisc["kind"] == "netem":
        delay = options.get("delay", {})
        return Netem(
            8.0 * options.get("rate", {}).get("rate", 0),
            delay.get("delay", 0.0),
            delay.get("jitter", 0.0),
            options.get("loss-random", {}).get("loss", 0.0),
            options["limit"],
        )
    if qdisc["kind"] == "tbf":
        latency_seconds = options.get("lat", 0.0) / 1e6
        return TokenBucket(8.0 * options["rate"], options["burst"], latency_seconds)
    return None


def _netem_for(conditions: LinkConditions) -> Netem:
    rate = conditions.rate_bps
    frames = math.inf
    if rate is not None:
        # The limit of netem includes the packets that are delayed, and counts small packets like full frames.
        delay = conditions.delay_seconds + conditions.jitter_seconds
        packets_per_second = max(rate / 8 / _MEAN_PACKET_BYTES, _MIN_PACKETS_PER_SECOND)
        frames = delay * packets_per_second + conditions.queue_seconds * rate / 8 / _FRAME_BYTES
    return Netem(
        rate or _UNLIMITED_BPS,
        conditions.delay_seconds,
        conditions.jitter_seconds,
        conditions.loss_ratio,
        math.ceil(min(max(frames, _MIN_QUEUE_FRAMES), _MAX_QUEUE_FRAMES)),
    )


def _burst_bytes(rate_bps: float) -> int:
    return max(2 * _FRAME_BYTES, int(rate_bps * _BURST_SECONDS / 8))
