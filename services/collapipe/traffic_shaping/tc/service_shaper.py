"""Shaping of a service's own links by the kernel.

The kernel limits all packets to the address of a receiver, also weights and commands, as a radio would.
Links to the same address share one limit, so hosts on one machine should use pacing. The shaper needs
CAP_NET_ADMIN.
"""

import logging
import socket
import threading
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

from collapipe.errors import InvalidInputError
from collapipe.traffic_shaping.pacing import PacedLink, ShapedLink, Shaper, Traffic, Wait
from collapipe.traffic_shaping.tc.classes import Root
from collapipe.traffic_shaping.tc.disciplines import ClassRate
from collapipe.traffic_shaping.tc.interface import SERVICE_HANDLE, Interface

logger = logging.getLogger(__name__)

_MIN_RATE_BPS = 1000


class TrafficControlShaper(Shaper):
    """Shapes the links of this service on the interface that leads to the receivers.

    Args:
        tc: The program tc and its first arguments.

    Raises:
        InvalidInputError: tc is missing or may not change the interface, or another program shapes the
            interface.
    """

    def __init__(self, interface: str, tc: Sequence[str] = ("tc",)) -> None:
        self._interface = Interface(interface, SERVICE_HANDLE, tc)
        self._lock = threading.Lock()
        self._limits: dict[str, ClassRate] = {}
        self._num_links: Counter[str] = Counter()
        self._root: Root | None = None
        """The present root of the interface; `None` if it has to be read."""
        self._interface.remove()  # An earlier process that was killed may have left its root.
        self._change({})

    def open(self) -> ShapedLink:
        return _KernelLink(self)

    def close(self) -> None:
        try:
            self._interface.remove()
        except InvalidInputError as error:
            logger.warning("%s stays shaped: %s", self._interface.name, error)

    def limit(self, ip: str, rate_bps: float) -> None:
        """Limits the packets to an address; raises `InvalidInputError` if tc fails."""
        with self._lock:
            limits = self._limits | {ip: ClassRate(max(rate_bps, _MIN_RATE_BPS))}
            if limits != self._limits:
                self._change(limits)

    def take(self, ip: str) -> None:
        """Counts one more link with a limit to an address."""
        with self._lock:
            self._num_links[ip] += 1

    def release(self, ip: str) -> None:
        """Ends the limit of one link to an address. With its last link, the address loses its limit."""
        with self._lock:
            self._num_links[ip] -= 1
            if self._num_links[ip] or ip not in self._limits:
                return
            try:
                self._change({other: at for other, at in self._limits.items() if other != ip})
            except InvalidInputError as error:
                logger.warning("packets to %s stay limited: %s", ip, error)

    def _change(self, limits: Mapping[str, ClassRate]) -> None:
        root, self._root = self._root or self._interface.read(), None
        self._interface.change(root, limits)
        self._root, self._limits = root, dict(limits)


class _KernelLink(ShapedLink):
    """A link that the kernel shapes. If the kernel refuses, or while the address is unknown, the link is paced."""

    def __init__(self, shaper: TrafficControlShaper) -> None:
        self._shaper = shaper
        self._lock = threading.Lock()
        self._ip = ""
        """The address with a limit of this link; empty if it has none."""
        self._rate_bps = 0.0
        self._paced = PacedLink()
        self._is_refused = False

    @property
    def _is_paced(self) -> bool:
        return self._is_refused or not self.address

    def quantum_bytes(self, rate_bps: float, largest: int) -> int:
        return self._paced.quantum_bytes(rate_bps, largest) if self._is_paced else largest

    @contextmanager
    def burst(self, traffic: Traffic) -> Iterator[Wait]:
        with self._paced.burst(traffic) as paced_wait:

            def wait(num_bytes: int, rate_bps: float) -> None:
                self.limit(rate_bps)
                if self._is_paced:
                    paced_wait(num_bytes, rate_bps)

            yield wait

    def limit(self, rate_bps: float) -> None:
        with self._lock:
            if self._is_paced or rate_bps == self._rate_bps:
                return
            self._rate_bps = rate_bps
            if not rate_bps:
                self._shaper.release(self._ip)
                self._ip = ""
                return
            try:
                if not self._ip:
                    ip = _resolve(self.address)
                    self._shaper.take(ip)
                    self._ip = ip
                self._shaper.limit(self._ip, rate_bps)
            except InvalidInputError as error:
                logger.warning("the link to %s is paced from now on: %s", self.address, error)
                self._is_refused = True
                if self._ip:
                    self._shaper.release(self._ip)


def _resolve(address: str) -> str:
    host = address.rpartition(":")[0].strip("[]")
    try:
        return str(socket.getaddrinfo(host, None)[0][4][0])
    except OSError as error:
        raise InvalidInputError(
            f"cannot shape the link to {address}: the name {host!r} cannot be resolved ({error})"
        ) from None
