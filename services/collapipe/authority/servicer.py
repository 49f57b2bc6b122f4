"""EnrollmentService: who proves to have a token, or a certificate, gets a certificate."""

import ipaddress
import logging
import time
from collections.abc import Callable
from urllib.parse import unquote

import grpc

from collapipe.authority.wrong_tokens import WrongTokens
from collapipe.certificates import forms
from collapipe.certificates.authority_folder import AuthorityFolder
from collapipe.certificates.tokens import SECRET_BYTES
from collapipe.errors import CollapipeError, InvalidInputError, NotPermittedError
from collapipe.v1 import enrollment_pb2, enrollment_pb2_grpc

logger = logging.getLogger(__name__)

_MAX_CERTIFICATE_BYTES = 4096


class EnrollmentServicer(enrollment_pb2_grpc.EnrollmentServiceServicer):
    """Serves strangers: whatever they send is checked here or in the folder.

    Args:
        folder: The authority.
        clock: A steady one, in seconds.
    """

    def __init__(
        self, folder: AuthorityFolder, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._folder = folder
        self._clock = clock
        self._wrong_tokens = WrongTokens()

    def Enroll(
        self, request: enrollment_pb2.EnrollRequest, context: grpc.ServicerContext
    ) -> enrollment_pb2.EnrollResponse:
        """Gives the first certificate."""
        host = observed_host(context.peer())
        caller = host or "local"
        is_blocked = self._wrong_tokens.blocked(caller, self._clock())
        # behind a router or a container's proxy, an honest box shares its address with one that tries again and again
        if is_blocked and not self._folder.has_token(request.secret):
            raise NotPermittedError(
                f"{caller} has tried too many wrong join tokens: wait a minute, then use a new one"
            )
        try:
            if len(request.secret) != SECRET_BYTES:
                raise InvalidInputError(
                    f"the secret of a join token has {SECRET_BYTES} bytes, this one {len(request.secret)}"
                )
            enrolled = self._folder.enroll(request.secret, request.certificate_request, host)
        except CollapipeError as error:
            if not is_blocked:
                self._wrong_tokens.add(caller, self._clock())
                logger.warning("%s was not enrolled: %s", caller, error)
            raise
        return enrollment_pb2.EnrollResponse(
            certificate=forms.der(enrolled.certificate), observed_host=host or ""
        )

    def Renew(
        self, request: enrollment_pb2.RenewRequest, context: grpc.ServicerContext
    ) -> enrollment_pb2.RenewResponse:
        """Gives a certificate that lasts longer."""
        if len(request.certificate) > _MAX_CERTIFICATE_BYTES:
            raise InvalidInputError(
                f"a certificate of {len(request.certificate)} bytes: at most {_MAX_CERTIFICATE_BYTES} are read"
            )
        renewed = self._folder.renew(request.certificate, request.certificate_request)
        return enrollment_pb2.RenewResponse(certificate=forms.der(renewed.certificate))


def observed_host(peer: str) -> str | None:
    """The address of a caller, if others can use it too.

    Args:
        peer: As gRPC tells it: "ipv4:192.168.1.7:4711", "ipv6:%5Bfe80::1%25eth0%5D:4711".
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
        if address.scope_id is not None:  # of an interface of this machine only
            return None
    return str(address)
