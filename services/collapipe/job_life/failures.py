"""Says which kind of failure an error is."""

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

_KINDS = (
    (PeerLostError, Kind.HOST_LOST),
    (DivergedError, Kind.NOT_FINITE),
    (InfeasibleError, Kind.NO_PLAN),
    (InvalidInputError, Kind.INVALID),
    (CancelledError, Kind.CANCELLED),
    ((AttemptFailedError, CorruptDataError, NotFoundError, WrongStateError), Kind.PASSING),
    (OSError, Kind.PASSING),
    (CollapipeError, Kind.LASTING),
)
"""The first line that fits decides."""


def failure_of(error: BaseException) -> Failure:
    """Returns the failure that ended an attempt, or the work of a cluster, with an error."""
    if isinstance(error, PeerFaultyError):
        kind = Kind.HOST_REFUSES if error.refuses else Kind.HOST_FAULTY
    else:
        kind = next((kind for types, kind in _KINDS if isinstance(error, types)), Kind.BUG)
    return Failure(kind, getattr(error, "host_id", ""))
