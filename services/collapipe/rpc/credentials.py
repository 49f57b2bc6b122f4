"""Mutual TLS, or plain text where somebody asked for it by name."""

import datetime
import os
import ssl
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc

from collapipe.certificates.identity import Identity, Role
from collapipe.errors import CollapipeError, InvalidInputError, WrongStateError

_REMEDY = "make one with `collapipe certs issue`, or `collapipe join` with a token"


@dataclass(frozen=True)
class Presented:
    """What this process shows to its peers."""

    identity: Identity
    expires: datetime.datetime


@dataclass(frozen=True)
class Security:
    """How the services of a deployment know each other.

    Args:
        ca: Certificate of the authority that both sides trust, PEM.
        certificate: Of this process, PEM.
        key: Of the certificate, PEM.
        asks_callers: Whether callers of a server need a certificate. Without, its methods look at who they are.

    Without files, everything is plain text: use `Security.insecure()` to say so.
    """

    ca: Path | None = None
    certificate: Path | None = None
    key: Path | None = None
    asks_callers: bool = True

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
            WrongStateError: The certificate is not valid now.
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
                f"{', '.join(missing)} not given: name the three files of mutual TLS, which `collapipe certs` and "
                "`collapipe join` make, or pass --insecure to speak plain text on a network that you trust"
            )
        for flag, path in files.items():
            if path is not None and not os.path.isfile(path):
                raise InvalidInputError(
                    f"{flag} {path}: there is no such file, or this user may not look for it; {_REMEDY}"
                )
        security = cls(ca, certificate, key)
        security.presented()
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
        if not self.asks_callers:
            return grpc.ssl_server_credentials([pair])
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

    def presented(self) -> Presented | None:
        """What this process shows to its peers; `None` for plain text.

        Looks at it as a peer will: gRPC would only log what is wrong with the files, and fail every handshake.

        Raises:
            InvalidInputError: No peer would ever accept it.
            WrongStateError: It is not valid now, which a renewal or a clock that is set changes.
        """
        if self.is_insecure:
            return None
        shown = self._as_a_peer_sees_it()
        expires = datetime.datetime.fromtimestamp(
            ssl.cert_time_to_seconds(shown["notAfter"]), datetime.timezone.utc
        )
        names = shown.get("subjectAltName", ())
        identity = Identity.from_uris([name for kind, name in names if kind == "URI"])
        if identity is None:
            raise InvalidInputError(
                f"--tls-cert {self.certificate}: has no role, which is a URI like "
                f"{Identity(Role.DEVICE_AGENT, 'device-0-0').uri} among its alternative names; {_REMEDY}"
            )
        return Presented(identity, expires)

    def _as_a_peer_sees_it(self) -> dict[str, Any]:
        """Shakes hands with itself in memory: the standard library tells what is in a certificate only to its peer."""
        peer = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        this = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        this.check_hostname, this.verify_mode = False, ssl.CERT_NONE
        peer.verify_mode = ssl.CERT_REQUIRED
        try:
            peer.load_verify_locations(self.ca)
        except OSError as error:
            raise InvalidInputError(
                f"--tls-ca {self.ca}: no certificate in PEM can be read from it ({error})"
            ) from None
        try:
            for context in (peer, this):
                # an empty password: an encrypted key fails, and nobody is asked
                context.load_cert_chain(str(self.certificate), self.key, password="")
        except OSError as error:
            raise InvalidInputError(
                f"--tls-cert {self.certificate}, --tls-key {self.key}: no certificate and its unencrypted key "
                f"in PEM ({error})"
            ) from None
        to_peer, to_this = ssl.MemoryBIO(), ssl.MemoryBIO()
        ends = [
            this.wrap_bio(to_this, to_peer),
            peer.wrap_bio(to_peer, to_this, server_side=True),
        ]
        waiting = list(ends)
        while waiting:
            for end in list(waiting):
                try:
                    end.do_handshake()
                    waiting.remove(end)
                except ssl.SSLWantReadError:
                    continue
                except ssl.SSLCertVerificationError as error:
                    raise self._refusal(error.verify_message) from None
        return ends[1].getpeercert() or {}

    def _refusal(self, reason: str) -> CollapipeError:
        kind: type[CollapipeError] = WrongStateError
        now = f"{datetime.datetime.now(datetime.timezone.utc):%Y-%m-%d %H:%M} UTC"
        if "expired" in reason:
            remedy = f"renew it with `collapipe certs issue`, or join again; the clock of this machine says {now}"
        elif "not yet valid" in reason:
            remedy = f"set the clock of this machine, which says {now}"
        else:
            kind = InvalidInputError
            remedy = f"it must be signed by the authority of --tls-ca {self.ca}; {_REMEDY}"
        return kind(f"--tls-cert {self.certificate}: no peer would accept it ({reason}): {remedy}")
