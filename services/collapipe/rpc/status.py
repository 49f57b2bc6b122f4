"""One catalogue: what the core raises, what a caller sees, and back again."""

import grpc

from collapipe import errors

_CODES: list[tuple[type[errors.CollapipeError], grpc.StatusCode]] = [
    (errors.InvalidInputError, grpc.StatusCode.INVALID_ARGUMENT),
    (errors.WrongStateError, grpc.StatusCode.FAILED_PRECONDITION),
    (errors.InfeasibleError, grpc.StatusCode.RESOURCE_EXHAUSTED),
    (errors.NotPermittedError, grpc.StatusCode.PERMISSION_DENIED),
    (errors.NotFoundError, grpc.StatusCode.NOT_FOUND),
    (errors.PeerLostError, grpc.StatusCode.UNAVAILABLE),
    (errors.CorruptDataError, grpc.StatusCode.DATA_LOSS),
    (errors.DivergedError, grpc.StatusCode.OUT_OF_RANGE),
    (errors.CancelledError, grpc.StatusCode.CANCELLED),
    (errors.AttemptFailedError, grpc.StatusCode.ABORTED),
]

LOST_PEER_KEY = "collapipe-lost-peer-bin"
"""Trailing metadata that names a lost third process, to tell it from the loss of the server itself."""

_MAX_DETAILS_BYTES = 2000
"""Longest explanation that a status carries; gRPC drops a call whose status, escaped, takes more than 8 KiB."""


def to_code(error: errors.CollapipeError) -> grpc.StatusCode:
    """The status of an error of the core."""
    return next(code for kind, code in _CODES if isinstance(error, kind))


def trailing_metadata(error: errors.CollapipeError) -> tuple[tuple[str, bytes], ...]:
    """What travels beside the status."""
    if isinstance(error, errors.PeerLostError):
        return ((LOST_PEER_KEY, error.host_id.encode()),)
    return ()


def details(explanation: str) -> str:
    """An explanation, shortened to what a status can carry."""
    encoded = explanation.encode()
    if len(encoded) <= _MAX_DETAILS_BYTES:
        return explanation
    return encoded[:_MAX_DETAILS_BYTES].decode(errors="ignore") + " [shortened]"


def to_error(error: grpc.RpcError, peer: str) -> errors.CollapipeError:
    """The error of the core behind a failed call.

    Args:
        error: What the call raised.
        peer: Who was called.
    """
    code, explanation = error.code(), error.details() or ""
    metadata = {item.key: item.value for item in error.trailing_metadata() or ()}
    lost = metadata.get(LOST_PEER_KEY)
    if isinstance(lost, bytes):
        return errors.PeerLostError(lost.decode(), explanation)
    if code in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED):
        return errors.PeerLostError(
            peer,
            f"{peer} cannot be reached ({_first_line(explanation) or code.name}): {_remedy(explanation)}",
        )
    for kind, of_kind in _CODES:
        if code is of_kind:
            return kind(explanation)
    return errors.AttemptFailedError(
        f"{peer} failed with {code.name}: {explanation or 'see its log'}"
    )


_ANOTHER_NAME = (
    "its certificate has another name or role: see whether this is the address of the right service, and issue its "
    "certificate with --address and the host that is called here"
)
_ANOTHER_AUTHORITY = (
    "its certificate is of another authority: both sides need certificates of one and the same"
)
_REMEDIES = [
    ("certificate has expired", "its certificate has expired: renew it, and start it again"),
    ("certificate is not yet valid", "see whether the clocks of both machines are right"),
    ("Hostname Verification", _ANOTHER_NAME),
    ("is not in peer certificate", _ANOTHER_NAME),  # in older versions of gRPC
    (
        "WRONG_VERSION_NUMBER",
        "it speaks plain text (--insecure), and this side TLS: choose one for both",
    ),
    ("handshake failed", _ANOTHER_AUTHORITY),
    (
        "Deadline Exceeded",
        "it did not answer in time: see in its log whether it is busy or hangs, and whether a firewall swallows the call",
    ),
    (
        "Socket closed",
        "it hung up. If it runs, it did not accept how it was called: this side's certificate may have expired or be "
        "of another authority (`collapipe certs list` tells), or one side speaks TLS and the other plain text; with "
        "GRPC_VERBOSITY=INFO in its environment, its log tells which",
    ),
]
"""What gRPC says of a connection that did not come about, and what an operator does then; the first that fits."""


def _remedy(explanation: str) -> str:
    for sign, remedy in _REMEDIES:
        if sign in explanation:
            return remedy
    return "see whether it runs and whether its address is right"


def _first_line(text: str) -> str:
    return text.strip().splitlines()[0] if text.strip() else ""
