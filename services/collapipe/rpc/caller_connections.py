"""Refuses calls over too many connections of one caller. gRPC keeps a buffer for each connection until it closes."""

import ipaddress
import logging
import threading
import time
from functools import lru_cache
from urllib.parse import unquote

import psutil

from collapipe.errors import PeerLostError

MOST_CONNECTIONS = 64
"""Connections of one caller to one server. After messages of several MiB, the buffer of a connection has up to 10 MB."""

_LOOK_SECONDS = 1.0
"""A server asks at most once in this time which connections have closed, so that a caller cannot keep its processor busy."""

_FEW_CALLERS = 1024
"""With more callers, those without connections are forgotten, so that the table stays small."""

_MOST_REFUSED = 4096
"""Refused connections that are remembered. Where nothing closes them, they would fill the memory."""

End = tuple[str, int]
"""IP address and port of the caller's side of a connection."""

logger = logging.getLogger(__name__)


class CallerConnections:
    """The connections over which the callers of a server have called.

    gRPC does not tell when a connection closes. So the operating system is asked before a caller is refused, at most once in
    `look_seconds`.
    """

    def __init__(self, most: int = MOST_CONNECTIONS, look_seconds: float = _LOOK_SECONDS) -> None:
        self._most = most
        self._look_seconds = look_seconds
        self._lock = threading.Lock()
        self._peers: dict[str, set[str]] = {}
        """By the caller's name."""
        self._refused: set[End] = set()
        """Callers' sides of connections whose last call was refused since `take_refused`."""
        self._next_look = 0.0
        self._most_callers = _FEW_CALLERS

    def check(self, caller: str, peer: str) -> None:
        """Refuses a call over one connection too many; raises `PeerLostError`.

        Args:
            peer: The address of the caller as gRPC tells it, for example "ipv4:127.0.0.1:50000".
        """
        with self._lock:
            peers = self._peers.get(caller, set())
            if peer in peers:
                return
            if len(peers) >= self._most or len(self._peers) >= self._most_callers:
                self._forget_closed()
                peers = self._peers.get(caller, set())
            if len(peers) >= self._most:
                if len(self._refused) < _MOST_REFUSED:
                    self._refused.add(_end_of(peer))
                raise PeerLostError(
                    "",
                    f"{caller} has {len(peers)} connections, and may not have more than {self._most}: close one, or try again "
                    "when one has closed",
                )
            self._peers.setdefault(caller, peers).add(peer)

    def take_refused(self) -> set[End]:
        """Returns the callers' sides of the connections that were refused since the last call."""
        with self._lock:
            refused, self._refused = self._refused, set()
        return refused

    def ends(self) -> set[End]:
        """Returns the callers' sides of the connections that have called. Some of them may have closed."""
        with self._lock:
            called = [peer for peers in self._peers.values() for peer in peers]
        return {_end_of(peer) for peer in called}

    def _forget_closed(self) -> None:
        now = time.monotonic()
        if now < self._next_look:
            return
        self._next_look = now + self._look_seconds
        try:
            connections = psutil.Process().net_connections("tcp")
        except (psutil.Error, OSError) as error:
            logger.warning(
                "cannot see which connections are open, so none counts as one: %s", error
            )
            self._peers.clear()
            return
        present = {end_at(*each.raddr) for each in connections if each.raddr}
        self._peers = {
            caller: kept
            for caller, peers in self._peers.items()
            if (kept := {peer for peer in peers if _end_of(peer) in present})
        }
        self._most_callers = max(_FEW_CALLERS, 2 * len(self._peers))


def _end_of(peer: str) -> End:
    host, _, port = unquote(peer).partition(":")[2].rpartition(":")
    return end_at(host.strip("[]"), int(port))


def end_at(host: str, port: int) -> End:
    """Returns an end in its one form: an IPv4 address in an IPv6 one is the same address."""
    return _one_form(host), port


@lru_cache(
    maxsize=1024
)  # Thousands of connections may come from one address, and parsing takes most of a look.
def _one_form(host: str) -> str:
    ip = ipaddress.ip_address(host.partition("%")[0])
    return str(getattr(ip, "ipv4_mapped", None) or ip)
