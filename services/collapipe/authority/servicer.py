"""Gives certificates to callers that have a join token or a valid certificate."""

import ipaddress
import logging
import threading
import time
from collections import OrderedDict
from urllib.parse import unquote

import grpc

from collapipe.certificates.authority_folder import AuthorityFolder
from collapipe.certificates.tokens import SECRET_BYTES
from collapipe.errors import CollapipeError, InvalidInputError, NotPermittedError
from collapipe.rpc import is_address_here
from collapipe.v1 import enrollment_pb2, enrollment_pb2_grpc

logger = logging.getLogger(__name__)

_MAX_CERTIFICATE_BYTES = 4096
_MAX_ATTEMPTS = 10
"""The limit of a caller within `_WINDOW_SECONDS`. Nobody mistypes a join token so often."""
_WINDOW_SECONDS = 60.0
_MAX_CALLERS = 1024
"""Beyond this number, the oldest callers are forgotten."""


class EnrollmentServicer(enrollment_pb2_grpc.EnrollmentServiceServicer):
    """Serves unknown callers. So it, or the folder, checks everything that they send."""

    def __init__(self, folder: AuthorityFolder) -> None:
        self._folder = folder
        self._failed_attempts = FailedAttempts()

    def Enroll(
        self, request: enrollment_pb2.EnrollRequest, context: grpc.ServicerContext
    ) -> enrollment_pb2.EnrollResponse:
        """Gives a box its first certificate."""
        host = observed_host(context.peer())
        caller = host or "local"
        is_blocked = self._failed_attempts.is_blocked(caller, time.monotonic())
        # Behind a router or a proxy, a box with a good token may share its address with a blocked caller.
        if is_blocked and not self._folder.has_token(request.secret):
            raise NotPermittedError(
                f"{caller} has tried too many wrong join tokens: wait a minute, then use a new one"
            )
        try:
            if len(request.secret) != SECRET_BYTES:
                raise InvalidInputError(
                    f"the secret of a join token has {SECRET_BYTES} bytes, but this one has {len(request.secret)}: "
                    "give the whole token"
                )
            enrolled = self._folder.enroll(
                request.secret,
                request.certificate_request,
                host,
                is_own=host is not None and is_address_here(host) is True,
            )
        except CollapipeError as error:
            if not is_blocked:
                self._failed_attempts.add(caller, time.monotonic())
                logger.warning("%s was not enrolled: %s", caller, error)
            raise
        return enrollment_pb2.EnrollResponse(
            certificate=enrolled.chain.pem, observed_host=host or ""
        )

    def Renew(
        self, request: enrollment_pb2.RenewRequest, context: grpc.ServicerContext
    ) -> enrollment_pb2.RenewResponse:
        """Replaces a certificate that is still valid."""
        if len(request.certificate) > _MAX_CERTIFICATE_BYTES:
            raise InvalidInputError(
                f"the certificate has {len(request.certificate)} bytes: at most {_MAX_CERTIFICATE_BYTES} are allowed"
            )
        renewed = self._folder.renew(request.certificate, request.certificate_request)
        return enrollment_pb2.RenewResponse(certificate=renewed.chain.pem)


class FailedAttempts:
    """Counts failed attempts by caller.

    Nobody can guess a secret of 256 bits, but many attempts would slow the authority and fill its log.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: OrderedDict[str, tuple[float, int]] = OrderedDict()

    def is_blocked(self, caller: str, now: float) -> bool:
        """Returns whether a caller must wait.

        Args:
            caller: An IP address.
            now: Time of a monotonic clock, in seconds.
        """
        with self._lock:
            return self._current(caller, now)[1] >= _MAX_ATTEMPTS

    def add(self, caller: str, now: float) -> None:
        """Counts one failed attempt."""
        with self._lock:
            since, count = self._current(caller, now)
            self._counts[caller] = (since, count + 1)
            while len(self._counts) > _MAX_CALLERS:
                self._counts.popitem(last=False)

    def _current(self, caller: str, now: float) -> tuple[float, int]:
        since, count = self._counts.get(caller, (now, 0))
        return (since, count) if now - since < _WINDOW_SECONDS else (now, 0)


def observed_host(peer: str) -> str | None:
    """Returns the IP address of a caller; `None` if other machines cannot use it.

    Args:
        peer: The caller in gRPC's form, "ipv4:192.168.1.7:4711" or "ipv6:%5Bfe80::1%25eth0%5D:4711".
    """
    kind, _, rest = unquote(peer).partition(":")
    if kind not in ("ipv4", "ipv6"):
        return None
    text = rest.rpartition(":")[0].removeprefix("[").removesuffix("]")
    try:
        address = ipaddress.ip_address(text)
    except ValueError:
        return None
    if isinstance(address, ipaddress.IPv6Address):
        if address.ipv4_mapped is not None:
            return str(address.ipv4_mapped)
        if (
            address.scope_id is not None
        ):  # The address is valid on one interface of this machine only.
            return None
    return str(address)
