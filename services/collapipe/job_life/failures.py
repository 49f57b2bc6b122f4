"""Says of errors what kind of failure they are."""

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
from collapipe.job_life.tries import Failure, Kind

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
