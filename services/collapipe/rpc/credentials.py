"""Mutual TLS, or plain text where somebody asked for it by name."""

import ssl
from dataclasses import dataclass
from pathlib import Path

import grpc

from collapipe.errors import InvalidInputError


@dataclass(frozen=True)
class Security:
    """How the services of a deployment know each other.

    Args:
        ca: Certificate of the authority that both sides trust, PEM.
        certificate: Of this process, PEM.
        key: Of the certificate, PEM.

    Without files, everything is plain text: use `Security.insecure()` to say so.
    """

    ca: Path | None = None
    certificate: Path | None = None
    key: Path | None = None

    @classmethod
    def insecure(cls) -> "Security":
        """Plain text."""
        return cls()

    @classmethod
    def of(
        cls, insecure: bool, ca: Path | None, certificate: Path | None, key: Path | None
    ) -> "Security":
        """Checks what an operator asked for.

        Raises:
            InvalidInputError: Neither or both were asked for, or a file cannot be used.
        """
        files = {"--tls-ca": ca, "--tls-cert": certificate, "--tls-key": key}
        if insecure:
            if any(files.values()):
                raise InvalidInputError(
                    "--insecure and --tls-... contradict each other: choose one"
                )
            return cls.insecure()
        missing = [flag for flag, path in files.items() if path is None]
        if missing:
            raise InvalidInputError(
                f"{', '.join(missing)} not given: name the three files of mutual TLS, or pass --insecure to "
                "serve plain text on a network that you trust"
            )
        for flag, path in files.items():
            if path is not None and not path.is_file():
                raise InvalidInputError(f"{flag} {path}: there is no such file")
        security = cls(ca, certificate, key)
        security._check_usable()
        return security

    @property
    def is_insecure(self) -> bool:
        """Whether everything is plain text."""
        return self.ca is None

    def server_credentials(self) -> grpc.ServerCredentials | None:
        """What a server asks of its callers; `None` for plain text."""
        if self.ca is None or self.certificate is None or self.key is None:
            return None
        pair = (self.key.read_bytes(), self.certificate.read_bytes())
        return grpc.ssl_server_credentials(
            [pair], root_certificates=self.ca.read_bytes(), require_client_auth=True
        )

    def channel_credentials(self) -> grpc.ChannelCredentials | None:
        """What a caller shows; `None` for plain text."""
        if self.ca is None or self.certificate is None or self.key is None:
            return None
        return grpc.ssl_channel_credentials(
            self.ca.read_bytes(), self.key.read_bytes(), self.certificate.read_bytes()
        )

    def _check_usable(self) -> None:
        """Loads the files once: gRPC would only log what is wrong with them, and fail every handshake."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        try:
            context.load_verify_locations(self.ca)
        except OSError as error:
            raise InvalidInputError(
                f"--tls-ca {self.ca}: no certificate in PEM can be read from it ({error})"
            ) from None
        try:
            # an empty password: an encrypted key fails, and nobody is asked
            context.load_cert_chain(str(self.certificate), self.key, password="")
        except OSError as error:
            raise InvalidInputError(
                f"--tls-cert {self.certificate}, --tls-key {self.key}: no certificate and its unencrypted key "
                f"in PEM ({error})"
            ) from None
