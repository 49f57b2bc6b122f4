"""Decides which of several failures explains why the stages of a cluster failed.

Neighbours notice a dead host before its own session with the control unit breaks. Values that are not finite explain every other
failure.
"""

from enum import IntEnum, auto

from collapipe.job_life.tries import Failure, Kind


class Explains(IntEnum):
    """How well a failure explains others. A larger value explains more."""

    LITTLE = auto()
    """It names no host, or only the control unit has noticed it."""
    NEIGHBOUR = auto()
    """One host blames another one."""
    OWN_SESSION = auto()
    """The session of the host itself broke."""
    NOT_FINITE = auto()


def explains(failure: Failure, noticed_by: str) -> Explains:
    """Returns how well a failure of the stages of one cluster explains others.

    Args:
        noticed_by: The host that reported the failure, or whose session broke; empty for the control unit itself.
    """
    if failure.kind is Kind.NOT_FINITE:
        return Explains.NOT_FINITE
    if not (noticed_by and failure.host_id):
        return Explains.LITTLE
    return Explains.OWN_SESSION if noticed_by == failure.host_id else Explains.NEIGHBOUR


def explains_itself(failure: Failure) -> bool:
    """Returns whether no failure that is noticed later can explain this one better."""
    is_loss_or_norm = failure.kind is Kind.NOT_FINITE and not failure.host_id
    return failure.kind is Kind.CANCELLED or is_loss_or_norm
