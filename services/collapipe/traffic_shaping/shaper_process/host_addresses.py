"""Looks up the addresses of hosts in a thread of its own, so that a slow name service delays nothing else."""

import logging
import socket
import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass

logger = logging.getLogger(__name__)

_RETRY_SECONDS = 1.0
_REFRESH_SECONDS = 10.0
"""A container that is created again has another address."""


@dataclass(frozen=True)
class HostAddresses:
    """The IP addresses of a host, sorted."""

    addresses: tuple[str, ...]
    confirmed_at: float
    """When the name service last returned them, on the monotonic clock."""


class AddressBook:
    """Looks up the addresses of hosts repeatedly."""

    def __init__(self) -> None:
        self._hosts: frozenset[str] = frozenset()
        self._known: dict[str, HostAddresses] = {}
        self._asked_at: dict[str, float] = {}
        self._wake = threading.Event()
        threading.Thread(target=self._run, name="address-book", daemon=True).start()

    def follow(self, hosts: Iterable[str]) -> None:
        """Sets the hosts to look up from now on."""
        wanted = frozenset(hosts)
        if wanted != self._hosts:
            self._hosts = wanted
            self._wake.set()

    def find(self, host: str) -> HostAddresses | None:
        """Returns the addresses of a host, or `None` if no lookup has succeeded yet."""
        return self._known.get(host)

    def _run(self) -> None:
        while True:
            for host in sorted(self._hosts):
                period = _REFRESH_SECONDS if host in self._known else _RETRY_SECONDS
                if time.monotonic() - self._asked_at.get(host, -period) >= period:
                    self._look_up(host)
            self._wake.wait(_RETRY_SECONDS)
            self._wake.clear()

    def _look_up(self, host: str) -> None:
        found = look_up(host)
        self._asked_at[host] = time.monotonic()
        if found is None:  # A host that restarts keeps its address until another host gets it.
            return
        former = self._known.get(host)
        self._known[host] = found
        if former is None or former.addresses != found.addresses:
            logger.info("%s has the address %s", host, ", ".join(found.addresses))


def look_up(host: str) -> HostAddresses | None:
    """Looks up a host once. Returns `None` if its name has no address."""
    try:
        answers = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError:
        return None
    addresses = {str(answer[4][0]) for answer in answers}
    # Link-local addresses contain a "%", and are of no use here.
    usable = sorted(address for address in addresses if "%" not in address)
    return HostAddresses(tuple(usable), time.monotonic()) if usable else None
