"""Mutual TLS between services, or plain text if the operator asks for it."""

import datetime
import logging
import os
import ssl
import threading
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import grpc

from collapipe.certificates.identity import Identity, Role
from collapipe.certificates.pki import read_chain
from collapipe.certificates.private_files import read_required
from collapipe.certificates.revoked_keys import RevokedKeyList
from collapipe.certificates.signatures import GRANT, Signer, check_signature
from collapipe.documents import no_permission
from collapipe.errors import CollapipeError, InvalidInputError, WrongStateError
from collapipe.v1.enrollment_pb2 import SignedRevokedKeys

logger = logging.getLogger(__name__)

_REMEDY = "make one with `collapipe certs issue`, or `collapipe join` with a token"


@dataclass(frozen=True)
class Presented:
    """The identity that this process shows to its peers, and the end of its certificate."""

    identity: Identity
    expires: datetime.datetime

    def __str__(self) -> str:
        return f"{self.identity} until {self.expires:%Y-%m-%d %H:%M} UTC"


_Stamps = tuple[tuple[int, int, int] | None, ...]
"""Inode, bytes and time of the last change of each file; `None` for a missing one."""


@dataclass(frozen=True)
class _Contents:
    """The contents of the files, which a peer would accept."""

    stamps: _Stamps
    presented: Presented
    server_context: ssl.SSLContext
    client_context: ssl.SSLContext
    ca: bytes
    certificate: bytes
    key: bytes = field(repr=False)

    @cached_property
    def signer(self) -> Signer:
        return Signer(self.key, self.certificate)

    @cached_property
    def of_channels(self) -> grpc.ChannelCredentials:
        return grpc.ssl_channel_credentials(self.ca, self.key, self.certificate)

    def of_server(self, asks_callers: bool) -> grpc.ServerCertificateConfiguration:
        return grpc.ssl_server_certificate_configuration(
            [(self.key, self.certificate)], self.ca if asks_callers else None
        )


@dataclass
class _Kept:
    """What a process keeps of its files until they are renewed."""

    lock: threading.Lock = field(default_factory=threading.Lock)
    contents: _Contents | None = None
    refused: _Stamps = ()
    """The files of the last warning."""
    revoked: RevokedKeyList = field(default_factory=RevokedKeyList)
    least_grant: int | None = None


