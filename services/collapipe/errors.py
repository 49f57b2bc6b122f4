"""The errors of CollaPipe.

A message says what was wrong, the value, the limit and the remedy. `collapipe.rpc.status` has the gRPC statuses.
"""


class CollapipeError(Exception):
    """Base class of every expected failure."""

    cluster_index: int | None = None
    """The cluster of the job whose result cannot be committed, if the edge server says so."""
    prepared_by: str = ""
    """The host that has prepared this result."""
    told_by: str = ""
    """The host that answered with the error."""

    def __str__(self) -> str:
        text = super().__str__()
        if self.prepared_by:
            text = f"what {self.prepared_by} has prepared cannot be committed: {text}"
        if self.told_by and self.told_by not in text:
            text += f" (told by {self.told_by})"
        return text


class InvalidInputError(CollapipeError):
    """A file, a job or a request is wrong."""


class WrongStateError(CollapipeError):
    """A correct request came at the wrong time: another job, round, attempt or plan is current."""


class InfeasibleError(CollapipeError):
    """No placement satisfies the limits, or the caller has as much as it may have."""


class NotPermittedError(CollapipeError):
    """The caller may not do this."""


class OtherVersionError(NotPermittedError):
    """The caller speaks no version of the protocol that this process understands. At the caller, the error is a `PeerLostError`."""


class NotFoundError(CollapipeError):
    """The request names something that is not here."""


class PeerLostError(CollapipeError):
    """Another process ended, went silent or cannot be reached.

    Args:
        host_id: The registered id of the peer; empty if unknown.
        message: What happened to the peer, and the remedy.
    """

    def __init__(self, host_id: str, message: str) -> None:
        super().__init__(message)
        self.host_id = host_id


class PeerFaultyError(PeerLostError):
    """Another process answers, but with what cannot be true, or without progress.

    Args:
        refuses: Whether it says that the request is wrong, so that it would refuse every repetition, too.
    """

    def __init__(self, host_id: str, message: str, *, refuses: bool = False) -> None:
        super().__init__(host_id, message)
        self.refuses = refuses


class AttemptFailedError(CollapipeError):
    """Another host gave up the attempt."""


class CorruptDataError(CollapipeError):
    """A checksum or a digest does not match."""


class DivergedError(CollapipeError):
    """Training produced a value that is not finite.

    Args:
        host_id: The host that sent the value to another one; empty if the value was a loss or a norm.
    """

    def __init__(self, message: str, host_id: str = "") -> None:
        super().__init__(message)
        self.host_id = host_id


class CancelledError(CollapipeError):
    """The caller cancelled the work, or went away."""
