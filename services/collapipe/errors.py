"""What can go wrong, as the whole system names it.

The core raises these; `collapipe.rpc.status` is the one place that knows which gRPC status each becomes.
A message says what was wrong, the value, the limit and the remedy.
"""


class CollapipeError(Exception):
    """Base of every expected failure."""


class InvalidInputError(CollapipeError):
    """A file, a job or a request that cannot be used as it is."""


class WrongStateError(CollapipeError):
    """A well-formed request at the wrong time: another job, round, attempt or plan is in force."""


class InfeasibleError(CollapipeError):
    """No placement satisfies the limits."""


class NotPermittedError(CollapipeError):
    """The caller is known, or unknown, and may not do this."""


class NotFoundError(CollapipeError):
    """Something named by the request is not known here."""


class PeerLostError(CollapipeError):
    """Another process ended, went silent or cannot be reached.

    Args:
        host_id: The peer, as registered; empty when unknown.
        message: What happened to it, and what to do.
    """

    def __init__(self, host_id: str, message: str) -> None:
        super().__init__(message)
        self.host_id = host_id


class AttemptFailedError(CollapipeError):
    """Another host gave up the attempt, and says why."""


class CorruptDataError(CollapipeError):
    """A checksum or a digest does not match."""


class DivergedError(CollapipeError):
    """Training produced a value that is not finite."""


class CancelledError(CollapipeError):
    """Whoever asked for the work no longer wants it."""
