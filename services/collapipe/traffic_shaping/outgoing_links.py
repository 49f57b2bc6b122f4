"""The links that leave a host. Everything that the host sends to one receiver shares one link.

The rate of a link is the lowest of three: that of the emulated wire, that of the radio, and the share that the
plan in force gives to the link.
"""

import math
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol, TypeVar

from collapipe.emulation.emulation_file import EmulationFile
from collapipe.telemetry import metrics
from collapipe.traffic_shaping.pacing import PacedShaper, ShapedLink, Shaper, Traffic
from collapipe.traffic_shaping.radio_driver import RadioDriver, RadioState

_FIRST_CHUNK_BYTES = 4 << 10
_LEAST_CHUNK_BYTES = 1024
_RECENT_SECONDS = 10.0
_MAX_LINKS = 1024
"""Links to callers are kept up to this number, far more than a testbed has hosts."""
_MOST_ADDRESSES = 8
"""Addresses of one receiver that are remembered. A host that starts again may have another port each time."""
_MAX_CHUNK_SECONDS = 0.5
"""Longest time of one chunk on a link. A receiver notices progress with each chunk, so a slow link must
not seem silent."""


class Sized(Protocol):
    """A message of the protocol."""

    def ByteSize(self) -> int: ...


M = TypeVar("M", bound="Sized | bytes")


@dataclass(frozen=True)
class LinkShare:
    """What a plan gives to one direction of a link. By default, it limits nothing.

    Args:
        rate_limit_bps: 0 means no limit.
        bandwidth_hz: Share of the radio channel; 0 if the plan gives none.
        transmit_power_watts: Power of the sending host; 0 leaves the power as it is.
    """

    rate_limit_bps: int = 0
    bandwidth_hz: float = 0.0
    transmit_power_watts: float = 0.0


NO_SHARE = LinkShare()


class OutgoingLinks:
    """The links that leave one host, with their emulation, shaper and radio.

    A link to this host itself or to a caller without a name, such as `collapipe train`, has no limits.

    Args:
        host_id: The name of this host in the emulation file. It may be set later, before the first call.
    """

    def __init__(
        self,
        host_id: str,
        emulation: EmulationFile,
        shaper: Shaper,
        radio: RadioDriver | None = None,
    ) -> None:
        self.host_id = host_id
        self.emulation = emulation
        self._shaper = shaper
        self._radio = radio
        self._lock = threading.Lock()
        self._links: dict[str, SharedLink] = {}
        self._receivers: dict[str, str] = {}
        """Host ids by address."""
        self._unlimited = SharedLink(self, "", shaper.open())

    @classmethod
    def unlimited(cls, host_id: str = "") -> "OutgoingLinks":
        """Returns links without emulation and radio. Only plans can limit them."""
        return cls(host_id, EmulationFile(None), PacedShaper())

    def link_to(self, receiver: str, address: str = "") -> "SharedLink":
        """Returns the link to a host, and remembers the address "host:port" at which the host serves."""
        if receiver in ("", self.host_id):
            return self._unlimited
        with self._lock:
            link = self._links.get(receiver)
            if link is None:
                link = self._links[receiver] = SharedLink(self, receiver, self._shaper.open())
            if address:
                self._remember(receiver, address)
                link.shaped.address = address
            return link

    def _remember(self, receiver: str, address: str) -> None:
        """Remembers the address of a receiver, instead of its oldest one if there are many."""
        if self._receivers.get(address) != receiver:
            own = [known for known, name in self._receivers.items() if name == receiver]
            if len(own) >= _MOST_ADDRESSES:
                del self._receivers[own[0]]
            self._receivers[address] = receiver

    def link_at(self, address: str) -> "SharedLink":
        """Returns the link to the host at an address. A link to an unknown address has no limits."""
        with self._lock:
            return self._links.get(self._receivers.get(address, ""), self._unlimited)

    def link_to_caller(self, host_id: str, *, is_checked: bool = False) -> "SharedLink":
        """Returns the link to a host that called this one.

        Args:
            is_checked: Whether the host may do what it asks for. Otherwise its name may be invented.
        """
        with self._lock:
            known = self._links.get(host_id)
            has_room = len(self._links) < _MAX_LINKS
        if known is not None:
            return known
        if host_id and has_room and (is_checked or self.emulation.is_given):
            return self.link_to(host_id)
        # Every link that is kept takes memory. So a name that may be invented gets a link for this call only, and
        # has no emulation beyond `_MAX_LINKS`.
        return SharedLink(self, "", self._shaper.open())

    def delay_seconds(self, sender: str, receiver: str) -> float:
        """Returns the emulated one-way delay between two hosts, of which one is this host."""
        if not sender or not receiver or sender == receiver:
            return 0.0
        return self.emulation.current().delay_seconds(sender, receiver)

    def rate_bps(self, receiver: str, share: LinkShare, *, reports: bool = False) -> float:
        """Sets the radio for a receiver, and returns the rate of the link in bit/s; 0 means no limit.

        The emulation is read each time, so that a change applies at once.

        Args:
            reports: Whether metrics get the state of the radio.
        """
        if not receiver:
            return 0.0
        wire = self.emulation.current().link(self.host_id, receiver)
        limits = [float(share.rate_limit_bps), wire.rate_bps or 0.0]
        if self._radio is not None:
            radio = self._radio.transmit(
                self.host_id, receiver, share.bandwidth_hz, share.transmit_power_watts
            )
            if radio is not None:
                limits.append(radio.rate_bps)
                if reports:
                    _report(f"{self.host_id}>{receiver}", radio)
        return min((limit for limit in limits if limit), default=0.0)


