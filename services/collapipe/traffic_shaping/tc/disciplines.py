"""The disciplines that shape the packets to one address, and their arguments for tc.

The rate of an emulated network is netem's and not htb's. netem computes the departure of each packet from the packet before
it, so a late timer does not reduce the rate. With a rate, netem also keeps packets in order in spite of jitter.
"""

import math
from dataclasses import dataclass
from typing import Any, ClassVar

from collapipe.emulation.network_profiles import LinkConditions

_FRAME_BYTES = 1514
_MEAN_PACKET_BYTES = 512
_MIN_PACKETS_PER_SECOND = 1000
"""Acknowledgements of a faster opposite direction need this much room."""
_MIN_QUEUE_FRAMES = 64
"""The queue counts small packets as much as full frames, so a short queue would drop small packets too early."""
_MAX_QUEUE_FRAMES = 100_000
_UNLIMITED_BPS = 100_000_000_000
"""netem keeps packets in order only if it has a rate, so links without a limit get this one."""
_BURST_SECONDS = 0.002
_RATE_TOLERANCE = 0.001
"""tc shows rates in whole bytes per second."""
_SIZE_TOLERANCE = 0.05
"""The kernel stores the sizes of tbf in ticks of its clock."""


@dataclass(frozen=True)
class ClassRate:
    """A limit of the htb class itself, without a discipline below it."""

    rate_bps: float

    leaf_arguments: ClassVar[str] = ""

    @property
    def class_arguments(self) -> str:
        """The arguments of the htb class."""
        rate, burst = f"{self.rate_bps:.0f}bit", _burst_bytes(self.rate_bps)
        return f"htb rate {rate} ceil {rate} burst {burst} cburst {burst} quantum {_FRAME_BYTES}"

    def matches(self, other: "Discipline") -> bool:
        """Returns whether the kernel would treat packets the same."""
        return self == other

    def can_replace(self, other: "Discipline") -> bool:
        """Returns whether the kernel can change the other discipline into this one and keep its packets."""
        return isinstance(other, ClassRate)


class _Leaf:
    """A discipline below a class that only sorts packets."""

    class_arguments: ClassVar[str] = "htb rate 10gbit burst 1mb cburst 1mb quantum 60000"


@dataclass(frozen=True)
class Netem(_Leaf):
    """Rate, delay, jitter and loss. The queue is limited in packets."""

    rate_bps: float
    delay_us: float
    jitter_us: float
    loss_ratio: float
    limit_packets: int

    @property
    def leaf_arguments(self) -> str:
        """The arguments of the discipline below the class."""
        return (
            f"netem limit {self.limit_packets} delay {self.delay_us:.1f}us {self.jitter_us:.1f}us "
            f"loss random {100 * self.loss_ratio:.5f}% rate {self.rate_bps:.0f}bit"
        )

    def matches(self, other: "Discipline") -> bool:
        """Returns whether the kernel would treat packets the same."""
        return (
            isinstance(other, Netem)
            and self.limit_packets == other.limit_packets
            and math.isclose(self.rate_bps, other.rate_bps, rel_tol=_RATE_TOLERANCE)
            and math.isclose(self.delay_us, other.delay_us, abs_tol=1.0)
            and math.isclose(self.jitter_us, other.jitter_us, abs_tol=1.0)
            and math.isclose(self.loss_ratio, other.loss_ratio, abs_tol=1e-6)
        )

    def can_replace(self, other: "Discipline") -> bool:
        """Returns whether the kernel can change the other discipline into this one and keep its packets."""
        return isinstance(other, Netem)


@dataclass(frozen=True)
class TokenBucket(_Leaf):
    """Only a rate, for kernels without netem. The queue is limited in bytes."""

    rate_bps: float
    burst_bytes: int
    latency_us: float

    @property
    def leaf_arguments(self) -> str:
        """The arguments of the discipline below the class."""
        return (
            f"tbf rate {self.rate_bps:.0f}bit burst {self.burst_bytes} "
            f"latency {self.latency_us:.0f}us"
        )

    def matches(self, other: "Discipline") -> bool:
        """Returns whether the kernel would treat packets the same."""
        return (
            isinstance(other, TokenBucket)
            and math.isclose(self.rate_bps, other.rate_bps, rel_tol=_RATE_TOLERANCE)
            and math.isclose(self.burst_bytes, other.burst_bytes, rel_tol=_SIZE_TOLERANCE)
            and math.isclose(self.latency_us, other.latency_us, rel_tol=_SIZE_TOLERANCE)
        )

    def can_replace(self, other: "Discipline") -> bool:
        """Returns whether the kernel can change the other discipline into this one and keep its packets.

        A waiting packet that is larger than the new burst would never leave, nor would the packets behind it.
        """
        return isinstance(other, TokenBucket) and self.burst_bytes >= other.burst_bytes


Discipline = ClassRate | Netem | TokenBucket


def discipline_for(conditions: LinkConditions, has_netem: bool) -> Discipline | None:
    """Returns the discipline that gives a link its conditions, or `None` if the link needs none.

    Args:
        conditions: The conditions of the link.
        has_netem: Whether the kernel has netem. Without netem, only the rate is emulated.
    """
    rate = conditions.rate_bps
    if has_netem:
        return None if conditions.is_ideal else _netem_for(conditions)
    if rate is None:
        return None
    min_latency_seconds = 8 * _MIN_QUEUE_FRAMES * _FRAME_BYTES / rate
    latency_seconds = max(conditions.queue_seconds, min_latency_seconds)
    return TokenBucket(rate, _burst_bytes(rate), 1e6 * latency_seconds)


def read_discipline(qdisc: dict[str, Any]) -> Discipline | None:
    """Reads one discipline from the output of `tc -j qdisc show`; `None` if it is of another kind."""
    options = qdisc["options"]
    if qdisc["kind"] == "netem":
        delay = options.get("delay", {})
        return Netem(
            8.0 * options.get("rate", {}).get("rate", 0),
            1e6 * delay.get("delay", 0.0),
            1e6 * delay.get("jitter", 0.0),
            options.get("loss-random", {}).get("loss", 0.0),
            options["limit"],
        )
    if qdisc["kind"] == "tbf":
        return TokenBucket(8.0 * options["rate"], options["burst"], options.get("lat", 0.0))
    return None


def _netem_for(conditions: LinkConditions) -> Netem:
    rate = conditions.rate_bps
    frames = math.inf
    if rate is not None:
        # the limit of netem includes the packets that are delayed, and counts small packets like full frames
        delay = conditions.delay_seconds + conditions.jitter_seconds
        packets_per_second = max(rate / 8 / _MEAN_PACKET_BYTES, _MIN_PACKETS_PER_SECOND)
        frames = delay * packets_per_second + conditions.queue_seconds * rate / 8 / _FRAME_BYTES
    return Netem(
        rate or _UNLIMITED_BPS,
        1e6 * conditions.delay_seconds,
        1e6 * conditions.jitter_seconds,
        conditions.loss_ratio,
        math.ceil(min(max(frames, _MIN_QUEUE_FRAMES), _MAX_QUEUE_FRAMES)),
    )


def _burst_bytes(rate_bps: float) -> int:
    return max(2 * _FRAME_BYTES, int(rate_bps * _BURST_SECONDS / 8))
