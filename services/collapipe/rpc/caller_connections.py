"""Bounds the connections of one caller. gRPC keeps a buffer for each, and only closes those that are dead."""

import logging
import threading
import time

import psutil

from collapipe.errors import PeerLostError

MOST_CONNECTIONS = 64
"""Connections of one caller to one server. After messages of several MiB, the buffer of a connection has up to 10 MB."""

_LOOK_SECONDS = 1.0
"""How often a server looks which connections have closed. So a caller who makes many keeps no processor busy."""

_FEW_ENTRIES = 1024

logger = logging.getLogger(__name__)


class CallerConnections:
    """The connections over which the callers of a server have called.

    gRPC does not tell when a connection closes. So the operating system is asked before a caller is refused.
    """

    def __init__(self, most: int = MOST_CONNECTIONS, look_seconds: float = _LOOK_SECONDS) -> None:
        self._most = most
        self._look_seconds = look_seconds
        self._lock = threading.Lock()
        self._ports: dict[str, set[int]] = {}
        """The ports of a caller's side, by the caller's name."""
        self._next_look = 0.0
        self._most_entries = _FEW_ENTRIES

    def check(self, caller: str, peer: str) -> None:
        """Refuses a call over one connection too many; raises `PeerLostError`.

        Args:
            peer: The address of the caller as gRPC tells it, for example "ipv4:127.0.0.1:50000".
        """
        port = peer.rpartition(":")[2]
        # In plain text, each connection is a caller.
        if caller == peer or not port.isdecimal():
            return
        with self._lock:
            ports = self._ports.get(caller, set())
            if int(port) in ports:
                return
            if len(ports) >= self._most or len(self._ports) >= self._most_entries:
                self._forget_closed()
                ports = self._ports.get(caller, set())
            if len(ports) >= self._most:
                raise PeerLostError(
                    "",
                    f"{caller} has {len(ports)} connections, and may not have more than {self._most}: close one, or try again "
                    "when one has closed",
                )
            self._ports.setdefault(caller, ports).add(int(port))

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
            self._ports.clear()
            return
        # A closed connection counts as open while another caller happens to use the same port.
        present = {connection.raddr.port for connection in connections if connection.raddr}
        self._ports = {
            caller: kept for caller, ports in self._ports.items() if (kept := ports & present)
        }
        self._most_entries = max(_FEW_ENTRIES, 2 * len(self._ports))
