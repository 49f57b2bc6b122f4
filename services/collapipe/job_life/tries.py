"""Decides after which failures a job tries again, when, and for how long."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import Enum, auto

_FIRST_WAIT_SECONDS = 0.5
"""Wait before the second attempt after a failure. The first one begins at once, and each later wait is twice as long."""

_LONGEST_WAIT_SECONDS = 15.0

_OTHER_SECONDS = 60.0
"""How long a job tries again after failures of other kinds than a lost, faulty or missing host. Most of them come back with every
attempt."""

_MOST_REPEATS = 10
"""How often a job may repeat committed rounds without getting beyond the round that failed, or moving its restore point."""

_MOST_FAULTS = 3
"""The job ends when one host has ended three attempts by wrong answers or without progress. For values that are not finite, the limit
is three attempts, or two with the same host: a host may be broken, but mostly the training diverges."""


class Kind(Enum):
    """Why an attempt failed."""

    HOST_LOST = auto()
    """A host is silent or cannot be reached."""
    HOST_FAULTY = auto()
    """A host gives wrong answers, or makes no progress."""
    HOST_REFUSES = auto()
    """A host says that the request is wrong."""
    NOT_FINITE = auto()
    """A host sent a value that is not finite, or the loss is such a value."""
    NO_PLAN = auto()
    """No placement satisfies the limits."""
    PASSING = auto()
    """A host was restarted, a disk was full, or bytes were garbled."""
    INVALID = auto()
    """A setting or the data is wrong. It would come back with every attempt on the same hosts."""
    LASTING = auto()
    """It would come back with every attempt."""
    CANCELLED = auto()
    """The service that made the call has ended it."""
    BUG = auto()
    """The service that found the failure has a fault of its own."""


@dataclass(frozen=True)
class Failure:
    """How an attempt failed.

    Args:
        host_id: The host to blame; empty if there is none.
        lacks_hosts: Whether devices were missing that the job asks for or has used before.
    """

    kind: Kind
    host_id: str = ""
    lacks_hosts: bool = False


@dataclass(frozen=True)
class Again:
    """The job tries again after some seconds."""

    wait_seconds: float


class GivesUp(Enum):
    """Why a job does not try again."""

    REFUSED = auto()
    FAULTY_TOO_OFTEN = auto()
    NOT_FINITE_AGAIN = auto()
    LASTING = auto()
    TOO_MANY_REPEATS = auto()
    TIME_IS_OVER = auto()


@dataclass(frozen=True)
class Tries:
    """What one job remembers of its failed attempts. Times are in seconds from any fixed start.

    Args:
        limit_seconds: How long the job may try without a commit. 0 means that it never tries again.
        num_failures: Failed attempts since the last commit.
        first_failure_at: Time of the first of them.
        first_other_at: When the failures of other kinds began. Such a kind is none of a lost, faulty or missing host. A commit clears
            it, and so does a failure of a host.
        ends_at: When the tries end, if the failures go on to be of the kind of the last one.
        seconds_of_tries: How long the job tries again after failures like the last one; 0 after a commit.
        has_committed: Whether there was a commit since the last failure, or since the start.
        most_rounds: The most rounds that were ever committed.
        most_restorable: The rounds of the restore point when the job last got further.
        num_repeats: Failures since the job last got further. Of several failures without a commit between them, only the first one
            counts.
        faults: Attempts that each host has ended by wrong answers or without progress.
        not_finite: Attempts that ended with values that are not finite, by the host that sent them; empty for a loss or a norm.
    """

    limit_seconds: float
    num_failures: int = 0
    first_failure_at: float | None = None
    first_other_at: float | None = None
    ends_at: float | None = None
    seconds_of_tries: float = 0.0
    has_committed: bool = False
    most_rounds: int = 0
    most_restorable: int = 0
    num_repeats: int = 0
    faults: Mapping[str, int] = field(default_factory=dict)
    not_finite: Mapping[str, int] = field(default_factory=dict)

    def seconds_left(self, now: float) -> float:
        """Returns how long the job may still wait for a host."""
        since = 0.0 if self.first_failure_at is None else now - self.first_failure_at
        return self.limit_seconds - since

    def seconds_to_try(self, now: float) -> float | None:
        """Returns how long the job still tries again after failures like the last one; `None` after a commit."""
        return None if self.ends_at is None else self.ends_at - now


def after_commit(tries: Tries, num_rounds: int, num_restorable: int) -> Tries:
    """Returns the state after a commit. Time limits start again.

    The number of repeats becomes 0 if more rounds than ever are committed, or if the restore point has moved on. The counts of faults of
    hosts become 0 only in the first case.

    Args:
        num_rounds: How many rounds are committed now.
        num_restorable: How many the restore point has.
    """
    tries = replace(
        tries,
        num_failures=0,
        first_failure_at=None,
        first_other_at=None,
        ends_at=None,
        seconds_of_tries=0.0,
        has_committed=True,
    )
    if num_rounds > tries.most_rounds or num_restorable > tries.most_restorable:
        tries = replace(tries, num_repeats=0, most_restorable=num_restorable)
    if num_rounds > tries.most_rounds:
        tries = replace(tries, most_rounds=num_rounds, faults={}, not_finite={})
    return tries


def after_failure(tries: Tries, failure: Failure, now: float) -> tuple[Tries, Again | GivesUp]:
    """Returns the state after a failed attempt, and whether the job tries again."""
    wait = 0.0
    # A repeated round may succeed within a second, so that without a wait all repeats are soon used up.
    if earlier := max(tries.num_failures, tries.num_repeats):
        wait = min(_FIRST_WAIT_SECONDS * 2.0 ** min(earlier - 1, 9), _LONGEST_WAIT_SECONDS)
    tries = _counted(tries, failure, now)
    if ends := _reason_to_end(tries, failure):
        return tries, ends
    seconds, ends_at = tries.limit_seconds, (tries.first_failure_at or 0.0) + tries.limit_seconds
    if failure.kind in (Kind.HOST_LOST, Kind.HOST_FAULTY) or (
        failure.kind is Kind.NO_PLAN and failure.lacks_hosts
    ):
        tries = replace(tries, first_other_at=None)
    # Both limits count. Otherwise, each failure of a host would give failures of other kinds their whole time again.
    elif (others_end_at := (tries.first_other_at or 0.0) + _OTHER_SECONDS) < ends_at:
        seconds, ends_at = _OTHER_SECONDS, others_end_at
    if tries.num_repeats > _MOST_REPEATS:
        return tries, GivesUp.TOO_MANY_REPEATS
    tries = replace(tries, ends_at=ends_at, seconds_of_tries=seconds)
    return tries, Again(wait) if now + wait < ends_at else GivesUp.TIME_IS_OVER


def _counted(tries: Tries, failure: Failure, now: float) -> Tries:
    """Returns the state with a further failure."""
    is_first = tries.first_failure_at is None
    counted = replace(
        tries,
        num_failures=tries.num_failures + 1,
        num_repeats=tries.num_repeats + tries.has_committed,
        has_committed=False,
        first_failure_at=now if is_first else tries.first_failure_at,
        first_other_at=now if tries.first_other_at is None else tries.first_other_at,
    )
    host_id = failure.host_id
    if failure.kind in (Kind.HOST_FAULTY, Kind.HOST_REFUSES):
        return replace(
            counted, faults={**counted.faults, host_id: counted.faults.get(host_id, 0) + 1}
        )
    if failure.kind is Kind.NOT_FINITE:
        number = counted.not_finite.get(host_id, 0) + 1
        return replace(counted, not_finite={**counted.not_finite, host_id: number})
    return counted


def _reason_to_end(tries: Tries, failure: Failure) -> GivesUp | None:
    """Returns why a failure ends the job, whatever time is left; `None` if it does not. The failure must be counted already."""
    host_id = failure.host_id
    match failure.kind:
        case Kind.HOST_REFUSES:
            return GivesUp.REFUSED
        case Kind.HOST_FAULTY if tries.faults[host_id] >= _MOST_FAULTS:
            return GivesUp.FAULTY_TOO_OFTEN
        # A training repeats itself bit for bit. So what comes back from the same place would come back again.
        case Kind.NOT_FINITE if (
            tries.not_finite[host_id] > 1 or sum(tries.not_finite.values()) >= _MOST_FAULTS
        ):
            return GivesUp.NOT_FINITE_AGAIN
        case Kind.INVALID | Kind.LASTING | Kind.CANCELLED | Kind.BUG:
            return GivesUp.LASTING
        case Kind.NO_PLAN if not failure.lacks_hosts:
            return GivesUp.LASTING
    return None
