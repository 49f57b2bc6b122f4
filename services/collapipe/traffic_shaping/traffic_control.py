"""Shaping by the kernel: a class of htb for each receiver, set with `tc`.

Shapes all that goes to the receiver's address, weights and commands too, as a radio would. Needs CAP_NET_ADMIN. Receivers
behind one address share one class, so on one machine pacing is the shaper to use.
"""

import ipaddress
import json
import logging
import socket
import threading
from collections.abc import Sequence

from collapipe.errors import InvalidInputError
from collapipe.traffic_shaping.commands import run_command
from collapipe.traffic_shaping.pacing import PacedLink, ShapedLink, Shaper

logger = logging.getLogger(__name__)

HANDLE = "c011:"
"""Tells our queueing discipline from anybody else's."""
KERNEL_DEFAULTS = {"noqueue", "mq", "fq", "fq_codel", "pfifo_fast"}
"""What an interface has that nobody shaped."""
_LEAST_RATE_BPS = 1000
_BURST_SECONDS = 0.002
_LEAST_BURST_BYTES = 3200
"""Two packets."""
_NEEDS = (
    "tc (iproute2) needs the interface to exist, CAP_NET_ADMIN, and a kernel with sch_htb and cls_u32; without, use "
    "--shaper pacing"
)


class TrafficControlShaper(Shaper):
    """Shapes with `tc` on one interface.

    Args:
        interface: Through which the receivers are reached.
        command: How to run tc.

    Raises:
        InvalidInputError: There is no tc, it may not change the interface, or somebody else shapes it.
    """

    def __init__(self, interface: str, command: Sequence[str] = ("tc",)) -> None:
        self._interface = interface
        self._command = list(command)
        self._lock = threading.Lock()
        self._rates: dict[str, float] = {}
        self._numbers: dict[str, int] = {}
        self._users: dict[str, int] = {}
        found = json.loads(self._run("-j", "qdisc", "show", "dev", interface) or "[]")
        roots = [qdisc for qdisc in found if qdisc.get("root")]
        if any(qdisc["handle"] == HANDLE for qdisc in roots):
            self._remove_root()  # of a process that was killed
        elif foreign := [q["kind"] for q in roots if q["kind"] not in KERNEL_DEFAULTS]:
            raise InvalidInputError(
                f"interface {interface} is shaped by somebody else ({', '.join(foreign)}): remove that with "
                f"`tc qdisc del dev {interface} root`, or use --shaper pacing"
            )
        # what belongs to no class is not shaped
        self._run("qdisc", "add", "dev", interface, "root", "handle", HANDLE, "htb", "default", "0")

    def open(self, address: str) -> ShapedLink:
        """Shapes what is sent to the host of an address.

        Raises:
            InvalidInputError: The name of the host is not known.
        """
        host = address.rpartition(":")[0].strip("[]")
        try:
            ip = str(socket.getaddrinfo(host, None)[0][4][0])
        except OSError as error:
            raise InvalidInputError(
                f"cannot shape what is sent to {address}: {host!r} is not known ({error})"
            ) from None
        with self._lock:
            self._users[ip] = self._users.get(ip, 0) + 1
        return _KernelLink(self, ip)

    def close(self) -> None:
        """Removes every class and the queueing discipline."""
        try:
            self._remove_root()
        except InvalidInputError as error:
            logger.warning("%s is left shaped: %s", self._interface, error)

    def apply(self, ip: str, rate_bps: float) -> None:
        """Limits what is sent to an address; again with the same rate, it does nothing.

        Args:
            ip: Of the receiver.
            rate_bps: In bit/s; 0 ends the limit.

        Raises:
            InvalidInputError: tc refused.
        """
        with self._lock:
            if self._rates.get(ip, 0.0) == rate_bps:
                return
            if rate_bps:
                self._limit(ip, max(rate_bps, _LEAST_RATE_BPS))
            else:
                self._unlimit(ip)
            self._rates[ip] = rate_bps

    def release(self, ip: str) -> None:
        """A link to an address ended; with the last one its class goes."""
        with self._lock:
            self._users[ip] -= 1
            if self._users[ip]:
                return
            del self._users[ip]
            if self._rates.pop(ip, 0.0):
                try:
                    self._unlimit(ip)
                except InvalidInputError as error:
                    logger.warning("what is sent to %s is left shaped: %s", ip, error)

    def _limit(self, ip: str, rate_bps: float) -> None:
        number = self._numbers.setdefault(ip, len(self._numbers) + 1)
        burst = max(_LEAST_BURST_BYTES, int(rate_bps * _BURST_SECONDS / 8))
        size = ("burst", str(burst), "cburst", str(burst), "quantum", "1514")
        rate = ("rate", f"{rate_bps:.0f}bit", "ceil", f"{rate_bps:.0f}bit")
        self._change("class", "replace", number, "classid", _class(number), "htb", *rate, *size)
        if not self._rates.get(ip):
            version = ipaddress.ip_address(ip).version
            protocol, match = ("ip", "ip") if version == 4 else ("ipv6", "ip6")
            which = ("protocol", protocol, "prio", str(number), "u32", "match", match, "dst", ip)
            self._change("filter", "replace", number, *which, "flowid", _class(number))

    def _unlimit(self, ip: str) -> None:
        number = self._numbers[ip]
        self._change("filter", "del", number, "prio", str(number))
        self._change("class", "del", number, "classid", _class(number))

    def _change(self, what: str, how: str, number: int, *arguments: str) -> None:
        self._run(what, how, "dev", self._interface, "parent", HANDLE, *arguments)

    def _remove_root(self) -> None:
        self._run("qdisc", "del", "dev", self._interface, "root", "handle", HANDLE)

    def _run(self, *arguments: str) -> str:
        return run_command([*self._command, *arguments], _NEEDS)


class _KernelLink(ShapedLink):
    """One link whose chunks the kernel holds back; paced here when the kernel refuses."""

    def __init__(self, shaper: TrafficControlShaper, ip: str) -> None:
        self._shaper = shaper
        self._ip = ip
        self._paced: PacedLink | None = None

    def chunk_bytes(self, rate_bps: float, largest: int) -> int:
        return self._paced.chunk_bytes(rate_bps, largest) if self._paced else largest

    def begin(self, rate_bps: float) -> None:
        if self._paced is None:
            try:
                self._shaper.apply(self._ip, rate_bps)
                return
            except InvalidInputError as error:
                logger.warning("what is sent to %s is paced from here on: %s", self._ip, error)
                self._paced = PacedLink()
        self._paced.begin(rate_bps)

    def wait(self, num_bytes: int) -> None:
        if self._paced is not None:
            self._paced.wait(num_bytes)

    def close(self) -> None:
        self._shaper.release(self._ip)


def _class(number: int) -> str:
    return f"{HANDLE}{number:x}"
