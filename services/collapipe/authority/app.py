"""The settings and the start of the authority's service."""

from functools import cached_property
from pathlib import Path

import grpc
from pydantic import Field

from collapipe.authority.servicer import EnrollmentServicer
from collapipe.certificates import Identity, Role
from collapipe.certificates.authority_folder import AuthorityFolder
from collapipe.certificates.root_folder import ISSUER_LIFETIME
from collapipe.errors import InvalidInputError
from collapipe.rpc import Security, serve
from collapipe.service_process import Running, ServiceSettings
from collapipe.v1 import enrollment_pb2_grpc


class AuthoritySettings(ServiceSettings):
    """Settings of the authority's service."""

    dir: Path = Field(description="Folder of the authority, made by `collapipe certs init`.")

    @cached_property
    def security(self) -> Security:
        """Issues the authority's own certificate. Callers need none, because they do not have one yet.

        Raises:
            InvalidInputError: TLS settings were given, or there is no authority in the folder.
        """
        if self.insecure or self.tls_ca or self.tls_cert or self.tls_key:
            raise InvalidInputError(
                "the authority always speaks TLS with a certificate that it makes itself: leave out --insecure and "
                "--tls-..."
            )
        folder = self.dir / "own"
        own = Identity(Role.AUTHORITY, "authority")
        AuthorityFolder(self.dir).issue(own, [], folder, ISSUER_LIFETIME)
        return Security(
            folder / "ca.pem", folder / "cert.pem", folder / "key.pem", asks_callers=False
        )


def start(settings: AuthoritySettings, metrics_address: str) -> Running:
    """Starts the service."""
    servicer = EnrollmentServicer(AuthorityFolder(settings.dir))

    def add_services(server: grpc.Server, address: str) -> None:
        enrollment_pb2_grpc.add_EnrollmentServiceServicer_to_server(servicer, server)

    server = serve(settings.listen, settings.security, add_services)
    return Running(server.address, server.drain)
