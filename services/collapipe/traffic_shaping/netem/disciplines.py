"""From what links are to be like to commands of tc, and back from what tc shows: pure functions.

One class of htb for each receiver's address, which only sorts packets; below it netem, which does rate, delay, jitter and
loss, or, in a kernel without it, tbf, which does the rate. What goes to anybody else is not shaped.

The rate is netem's and not htb's: netem reckons each packet from the end of the one before, so that a timer that is late
costs no rate, and with a rate it keeps packets in order, which jitter alone would not.
"""

import ipaddress
import itertools
import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from collapipe.traffic_shaping.netem.profiles import LinkConditions
from collapipe.traffic_shaping.traffic_control import KERNEL_DEFAULTS

HANDLE = "c01e:"
"""Tells our queueing discipline from anybody else's."""

_FRAME_BYTES = 1514
_MEAN_PACKET_BYTES = 512
_LEAST_PACKETS_PER_SECOND = 1000
"""Acknowledgements of a faster direction."""
_LEAST_QUEUE_FRAMES = 64
"""Of small packets too, which count as much."""
_MOST_QUEUE_FRAMES = 100_000
_UNLIMITED_BPS = 100_000_000_000
"""For netem to keep packets in order where the rate is not limited."""
_BURST_SECONDS = 0.002
_LEAST_BURST_BYTES = 2 * _FRAME_BYTES
_CLASS = ("htb", "rate", "10gbit", "burst", "1mb", "cburst", "1mb", "quantum", "60000")
_RATE_TOLERANCE = 0.001
"""tc shows bytes a second, rounded; the sizes of tbf go through the kernel's clock ticks."""
_SIZE_TOLERANCE = 0.05


@dataclass(frozen=True)
class Netem:
    """Rate, delay, jitter, loss, and a queue that is counted in packets."""

    rate_bps: float
    delay_us: float
    jitter_us: float
    loss_ratio: float
    limit_packets: int

    kind = "netem"

    @property
    def arguments(self) -> str:
        """For tc."""
        return (
            f"netem limit {self.limit_packets} delay {self.delay_us:.1f}us {self.jitter_us:.1f}us "
            f"loss random {100 * self.loss_ratio:.5f}% rate {self.rate_bps:.0f}bit"
        )

    def matches(self, other: "Discipline") -> bool:
        """Whether the kernel would do the same."""
        return (
            isinstance(other, Netem)
            and self.limit_packets == other.limit_packets
            and math.isclose(self.rate_bps, other.rate_bps, rel_tol=_RATE_TOLERANCE)
            and math.isclose(self.delay_us, other.delay_us, abs_tol=1.0)
            and math.isclose(self.jitter_us, other.jitter_us, abs_tol=1.0)
            and math.isclose(self.loss_ratio, other.loss_ratio, abs_tol=1e-6)
        )

    def can_follow(self, other: "Discipline") -> bool:
        """Whether the kernel can change the other into this one, with the packets that wait in it."""
        return isinstance(other, Netem)


@dataclass(frozen=True)
class TokenBucket:
    """A rate, with a queue that is counted in bytes."""

    rate_bps: float
    burst_bytes: int
    latency_us: float

    kind = "tbf"

    @property
    def arguments(self) -> str:
        """For tc."""
        return (
            f"tbf rate {self.rate_bps:.0f}bit burst {self.burst_bytes} "
            f"latency {self.latency_us:.0f}us"
        )

    def matches(self, other: "Discipline") -> bool:
        """Whether the kernel would do the same."""
        return isinstance(other, TokenBucket) and all(
            math.isclose(mine, its, rel_tol=tolerance)
            for mine, its, tolerance in (
                (self.rate_bps, other.rate_bps, _RATE_TOLERANCE),
                (self.burst_bytes, other.burst_bytes, _SIZE_TOLERANCE),
                (self.latency_us, other.latency_us, _SIZE_TOLERANCE),
            )
        )

    def can_follow(self, other: "Discipline") -> bool:
        """Whether the kernel can change the other into this one, with the packets that wait in it.

        One that is larger than the new burst would wait for ever, and all others behind it.
        """
        return isinstance(other, TokenBucket) and self.burst_bytes >= other.burst_bytes


Discipline = Netem | TokenBucket
"""What the packets to one address go through."""


def discipline_for(conditions: LinkConditions, has_netem: bool) -> Discipline | None:
    """What makes a link like that; `None` where nothing can or needs to.

    Args:
        conditions: What the link is to be like.
        has_netem: Whether the kernel has netem; without it only the rate is made.
    """
    rate = conditions.rate_bps
    if has_netem:
        if conditions.free:
            return None
        delay = conditions.delay_seconds + conditions.jitter_seconds
        frames = math.inf
        if rate is not None:
            # netem counts what is on its way and what waits, acknowledgements as much as full frames
            on_its_way = delay * max(rate / 8 / _MEAN_PACKET_BYTES, _LEAST_PACKETS_PER_SECOND)
            frames = on_its_way + conditions.queue_seconds * rate / 8 / _FRAME_BYTES
        return Netem(
            rate or _UNLIMITED_BPS,
            1e6 * conditions.delay_seconds,
            1e6 * conditions.jitter_seconds,
            conditions.loss_ratio,
            math.ceil(min(max(frames, _LEAST_QUEUE_FRAMES), _MOST_QUEUE_FRAMES)),
        )
    if rate is None:
        return None
    burst = max(_LEAST_BURST_BYTES, int(rate * _BURST_SECONDS / 8))
    least_latency = 8 * _LEAST_QUEUE_FRAMES * _FRAME_BYTES / rate
    return TokenBucket(rate, burst, 1e6 * max(conditions.queue_seconds, least_latency))


