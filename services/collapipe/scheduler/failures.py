"""Says of errors what kind of failure they are, and why a job does not try again, in words."""

from collapipe.errors import (
    AttemptFailedError,
    CancelledError,
    CollapipeError,
    CorruptDataError,
    DivergedError,
    InfeasibleError,
    InvalidInputError,
    NotFoundError,
    PeerFaultyError,
    PeerLostError,
    WrongStateError,
)
from collapipe.job_life.tries import Failure, GivesUp, Kind, Tries

_PASSING = (AttemptFailedError, CorruptDataError, NotFoundError, WrongStateError, OSError)


def failure_of(error: BaseException, *, lacks_hosts: bool = False) -> Failure:
    """Returns the failure that ended an attempt, or the work of a cluster, with an error.

    Args:
        lacks_hosts: As in `Failure`.
    """
    if isinstance(error, PeerFaultyError):
        kind = Kind.HOST_REFUSES if error.refuses else Kind.HOST_FAULTY
        return Failure(kind, error.host_id, lacks_hosts)
    if isinstance(error, PeerLostError):
        return Failure(Kind.HOST_LOST, error.host_id, lacks_hosts)
    if isinstance(error, DivergedError):
        return Failure(Kind.NOT_FINITE, error.host_id, lacks_hosts)
    if isinstance(error, InfeasibleError):
        return Failure(Kind.NO_PLAN, "", lacks_hosts)
    if isinstance(error, InvalidInputError):
        return Failure(Kind.INVALID, "", lacks_hosts)
    if isinstance(error, CancelledError):
        return Failure(Kind.CANCELLED, "", lacks_hosts)
    kind = Kind.LASTING if isinstance(error, CollapipeError) else Kind.BUG
    if isinstance(error, _PASSING):
        kind = Kind.PASSING
    return Failure(kind, "", lacks_hosts)


def say_end(why: GivesUp, tries: Tries) -> str:
    """Says why a job does not try again; empty if its last error says so itself."""
    attempts = f"{tries.num_failures} attempt{'s' * (tries.num_failures != 1)}"
    match why:
        case GivesUp.FAULTY_TOO_OFTEN:
            return "the job is given up, because the same host has ended several attempts by wrong answers or without progress"
        case GivesUp.NOT_FINITE_AGAIN:
            return "the job is given up, because such values came back in another attempt"
        case GivesUp.TOO_MANY_REPEATS:
            return (
                f"the job is given up, because it has repeated committed rounds {tries.num_repeats - 1} times, which is the limit, and got no "
                "further: repair the cause, and resume the job with `collapipe train --resume`"
            )
        case GivesUp.TIME_IS_OVER if tries.limit_seconds:
            return (
                f"the job is given up after {attempts} without a commit, because it tries again for at most "
                f"{tries.seconds_of_tries:.0f} s after such failures: repair the cause, and resume the job with `collapipe train --resume`"
            )
    return ""
