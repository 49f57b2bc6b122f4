"""Keeps connections that make no call from taking the descriptors of a process, and the places of its other callers.

It also closes those over which a caller with too many connections has called.

gRPC closes a connection at once if there are too many, and one that shows no certificate after a while. It neither tells of
connections nor limits those of an address. So this looks at the sockets of the process itself.
"""

import logging
import os
import resource
import socket
import stat
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress

from collapipe.rpc.caller_connections import CallerConnections, End, end_at

MOST_CONNECTIONS = 4096
"""Connections to a server at a time. A scheduler with 1,200 hosts needs fewer. Each takes up to 50 kB before its first call."""

LOOK_SECONDS = 0.5
"""Least time between two looks. A look that closed nothing is followed by a pause of 20 times its own duration, if that is longer."""

_DESCRIPTORS = "/proc/self/fd"

_TOLD_SECONDS = 60.0

logger = logging.getLogger(__name__)


def most_connections() -> int:
    """Returns how many connections a server takes: half of the descriptors at most. The others are for files and own calls."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return MOST_CONNECTIONS if soft == resource.RLIM_INFINITY else min(MOST_CONNECTIONS, soft // 2)


def surplus(silent: Sequence[End], most: int) -> list[End]:
    """Returns which silent connections to close, so that `most` are left: those of the IP address that has most of them.

    Of one address, the oldest go first. A host that shares its address with an attacker needs a moment only.

    Args:
        silent: Oldest first.
    """
    of_address = Counter(address for address, _ in silent)
    crowded = sorted(silent, key=lambda end: -of_address[end[0]])
    return crowded[: max(0, len(silent) - most)]


class SilentConnections:
    """Closes connections to a server that have made no call, if they are more than a quarter of those that it takes.

    It also closes refused connections.

    Args:
        port: The port of the server.
        called: Knows the connections that have made a call, and those that were refused.
        most: Connections that the server takes.
    """

    def __init__(self, port: int, called: CallerConnections, most: int) -> None:
        self._port = port
        self._called = called
        self._limit = most
        self._most = most // 4
        self._silent: dict[End, None] = {}
        """Oldest first, as of the last look that found many descriptors in use."""
        self._refused: set[End] = set()
        """Refused connections to close at the next look. By then, they have got their answer."""
        self._told: dict[str, float] = {}
        """When each message was written last."""
        self._closed = threading.Event()
        if os.path.isdir(_DESCRIPTORS):
            threading.Thread(target=self._watch, name="silent connections", daemon=True).start()

    def close(self) -> None:
        """Ends the thread that looks."""
        self._closed.set()

    def _watch(self) -> None:
        wait_seconds = LOOK_SECONDS
        while not self._closed.wait(wait_seconds):
            started = time.monotonic()
            num_closed = 0
            # Without a free descriptor, none can be looked at. The next look may find one.
            with suppress(OSError):
                num_closed = self._look()
            took = time.monotonic() - started
            wait_seconds = LOOK_SECONDS if num_closed else max(LOOK_SECONDS, 20 * took)

    def _look(self) -> int:
        """Closes the surplus and refused connections. Returns the number of the former."""
        refused, self._refused = self._refused, self._called.take_refused()
        if not refused and len(os.listdir(_DESCRIPTORS)) <= self._most:
            return 0
        called = self._called.ends()
        places = {end: place for place, _, end in _connections(self._port, _places())}
        present = list(places)
        if len(present) >= self._limit:
            self._tell(
                "port %d has all of the %d connections that it takes, and refuses others: look from where they come, and raise the limit "
                "of open files if they are hosts and clients (it takes half of it, %d at most)",
                *(self._port, self._limit, MOST_CONNECTIONS),
            )
        silent = {end: None for end in present if end not in called}
        # A dict keeps the place of a key that it has already.
        self._silent = {end: None for end in self._silent if end in silent} | silent
        ends = set(surplus(list(self._silent), self._most))
        refused -= called
        closing = (ends | refused) & places.keys()
        # A descriptor may belong to another connection by now.
        for _, connection, end in _connections(self._port, [places[end] for end in closing]):
            if end in closing:
                with suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)  # gRPC sees its end, and closes it.
        if ends:
            ((address, number),) = Counter(address for address, _ in ends).most_common(1)
            self._tell(
                "closed %d connections that had made no call, %d of them from %s: more than %d were open, so let only hosts and "
                "clients reach port %d",
                *(len(ends), number, address, self._most, self._port),
            )
        return len(ends)

    def _tell(self, message: str, *values: object) -> None:
        now = time.monotonic()
        if now - self._told.get(message, -_TOLD_SECONDS) >= _TOLD_SECONDS:
            self._told[message] = now
            logger.warning(message, *values)


def _places() -> list[int]:
    """Returns the descriptors of this process."""
    return [int(name) for name in os.listdir(_DESCRIPTORS)]


def _connections(port: int, places: Sequence[int]) -> Iterator[tuple[int, socket.socket, End]]:
    """Yields those of the given descriptors that are connections to a port: the descriptor, the socket, and the side of its caller.

    Each socket is a duplicate, which is closed before the next one comes. So another thread cannot give its number to another
    file meanwhile.
    """
    for place in places:
        with suppress(OSError):  # It was closed meanwhile, or it listens.
            if not stat.S_ISSOCK(os.fstat(place).st_mode):
                continue
            # If no family is given, Python asks the kernel for it. It may be wrong here: an address comes with its true family.
            with socket.socket(socket.AF_INET6, socket.SOCK_STREAM, 0, fileno=os.dup(place)) as own:
                name = own.getsockname()
                if isinstance(name, tuple) and name[1] == port:
                    yield place, own, end_at(*own.getpeername()[:2])
