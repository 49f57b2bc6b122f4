"""A limit on how often a caller may try wrong join tokens."""

import threading
from collections import OrderedDict

_MAX_ATTEMPTS = 10
"""The limit within `_SECONDS`. Nobody mistypes a token so often."""
_SECONDS = 60.0
_MAX_CALLERS = 1024
"""Beyond this number, the oldest callers are forgotten."""


class FailedAttempts:
    """Counts failed attempts by caller.

    Nobody can guess a secret of 256 bits, but many attempts would slow the authority and fill its log.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: OrderedDict[str, tuple[float, int]] = OrderedDict()

    def is_blocked(self, caller: str, now: float) -> bool:
        """Returns whether a caller must wait.

        Args:
            caller: An IP address.
            now: Time of a monotonic clock, in seconds.
        """
        with self._lock:
            return self._current(caller, now)[1] >= _MAX_ATTEMPTS

    def add(self, caller: str, now: float) -> None:
        """Counts one failed attempt."""
        with self._lock:
            since, count = self._current(caller, now)
            self._counts[caller] = (since, count + 1)
            while len(self._counts) > _MAX_CALLERS:
                self._counts.popitem(last=False)

    def _current(self, caller: str, now: float) -> tuple[float, int]:
        since, count = self._counts.get(caller, (now, 0))
        return (since, count) if now - since < _SECONDS else (now, 0)
