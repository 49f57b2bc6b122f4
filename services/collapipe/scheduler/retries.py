"""Decides after which errors a job tries again, when, and for how long."""

import time
from collections import Counter
from collections.abc import Callable

from collapipe.errors import (
    AttemptFailedError,
    CollapipeError,
    CorruptDataError,
    DivergedError,
    InfeasibleError,
    NotFoundError,
    PeerFaultyError,
    PeerLostError,
    WrongStateError,
)

_FIRST_WAIT_SECONDS = 0.5
"""Wait before the second attempt after a failure. The first one begins at once, and each later wait is twice as long."""

_LONGEST_WAIT_SECONDS = 15.0

_OTHER_SECONDS = 60.0
"""How long a job tries again after errors that are not about a lost host. Most of them come back with every attempt."""

_MOST_REPEATS = 10
"""How often a job may repeat committed rounds without getting beyond the round that failed, or moving its restore point."""

_MOST_FAULTS = 3
"""Attempts that one host may end by wrong answers, or by signs of life without progress, before the job ends. So many may also
end by values that are not finite: a host may be broken, but mostly the training diverges."""

_PASSING = (AttemptFailedError, CorruptDataError, NotFoundError, WrongStateError, OSError)
"""Errors that may pass, because a host was restarted, a disk was full, or bytes were garbled."""


class Retries:
    """The failed attempts of one job since its last commit.

    Args:
        limit_seconds: How long a job may try without a commit. 0 means that it never tries again.
        clock: Returns a time in seconds from any fixed start.
    """

    def __init__(self, limit_seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._limit_seconds = limit_seconds
        self._clock = clock
        self._first_failure_at: float | None = None
        self._first_other_at: float | None = None
        """Time of the first of the present failures that are not about a lost host."""
        self._ends_at: float | None = None
        """When the tries end, if the failures go on to be of the kind of the last one."""
        self.num_failures = 0
        """Number of failed attempts since the last commit."""
        self._has_committed = False
        self._most_rounds = 0
        self._most_restorable = 0
        self._num_repeats = 0
        self._faults: Counter[str] = Counter()
        """Attempts that each host has ended by wrong answers or without progress."""
        self._diverged: Counter[str] = Counter()
        """Attempts that ended with values that are not finite, by the host that sent them; "" for losses and norms."""

    def committed(self, num_rounds: int, num_restorable: int) -> None:
        """Tells how many rounds are committed now, and how many the restore point has. Time limits start again.

        The number of repeats starts again if there were never as many rounds, or if the restore point has moved on. The counts of
        faults of hosts start again only in the first case.
        """
        self._first_failure_at = self._first_other_at = self._ends_at = None
        self.num_failures = 0
        self._has_committed = True
        if num_rounds > self._most_rounds or num_restorable > self._most_restorable:
            self._num_repeats, self._most_restorable = 0, num_restorable
        if num_rounds > self._most_rounds:
            self._most_rounds = num_rounds
            self._faults.clear()
            self._diverged.clear()

    def seconds_left(self) -> float:
        """Returns how long the job may still wait for a host."""
        since = 0.0 if self._first_failure_at is None else self._clock() - self._first_failure_at
        return self._limit_seconds - since

    def seconds_to_try(self) -> float | None:
        """Returns how long the job still tries again after errors like the last one; `None` after a commit."""
        return None if self._ends_at is None else self._ends_at - self._clock()

    def after(self, error: CollapipeError | OSError, *, lacks_hosts: bool) -> float | None:
        """Returns the seconds to wait before the next try; `None` if the job has to end with this error.

        Args:
            lacks_hosts: Whether devices were missing that the job asks for or has used before.
        """
        now = self._clock()
        wait = 0.0
        # A repeated round may succeed within a second, so that without a wait all repeats are soon used up.
        if earlier := max(self.num_failures, self._num_repeats):
            wait = min(_FIRST_WAIT_SECONDS * 2.0 ** min(earlier - 1, 9), _LONGEST_WAIT_SECONDS)
        self.num_failures += 1
        self._num_repeats += self._has_committed
        self._has_committed = False
        if self._first_failure_at is None:
            self._first_failure_at = now
        first, limit = self._first_failure_at, self._limit_seconds
        if isinstance(error, PeerFaultyError):
            self._faults[error.host_id] += 1
            if error.refuses or self._faults[error.host_id] >= _MOST_FAULTS:
                return None
        if isinstance(error, DivergedError):
            # A training repeats itself bit for bit. So what comes back from the same place would come back again.
            self._diverged[error.host_id] += 1
            if self._diverged[error.host_id] > 1 or self._diverged.total() >= _MOST_FAULTS:
                return None
        if isinstance(error, PeerLostError) or (isinstance(error, InfeasibleError) and lacks_hosts):
            self._first_other_at = None
        elif isinstance(error, (DivergedError, *_PASSING)):
            if self._first_other_at is None:
                self._first_other_at = now
            first = self._first_other_at
            limit = min(limit, _OTHER_SECONDS)
        else:
            return None
        if self._num_repeats > _MOST_REPEATS:
            return None
        self._ends_at = first + limit
        return wait if now + wait - first < limit else None