@dataclass(frozen=True)
class Security:
    """How this process and its peers authenticate each other. Without files, they use plain text.

    New connections use a renewed certificate, and present ones stay. Files that no peer would accept change nothing. The
    authority and the identity remain those of the first use.

    Args:
        ca: Certificate of the root that both sides trust. All files are PEM.
        certificate: That of this process, followed by that of the issuing authority.
        asks_callers: Whether a server asks callers for a certificate. If not, its methods check the callers.
    """

    ca: Path | None = None
    certificate: Path | None = None
    key: Path | None = None
    asks_callers: bool = True
    _kept: _Kept = field(default_factory=_Kept, init=False, repr=False, compare=False)

    @classmethod
    def insecure(cls) -> "Security":
        return cls()

    @classmethod
    def of(
        cls, insecure: bool, ca: Path | None, certificate: Path | None, key: Path | None
    ) -> "Security":
        """Returns the security that an operator asked for.

        Raises:
            InvalidInputError: The operator asked for both plain text and TLS, or for neither. Or a file is wrong.
            WrongStateError: The certificate has expired, or is not valid yet.
        """
        files = {"--tls-ca": ca, "--tls-cert": certificate, "--tls-key": key}
        if insecure:
            if any(files.values()):
                raise InvalidInputError(
                    "--insecure and --tls-... contradict each other: leave one out"
                )
            return cls.insecure()
        missing = [flag for flag, path in files.items() if path is None]
        if missing:
            raise InvalidInputError(
                f"{', '.join(missing)} not given: name the three files that `collapipe certs` or `collapipe join` made, "
                "or use --insecure for plain text in a network that you trust"
            )
        for flag, path in files.items():
            if path is not None and not os.path.isfile(path):
                raise InvalidInputError(
                    f"{flag} {path}: there is no such file, or this user may not read its folder; {_REMEDY}"
                )
        security = cls(ca, certificate, key)
        security.presented()
        return security

    @property
    def is_insecure(self) -> bool:
        """Whether this process uses plain text."""
        return self.ca is None

    def server_credentials(self) -> grpc.ServerCredentials | None:
        """Returns `None` for plain text. gRPC asks for a renewed certificate at each handshake."""
        contents = self._contents()
        if contents is None:
            return None
        last = contents

        # gRPC's types omit that `None` means no change.
        def renewed() -> Any:
            nonlocal last
            before, last = last, self._contents() or last
            return None if last is before else last.of_server(self.asks_callers)

        return grpc.dynamic_ssl_server_credentials(
            contents.of_server(self.asks_callers), renewed, self.asks_callers
        )

    def channel_credentials(self) -> grpc.ChannelCredentials | None:
        """Returns `None` for plain text. The object stays the same until a renewal."""
        contents = self._contents()
        return None if contents is None else contents.of_channels

    def server_context(self) -> ssl.SSLContext | None:
        """Returns what a server without gRPC needs for its next connection; `None` for plain text. It demands a certificate."""
        contents = self._contents()
        return None if contents is None else contents.server_context

    def client_context(self) -> ssl.SSLContext | None:
        """Returns what a client without gRPC needs for its next connection; `None` for plain text."""
        contents = self._contents()
        return None if contents is None else contents.client_context

    def presented(self) -> Presented | None:
        """Returns what this process shows to its peers; `None` for plain text.

        Raises:
            InvalidInputError: No peer would ever accept the certificate.
            WrongStateError: The certificate has expired, or is not valid yet by the clock of this machine.
        """
        contents = self._contents()
        return None if contents is None else contents.presented

    def sign(self, data: bytes, kind: str = GRANT) -> tuple[bytes, bytes]:
        """Returns a signature of data of a kind, and the certificates in PEM with which peers can check it. Not for plain text."""
        contents = self._contents()
        assert contents is not None
        return contents.signer.sign(data, kind), contents.signer.certificate

    @property
    def revoked(self) -> RevokedKeyList:
        """The keys that this process does not accept any more."""
        return self._kept.revoked

    def learn_revoked(self, signed: SignedRevokedKeys) -> None:
        """Takes a list of revoked keys if it is newer than the present one. Plain text has no keys.

        Raises:
            NotPermittedError: The authority has not signed the list.
        """
        contents = self._contents()
        if contents is not None:
            self.revoked.learn(signed, contents.ca)

    @property
    def least_grant(self) -> int | None:
        """The least number of a grant that this process accepts; `None` if the scheduler has not told it, so that it accepts none."""
        return self._kept.least_grant

    def learn_least_grant(self, number: int, *, anew: bool = False) -> None:
        """Takes the least number of a grant that counts. It never falls.

        Args:
            anew: Whether the scheduler may be another one than before, whose numbers have nothing to do with earlier ones.
        """
        self._kept.least_grant = number if anew else max(number, self._kept.least_grant or 0)

    def check_signature(
        self, data: bytes, signature: bytes, certificate: bytes, role: Role, kind: str = GRANT
    ) -> Identity:
        """Refuses data unless a certificate of this role has signed it, with a key that is not revoked; raises `NotPermittedError`. Returns
        who has signed it. Not for plain text."""
        contents = self._contents()
        assert contents is not None
        signer = check_signature(data, signature, certificate, contents.ca, role, kind)
        # Only now does the chain end at the root. The bytes that arrived may have something behind it, which would be kept.
        self.revoked.check(signer.chain.pem)
        return signer.identity

    def _contents(self) -> _Contents | None:
        """Returns the contents of the files, and reads them again if they have changed; `None` for plain text.

        Raises:
            CollapipeError: The files of the first use are unusable. Later, this only logs a warning.
        """
        if self.ca is None or self.certificate is None or self.key is None:
            return None
        files = self.ca, self.certificate, self.key
        with self._kept.lock:
            stamps, kept = _stamps(files), self._kept.contents
            if kept is None:
                self._kept.contents = self._read(files, stamps)
            elif stamps != kept.stamps:
                try:
                    new = self._read(files, stamps)
                    self._check_renewal(kept, new)
                except (CollapipeError, OSError) as error:
                    if stamps != self._kept.refused:
                        self._kept.refused = stamps
                        logger.warning(
                            "the renewed certificate is not used, and %s stays in use: %s",
                            kept.presented,
                            error,
                        )
                else:
                    # If somebody still writes, the files may not belong together. The next call reads them again.
                    if stamps == _stamps(files):
                        self._kept.contents = new
                        logger.info("the certificate was renewed: known as %s", new.presented)
            return self._kept.contents

    def _read(self, files: tuple[Path, Path, Path], stamps: _Stamps) -> _Contents:
        """Reads the files, and checks them as a peer would. gRPC would only log a mistake, and every handshake would fail."""
        server_context, client_context, shown = self._shake_hands()
        read_required(files[1], read_chain, _REMEDY)
        expires = datetime.datetime.fromtimestamp(
            ssl.cert_time_to_seconds(shown["notAfter"]), datetime.timezone.utc
        )
        names = shown.get("subjectAltName", ())
        identity = Identity.from_uris([name for kind, name in names if kind == "URI"])
        if identity is None:
            raise InvalidInputError(
                f"--tls-cert {self.certificate}: the certificate has no role, which is a URI like "
                f"{Identity(Role.DEVICE_AGENT, 'device-0-0').uri} among its alternative names; {_REMEDY}"
            )
        return _Contents(
            stamps,
            Presented(identity, expires),
            server_context,
            client_context,
            *(path.read_bytes() for path in files),
        )

    def _check_renewal(self, kept: _Contents, new: _Contents) -> None:
        if new.ca != kept.ca:
            raise WrongStateError(
                f"--tls-ca {self.ca} is of another authority now: restart this process to use it"
            )
        if new.presented.identity != kept.presented.identity:
            raise WrongStateError(
                f"--tls-cert {self.certificate} is of {new.presented.identity} now: restart this process to use it"
            )

    def _shake_hands(self) -> tuple[ssl.SSLContext, ssl.SSLContext, dict[str, Any]]:
        """Returns contexts of a server and of a client with the files, and the content of the certificate, after a handshake in memory.

        The standard library gives the content of a certificate only to the peer of a connection.
        """
        server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        client = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        # This server would refuse itself if the certificate is one of a person.
        client.check_hostname, client.verify_mode = False, ssl.CERT_NONE
        server.verify_mode = ssl.CERT_REQUIRED
        for context in (server, client):
            context.minimum_version = ssl.TLSVersion.TLSv1_2
            try:
                context.load_verify_locations(self.ca)
            except PermissionError as error:
                raise InvalidInputError(no_permission(self.ca, error)) from None
            except OSError as error:
                raise InvalidInputError(
                    f"--tls-ca {self.ca}: the file has no certificate in PEM ({error}); {_REMEDY}"
                ) from None
            try:
                # With an empty password, an encrypted key fails instead of asking for a password.
                context.load_cert_chain(str(self.certificate), self.key, password="")
            except PermissionError as error:
                can_read = os.access(self.certificate or "", os.R_OK)
                hidden = self.key if can_read else self.certificate
                raise InvalidInputError(no_permission(hidden, error)) from None
            except OSError as error:
                raise InvalidInputError(
                    f"--tls-cert {self.certificate}, --tls-key {self.key}: they are no certificate with its unencrypted key "
                    f"in PEM ({error}); {_REMEDY}"
                ) from None
        to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
        ends = [
            client.wrap_bio(to_client, to_server),
            server.wrap_bio(to_server, to_client, server_side=True),
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
        client.verify_mode, client.check_hostname = ssl.CERT_REQUIRED, True
        return server, client, ends[1].getpeercert() or {}

    def _refusal(self, reason: str) -> CollapipeError:
        kind: type[CollapipeError] = WrongStateError
        now = f"{datetime.datetime.now(datetime.timezone.utc):%Y-%m-%d %H:%M} UTC"
        if "expired" in reason:
            remedy = (
                "renew it with `collapipe certs issue`, or join again; the clock of this machine "
                f"says {now}"
            )
        elif "not yet valid" in reason:
            remedy = f"set the clock of this machine, which says {now}"
        else:
            kind = InvalidInputError
            remedy = f"it must be signed by the authority of --tls-ca {self.ca}; {_REMEDY}"
        return kind(f"--tls-cert {self.certificate}: no peer would accept it ({reason}): {remedy}")


def _stamps(files: tuple[Path, ...]) -> _Stamps:
    def stamp(path: Path) -> tuple[int, int, int] | None:
        try:
            status = os.stat(path)
        except OSError:
            return None
        return status.st_ino, status.st_size, status.st_mtime_ns

    return tuple(map(stamp, files))