@dataclass
class PresentClass:
    """One class of ours in the kernel; without an address or a discipline it was left half made."""

    address: str | None = None
    discipline: Discipline | None = None


@dataclass
class Present:
    """What an interface has.

    Args:
        foreign: Kind of the root that somebody else set, with its handle; "" for none.
        ours: Whether the root is ours.
        classes: Ours, by their number.
    """

    foreign: str = ""
    ours: bool = False
    classes: dict[int, PresentClass] = field(default_factory=dict)


def read_root(qdiscs: str) -> Present:
    """Reads what `tc -j qdisc show dev NAME` printed, but for addresses."""
    present = Present()
    for qdisc in json.loads(qdiscs or "[]"):
        if qdisc.get("root"):
            present.ours = qdisc["handle"] == HANDLE
            if not present.ours and qdisc["kind"] not in KERNEL_DEFAULTS:
                present.foreign = f"{qdisc['kind']} {qdisc['handle']}"
        elif (number := _number(qdisc.get("parent", ""))) is not None:
            present.classes[number] = PresentClass(discipline=_read_discipline(qdisc))
    return present


def add_classes(present: Present, classes: str, filters: str) -> None:
    """Adds what `tc class show` and `tc filter show` printed (their JSON is not complete in many versions)."""
    for text in re.findall(rf"^class htb ({HANDLE}[0-9a-f]+)", classes, re.MULTILINE):
        present.classes.setdefault(int(text.partition(":")[2], 16), PresentClass())
    for part in filters.split("\nfilter "):
        flow = re.search(rf"flowid ({HANDLE}[0-9a-f]+)", part)
        words = re.findall(r"match ([0-9a-f]{8})/ffffffff at \d+", part)
        if flow is None or len(words) not in (1, 4):
            continue
        number = _number(flow[1])
        if number in present.classes:
            packed = bytes.fromhex("".join(words))
            present.classes[number].address = str(ipaddress.ip_address(packed))


def commands(interface: str, present: Present, desired: Mapping[str, Discipline]) -> list[str]:
    """The fewest lines for `tc -batch` that make an interface shape as desired.

    Args:
        interface: Its name.
        present: What it has; the root is ours or nobody's.
        desired: By address of the receiver.
    """
    return list(_commands(interface, present, desired))


def _commands(interface: str, present: Present, desired: Mapping[str, Discipline]) -> Iterator[str]:
    if not desired:
        if present.ours:
            yield remove_command(interface)
        return
    if not present.ours:
        yield f"qdisc add dev {interface} root handle {HANDLE} htb default 0 direct_qlen 1000"
    kept: dict[str, int] = {}
    for number, known in present.classes.items():
        whole = known.address is not None and known.discipline is not None
        if not whole or known.address not in desired or known.address in kept:
            if known.address is not None:
                yield f"filter del dev {interface} parent {HANDLE} prio {number}"
            yield f"class del dev {interface} parent {HANDLE} classid {HANDLE}{number:x}"
            continue
        assert known.address is not None and known.discipline is not None
        kept[known.address] = number
        wanted = desired[known.address]
        if wanted.matches(known.discipline):
            continue
        place = f"dev {interface} parent {HANDLE}{number:x}"
        if wanted.can_follow(known.discipline):  # packets on their way stay there
            yield f"qdisc change {place} {wanted.arguments}"
        else:
            yield f"qdisc del {place}"
            yield f"qdisc add {place} {wanted.arguments}"
    numbers = _free_numbers(kept.values())
    for address in sorted(desired.keys() - kept.keys()):
        number = next(numbers)
        place = f"{HANDLE}{number:x}"
        yield (f"class add dev {interface} parent {HANDLE} classid {place} {' '.join(_CLASS)}")
        yield f"qdisc add dev {interface} parent {place} {desired[address].arguments}"
        version = ipaddress.ip_address(address).version
        protocol, match = ("ip", "ip") if version == 4 else ("ipv6", "ip6")
        yield (
            f"filter add dev {interface} parent {HANDLE} protocol {protocol} prio {number} "
            f"u32 match {match} dst {address} flowid {place}"
        )


def remove_command(interface: str) -> str:
    """The line that removes all of ours."""
    return f"qdisc del dev {interface} root handle {HANDLE}"


def _free_numbers(taken: Iterable[int]) -> Iterator[int]:
    used = set(taken)
    return (number for number in itertools.count(1) if number not in used)


def _number(class_id: str) -> int | None:
    major, _, minor = class_id.partition(":")
    return int(minor, 16) if f"{major}:" == HANDLE and minor else None


def _read_discipline(qdisc: dict[str, object]) -> Discipline | None:
    options = qdisc["options"]
    assert isinstance(options, dict)
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
