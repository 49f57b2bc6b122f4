"""Numbers the grants of a scheduler, and says from which number on they count at a host."""

import logging
import shlex
import threading
import time
from collections.abc import Callable, Iterable

from collapipe.database import NOT_STORED, Database
from collapipe.errors import CorruptDataError

logger = logging.getLogger(__name__)

_RESERVED = 60_000_000
"""How many numbers are reserved at a time: those of a minute. So the database is written at most once a minute."""


_MOST = 1 << 62
"""No clock gets there, and messages have room for more."""


class GrantNumbers:
    """Numbers that only grow, also after a restart. It is thread-safe.

    A number is the Unix time in microseconds, or one more than the last number if that is larger. The table `grant_number` has a
    number that none has exceeded yet, and the next process begins behind it. So a clock that is set back changes nothing.

    Args:
        database: Has the table.
        clock: Returns the Unix time in seconds.

    Raises:
        CorruptDataError: The number in the table is not possible. With a wrong clock, an old grant would count again. So a person has
            to look at the clock, and the message has the command that then replaces the number.
    """

    def __init__(self, database: Database, clock: Callable[[], float] = time.time) -> None:
        self._database = database
        self._clock = clock
        self._lock = threading.Lock()
        [(self._reserved,)] = database.execute("SELECT max(reserved) FROM grant_number")
        if not isinstance(self._reserved, int) or not 0 <= self._reserved < _MOST:
            raise CorruptDataError(
                f"{database.path} is damaged (reserved in table grant_number is {self._reserved!r:.80}, and must be 0 to {_MOST - 1}): "
                f"restore it from a copy; or make sure that the clock of this machine is right (`date`), and run `{self._remedy()}`"
            )
        # Without a number, grants of earlier processes may be about. They are older than the clock.
        self._last: int = max(self._reserved, self._now() - 1)
        self._attempts: dict[int, int] = {}
        """The number at which the present attempt on each cluster of the deployment began. No two attempts share a cluster."""

    def next(self) -> int:
        """Returns the number of a new grant."""
        with self._lock:
            return self._next()

    def begin_attempt(self, host_clusters: Iterable[int]) -> None:
        """Lets only later grants count in these clusters of the deployment."""
        with self._lock:
            self._attempts |= dict.fromkeys(host_clusters, self._next())

    def end_attempt(self, host_clusters: Iterable[int]) -> None:
        """Lets no grant so far count in these clusters of the deployment."""
        with self._lock:
            for index in host_clusters:
                self._attempts.pop(index, None)

    def least(self, host_cluster: int | None) -> int:
        """Returns the least number of a grant that counts in a cluster of the deployment.

        Args:
            host_cluster: `None` for the edge server, where the grants of all present attempts count.
        """
        with self._lock:
            unused = self._last + 1
            if host_cluster is None:
                return min(self._attempts.values(), default=unused)
            return self._attempts.get(host_cluster, unused)

    def _next(self) -> int:
        number = max(self._last + 1, self._now())
        if number > self._reserved:
            reserved = number + _RESERVED
            try:
                self._database.execute("UPDATE grant_number SET reserved = ?", reserved)
                self._reserved = reserved
            except NOT_STORED:  # The next number tries again.
                logger.exception("the numbers of grants could not be stored")
        self._last = number
        return number

    def _now(self) -> int:
        return int(self._clock() * 1e6)

    def _remedy(self) -> str:
        """Returns the command that lets the numbers go on a day later than now. Restarts may have taken the numbers ahead of the clock,
        by a minute each."""
        path = shlex.quote(str(self._database.path))
        number = "(strftime('%s', 'now') + 86400) * 1000000"
        return (
            f'sqlite3 {path} "DELETE FROM grant_number; INSERT INTO grant_number SELECT {number}"'
        )
