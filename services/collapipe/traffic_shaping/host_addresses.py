"""Addresses of hosts, looked up beside the work: a name service that does not answer holds nothing up."""

import logging
import socket
import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass

logger = logging.getLogger(__name__)

_UNKNOWN_AGAIN_SECONDS = 1.0
_KNOWN_AGAIN_SECONDS = 10.0
"""Containers that are made anew have other addresses."""


@dataclass(frozen=True)
class Found:
    """What a name stands for.

    Args:
        addresses: IP addresses, sorted.
        at: When that was last confirmed, on the monotonic clock.
    """

    addresses: tuple[str, ...]
    at: float


class Names:
    """Looks names up again and again."""

    def __init__(self) -> None:
        self._wanted: frozenset[str] = frozenset()
        self._found: dict[str, Found] = {}
        self._asked: dict[str, float] = {}
        self._wake = threading.Event()
        threading.Thread(target=self._run, name="names", daemon=True).start()

    def want(self, names: Iterable[str]) -> None:
        """Says which names are looked up from now on."""
        wanted = frozenset(names)
        if wanted != self._wanted:
            self._wanted = wanted
            self._wake.set()

    def found(self, name: str) -> Found | None:
        """What a name stands for, as far as is known."""
        return self._found.get(name)

    def _run(self) -> None:
        while True:
            for name in sorted(self._wanted):
                again = _KNOWN_AGAIN_SECONDS if name in self._found else _UNKNOWN_AGAIN_SECONDS
                if time.monotonic() - self._asked.get(name, -again) >= again:
                    self._look_up(name)
            self._wake.wait(_UNKNOWN_AGAIN_SECONDS)
            self._wake.clear()

    def _look_up(self, name: str) -> None:
        addresses = resolve(name)
        self._asked[name] = time.monotonic()
        if not addresses:  # a host that restarts keeps its address until another has it
            return
        before = self._found.get(name)
        self._found[name] = Found(addresses, time.monotonic())
        if before is None or before.addresses != addresses:
            logger.info("%s is %s", name, ", ".join(addresses))


def resolve(name: str) -> tuple[str, ...]:
    """Looks a name up once; empty when it stands for nothing."""
    try:
        answers = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    except OSError:
        return ()
    return tuple(sorted({str(answer[4][0]) for answer in answers if "%" not in str(answer[4][0])}))