class SharedLink:
    """The link from this host to another one, for all threads and all kinds of traffic."""

    def __init__(self, links: OutgoingLinks, receiver: str, shaped: ShapedLink) -> None:
        self.links = links
        self.receiver = receiver
        self.shaped = shaped
        self._lock = threading.Lock()
        self._shares: tuple[LinkShare, ...] = ()
        """The shares of the plans that use the link. Only the last one is in force."""
        self._chunk_bytes = _FIRST_CHUNK_BYTES
        """Bytes that this link takes in time, as far as it is known."""
        self._recent_bytes = 0.0
        """Bytes that have left lately. Bytes of `_RECENT_SECONDS` ago count with weight 1/e."""
        self._recent_at = 0.0

    @property
    def name(self) -> str:
        """The label of this link in metrics."""
        return f"{self.links.host_id}>{self.receiver}"

    @property
    def delay_seconds(self) -> float:
        """The emulated one-way delay."""
        return self.links.delay_seconds(self.links.host_id, self.receiver)

    @contextmanager
    def limited_to(self, share: LinkShare) -> Iterator[None]:
        """Gives the link the share of a plan, for all of its traffic."""
        with self._lock:
            self._shares = (*self._shares, share)
        try:
            yield
        finally:
            # An older session may end after a newer one has begun.
            with self._lock:
                self._shares = tuple(other for other in self._shares if other is not share)
            self.shaped.limit(self.rate_bps())

    def rate_bps(self, *, planned: bool = True, reports: bool = False) -> float:
        """Sets the radio, and returns the rate in bit/s; 0 means no limit.

        Args:
            planned: Whether the share of the plan counts.
            reports: Whether metrics get the state of the radio.
        """
        shares = self._shares
        share = shares[-1] if planned and shares else NO_SHARE
        return self.links.rate_bps(self.receiver, share, reports=reports)

    def chunk_bytes(self, largest: int) -> int:
        """Returns the size of the next chunks, at most `largest`.

        A chunk takes about 20 ms where the rate is known. Where nothing shapes, or the kernel does, it takes
        half a second at most, as far as the chunks before it show. The buffers of the kernel take a whole frame at
        once, at any rate of the link. So the mean rate of the last ten seconds limits the chunk, too.
        """
        quantum = self.shaped.quantum_bytes(self.rate_bps(), largest)
        if quantum == largest:
            by_rate = self._recent(time.monotonic()) * _MAX_CHUNK_SECONDS / _RECENT_SECONDS
            quantum = min(largest, max(int(by_rate), _FIRST_CHUNK_BYTES))
        return min(quantum, self._chunk_bytes)

    def wait(self, num_bytes: int, traffic: Traffic) -> None:
        """Waits until a single message may leave."""
        with self.shaped.burst(traffic) as wait:
            wait(num_bytes, self.rate_bps())

    def paced(
        self, messages: Iterable[M], traffic: Traffic, *, planned: bool = True
    ) -> Iterator[M]:
        """Yields each message of a burst when it may leave. Give the messages to gRPC as they come.

        Args:
            messages: Messages of the protocol, or chunks with the size of `chunk_bytes`.
            planned: Whether the share of the plan counts.
        """
        is_complete = False
        try:
            with self.shaped.burst(traffic) as wait:
                for message in messages:
                    num_bytes = message_bytes(message)
                    wait(num_bytes, self.rate_bps(planned=planned))
                    started = time.perf_counter()
                    yield message
                    # gRPC asks for the next message once the network has taken this one. A push also waits until
                    # the edge server has acknowledged enough.
                    self._learn(num_bytes, time.perf_counter() - started)
            is_complete = True
        finally:
            if not is_complete:  # The network may have changed, so the next chunks are small again.
                self._recent_bytes = 0.0

    def paced_weights(self, pieces: Iterable[bytes | memoryview], largest: int) -> Iterator[bytes]:
        """Yields the bytes of a blob in chunks, each when it may leave, after the emulated delay.

        Args:
            pieces: The bytes, in pieces of any size.
            largest: Most bytes of a chunk.
        """
        if delay := self.delay_seconds:
            time.sleep(delay)
        yield from self.paced(self._cut(pieces, largest), Traffic.WEIGHTS)

    def _cut(self, pieces: Iterable[bytes | memoryview], largest: int) -> Iterator[bytes]:
        for piece in pieces:
            start = 0
            while start < len(piece):
                chunk = bytes(piece[start : start + self.chunk_bytes(largest)])
                start += len(chunk)
                yield chunk

    def _recent(self, now: float) -> float:
        return self._recent_bytes * math.exp((self._recent_at - now) / _RECENT_SECONDS)

    def _learn(self, num_bytes: int, seconds: float) -> None:
        """Adapts the size of chunks to the time in which the network took one."""
        now = time.monotonic()
        self._recent_bytes, self._recent_at = self._recent(now) + num_bytes, now
        in_time = int(num_bytes * _MAX_CHUNK_SECONDS / max(seconds, 1e-6))
        if in_time < num_bytes:
            # A short message may have waited for what was sent before it.
            if 2 * num_bytes >= self._chunk_bytes:
                self._chunk_bytes = max(in_time, _LEAST_CHUNK_BYTES)
        elif num_bytes >= self._chunk_bytes:
            self._chunk_bytes = min(in_time, 2 * num_bytes)


def message_bytes(message: "Sized | bytes") -> int:
    """Returns the bytes of a chunk or an encoded message, without the headers of gRPC and TCP."""
    return len(message) if isinstance(message, bytes) else message.ByteSize()


def _report(link: str, radio: RadioState) -> None:
    metrics.RADIO_CHANNEL_GAIN.labels(link).set(radio.gain)
    metrics.RADIO_NOISE_WATTS_PER_HERTZ.labels(link).set(radio.noise_watts_per_hertz)
    metrics.RADIO_TRANSMIT_POWER_WATTS.labels(link).set(radio.power_watts)
