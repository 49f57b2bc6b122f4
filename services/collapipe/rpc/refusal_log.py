"""What the log tells of refused callers."""

import logging
import threading
import time

from collapipe.printable import printable

logger = logging.getLogger(__name__)

_TOLD_SECONDS = 60.0
"""Least time between two lines about one caller and one method."""

_MOST_TOLD = 1024
"""Callers and methods that are remembered for that."""


class RefusalLog:
    """Writes refusals to the log, but seldom the same one. So nobody can fill the disk."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._told: dict[tuple[str, str], float] = {}
        """When the log last told of a refused call, by method and caller."""

    def tell(self, method: str, caller: str, error: BaseException) -> None:
        """Tells of a refused call, unless the log told of the same caller and method lately."""
        now = time.monotonic()
        with self._lock:
            if now - self._told.get((method, caller), -_TOLD_SECONDS) < _TOLD_SECONDS:
                return
            if len(self._told) >= _MOST_TOLD:
                self._told.clear()
            self._told[method, caller] = now
        # The caller may have chosen a part of the text, and must not begin another line.
        logger.warning("refused a call of %s to %s: %s", caller, method, printable(str(error)))
