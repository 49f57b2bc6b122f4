"""How many wrong tokens callers may try."""

import threading
from collections import OrderedDict

_MOST = 10
"""Within a minute; somebody who mistypes needs fewer."""
_SECONDS = 60.0
_MOST_CALLERS = 1024
"""The longest known is forgotten first."""


class WrongTokens:
    """Counts wrong tokens by caller.

    Guessing 256 bits is hopeless at any rate; this bounds what the attempt costs the authority and its log.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: OrderedDict[str, tuple[float, int]] = OrderedDict()

    def blocked(self, caller: str, now: float) -> bool:
        """Whether a caller has to wait.

        Args:
            caller: Address.
            now: Reading of a steady clock, in seconds.
        """
        with self._lock:
            return self._current(caller, now)[1] >= _MOST

    def add(self, caller: str, now: float) -> None:
        """Counts one."""
        with self._lock:
            since, count = self._current(caller, now)
            self._counts[caller] = (since, count + 1)
            while len(self._counts) > _MOST_CALLERS:
                self._counts.popitem(last=False)

    def _current(self, caller: str, now: float) -> tuple[float, int]:
        since, count = self._counts.get(caller, (now, 0))
        return (since, count) if now - since < _SECONDS else (now, 0)
