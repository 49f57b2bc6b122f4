"""Turns the errors of CollaPipe into gRPC statuses on the server, and back into errors at the caller."""

import errno

import grpc

from collapipe import errors
from collapipe.printable import printable

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

BLAMED_HOST_KEY = "collapipe-blamed-host-bin"
"""Key of the trailing metadata with the host id of a `PeerLostError` or a `DivergedError`.

If a call without it fails because a host is lost, the server itself is lost.
"""

_BLAMED_CLUSTER_KEY = "collapipe-blamed-cluster"
"""Key of the trailing metadata with the `cluster_index` of an error."""

_OTHER_VERSION_KEY = "collapipe-other-version"
"""Key of the trailing metadata of an `OtherVersionError`. A job can go on without such a host, as without a lost one."""

_CANNOT_BE_REACHED = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED)
_NO_ADDRESS = "the target uri is not valid"
"""Part of gRPC's text about an address such as ""."""

_MAX_DETAILS_BYTES = 2000
"""Longest text in a status. gRPC drops a call if the escaped status has more than 8 KiB."""

_NO_MEMORY = (
    *("can't allocate memory", "Cannot allocate memory"),
    *("out of memory", "can't start new thread"),
)
"""Parts of the texts of torch, of the kernel, of CUDA and of Python when memory is full."""


def to_code(error: errors.CollapipeError) -> grpc.StatusCode:
    """Returns the status code of an error."""
    return next(code for error_type, code in _CODES if isinstance(error, error_type))


def trailing_metadata(error: errors.CollapipeError) -> tuple[tuple[str, str | bytes], ...]:
    """Returns the metadata that the server sends with the status of an error."""
    if isinstance(error, (errors.PeerLostError, errors.DivergedError)):
        return ((BLAMED_HOST_KEY, error.host_id.encode()),)
    if isinstance(error, errors.OtherVersionError):
        return ((_OTHER_VERSION_KEY, "1"),)
    if error.cluster_index is not None:
        return ((_BLAMED_CLUSTER_KEY, str(error.cluster_index)),)
    return ()


def details(explanation: str) -> str:
    """Shortens an explanation so that it fits into a status."""
    # Half of a surrogate pair, of a name in a file for example, has no bytes in UTF-8.
    encoded = explanation.encode(errors="backslashreplace")
    if len(encoded) <= _MAX_DETAILS_BYTES:
        return encoded.decode()
    return encoded[:_MAX_DETAILS_BYTES].decode(errors="ignore") + " [shortened]"


def explain_unexpected(error: Exception) -> str:
    """Returns the text of a status about an exception that is not a `CollapipeError`. The caller adds the name of the host."""
    text = details(f"{type(error).__name__}: {error}")
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return (
            f"its disk is full ({text}): make room there, for example with `collapipe jobs delete`"
        )
    if isinstance(error, MemoryError) or any(part in text for part in _NO_MEMORY):
        return (
            f"it gets no more memory ({_first_line(text)}): end other programs there, raise the limit of its memory, or state "
            "a lower --memory-bytes, so that plans give it fewer blocks"
        )
    return f"{text}; see the log of this service"


def to_error(error: grpc.RpcError, peer: str) -> errors.CollapipeError:
    """Returns the error that made a call to `peer`, a host id or name, fail."""
    code, explanation = error.code(), printable(error.details() or "", keep="\n")
    metadata = {item.key: item.value for item in error.trailing_metadata() or ()}
    blamed = metadata.get(BLAMED_HOST_KEY)
    if isinstance(blamed, bytes) and code is to_code(errors.DivergedError("")):
        return errors.DivergedError(explanation, blamed.decode(errors="replace"))
    if isinstance(blamed, bytes):
        return errors.PeerLostError(blamed.decode(errors="replace"), explanation)
    if _OTHER_VERSION_KEY in metadata:
        return errors.PeerLostError(peer, f"{peer} refuses this process: {explanation}")
    # gRPC says UNKNOWN if an address cannot be one of a host.
    if code in _CANNOT_BE_REACHED or _NO_ADDRESS in explanation:
        return errors.PeerLostError(
            peer,
            f"{peer} cannot be reached ({_first_line(explanation) or code.name}): {_remedy(explanation)}",
        )
    for error_type, error_code in _CODES:
        if code is error_code:
            found = error_type(explanation)
            cluster = str(metadata.get(_BLAMED_CLUSTER_KEY, ""))
            found.cluster_index = int(cluster) if cluster.isdecimal() else None
            return found
    failed = "failed" if code is grpc.StatusCode.INTERNAL else f"failed with {code.name}"
    return errors.AttemptFailedError(f"{peer} {failed}: {explanation or 'see its log'}")


_ANOTHER_NAME = (
    "its certificate has another name or role: check that this is the address of the right service, and issue its "
    "certificate with --address and the host of this address"
)
_ANOTHER_AUTHORITY = (
    "its certificate is of another authority: both sides need certificates of one authority"
)
_CLOSED = (
    "it has probably ended, and its log says why. If nothing restarts it, start it. If it still runs, `collapipe doctor` on both "
    "machines examines their certificates"
)
_REMEDIES = [
    ("certificate has expired", "its certificate has expired: renew it, and start it again"),
    ("certificate is not yet valid", "check the clocks of both machines"),
    ("Hostname Verification", _ANOTHER_NAME),
    ("is not in peer certificate", _ANOTHER_NAME),  # Text of older versions of gRPC.
    (
        "WRONG_VERSION_NUMBER",
        "it speaks plain text (--insecure), and this side speaks TLS: choose one for both",
    ),
    ("handshake failed", _ANOTHER_AUTHORITY),
    (
        "Deadline Exceeded",
        "it did not answer in time: its log says whether it is busy or hangs; a firewall may also drop the call",
    ),
    *((closed, _CLOSED) for closed in ("Socket closed", "Connection reset by peer", "Broken pipe")),
]
"""Parts of gRPC's text about a failed connection, each with its remedy. The first part that occurs counts."""


def _remedy(explanation: str) -> str:
    for text, remedy in _REMEDIES:
        if text in explanation:
            return remedy
    return "check that it runs and that its address is right"


def _first_line(text: str) -> str:
    return text.strip().splitlines()[0] if text.strip() else ""
