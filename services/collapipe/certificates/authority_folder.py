"""The folder of an authority: its key, the certificates that it has signed, and its join tokens.

Several processes may use the folder at a time: a lock makes each operation atomic.
"""

import datetime
import fcntl
import logging
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Literal

from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec

from collapipe.certificates import pki
from collapipe.certificates.identity import OF_THIS_MACHINE, PEOPLE, Identity, Role, read_host
from collapipe.certificates.issued_certificates import IssuedCertificates
from collapipe.certificates.pki import Clock, HolderCertificate, utc_now
from collapipe.certificates.private_files import (
    OWNER_ONLY,
    file_errors,
    make_folder,
    read_certificate_of_key,
    read_if_valid,
    read_required,
    write_file,
)
from collapipe.certificates.revoked_keys import parse_list, read_signed, sign_list
from collapipe.certificates.tokens import Grant, TokenStore
from collapipe.errors import InvalidInputError, NotPermittedError
from collapipe.v1.enrollment_pb2 import RevokedKey, RevokedKeys

logger = logging.getLogger(__name__)

DEFAULT_LIFETIME = datetime.timedelta(days=365)
AUTHORITY_LIFETIME = datetime.timedelta(days=3650)
Outcome = Literal["issued", "renewed", "kept"]

PASSPHRASE_VARIABLE = "COLLAPIPE_AUTHORITY_PASSPHRASE"
"""The environment variable with the passphrase of the authority's key. Without it, the key is not encrypted."""

_CERTIFICATE, _KEY = "ca.pem", "ca-key.pem"
_REVOKED = "revoked.pb"

_LOST = (
    "restore the folder from a backup; if it has signed nothing yet, delete it and repeat `collapipe certs "
    "init`"
)


_NO_LIST = (
    "restore this file from a backup. If an older version of CollaPipe made this authority, the file never existed: make a new "
    "authority and new certificates"
)


class AuthorityFolder:
    """Opens the folder of an authority that `create` has made.

    Args:
        passphrase: That of the key; empty if the key is not encrypted. The default is that of the environment.

    Raises:
        InvalidInputError: There is no authority, or its files are damaged.
    """

    def __init__(
        self, folder: Path, clock: Clock = utc_now, passphrase: bytes | None = None
    ) -> None:
        if not self.exists(folder):
            raise InvalidInputError(
                f"there is no authority in {folder}: make one with `collapipe certs init {folder}`"
            )
        self._folder = folder
        self._clock = clock
        self.ca_file = folder / _CERTIFICATE
        """The certificate of the authority, which every host trusts."""
        self.certificate = read_required(self.ca_file, pki.read_certificate, _LOST)
        passphrase = _passphrase() if passphrase is None else passphrase
        self._key = read_required(folder / _KEY, partial(_read_key, passphrase=passphrase), _LOST)
        if not pki.is_of_key(self.certificate, self._key.public_key()):
            raise InvalidInputError(
                f"{folder / _KEY} is not the key of {self.ca_file}: restore both from one backup"
            )
        self.revoked_file = folder / _REVOKED
        """The signed list of revoked keys."""
        self._issued = IssuedCertificates(folder / "certificates", clock)
        self._tokens = TokenStore(folder / "tokens")

    @staticmethod
    def exists(folder: Path) -> bool:
        """Returns whether a folder holds a file of an authority."""
        with file_errors(folder):
            return (folder / _CERTIFICATE).exists() or (folder / _KEY).exists()

    @classmethod
    def create(
        cls, folder: Path, clock: Clock = utc_now, passphrase: bytes | None = None
    ) -> "AuthorityFolder":
        """Creates an authority. The arguments are those of the class.

        Raises:
            InvalidInputError: The folder holds an authority already, or cannot be written.
        """
        make_folder(folder)
        with _locked(folder):
            if cls.exists(folder):
                raise InvalidInputError(
                    f"{folder} holds an authority: replacing it would invalidate every certificate of the deployment; "
                    "choose another folder, or delete this one by hand"
                )
            key = pki.new_key()
            certificate = pki.build_authority(key, clock(), AUTHORITY_LIFETIME)
            # The key is written first. If this process dies before it writes the certificate, `__init__`
            # reports the folder as damaged.
            encrypted = pki.key_pem(key, _passphrase() if passphrase is None else passphrase)
            write_file(folder / _KEY, encrypted, OWNER_ONLY)
            empty = sign_list(RevokedKeys(number=1), key)
            write_file(folder / _REVOKED, empty.SerializeToString())
            write_file(folder / _CERTIFICATE, pki.pem(certificate))
        return cls(folder, clock, passphrase)

    def certificates(self) -> list[HolderCertificate]:
        """Returns one valid certificate for each holder: the last to expire. Sorted by role and name."""
        newest: dict[tuple[Role, str], HolderCertificate] = {}
        for held in sorted(self._issued.valid(), key=lambda held: held.expires):
            newest[held.identity.role, held.identity.name] = held
        return sorted(newest.values(), key=lambda held: str(held.identity))

    def issue(
        self,
        identity: Identity,
        hosts: Iterable[str],
        folder: Path,
        lifetime: datetime.timedelta = DEFAULT_LIFETIME,
    ) -> tuple[Outcome, datetime.datetime]:
        """Makes sure that a folder holds a good certificate: `ca.pem`, `cert.pem` and `key.pem`.

        A certificate that is not due for renewal and has the right identity and hosts is kept. A renewal
        keeps the key and replaces only `cert.pem`, so that a reader never gets a key with the certificate of
        another key.

        Args:
            hosts: Host names and IP addresses of the holder, besides its name.
            folder: Created if it does not exist.

        Returns:
            The outcome, and when the certificate expires.

        Raises:
            InvalidInputError: Another holder has one of the names, or the folder cannot be used.
        """
        wanted = frozenset(map(read_host, hosts))
        make_folder(folder)
        ca_file, key_file = folder / "ca.pem", folder / "key.pem"
        with _locked(self._folder):
            self._issued.check_names_free(identity, wanted)
            if read_if_valid(ca_file, pki.read_certificate) != self.certificate:
                write_file(ca_file, pki.pem(self.certificate))
            present = read_certificate_of_key(folder, self.certificate)
            key = read_if_valid(key_file, pki.read_key)
            if key is not None and self._is_revoked(key.public_key()):
                key = present = None
            if present is not None and self._is_good(present, identity, wanted):
                return "kept", present.not_valid_after_utc
            if key is None:
                key = pki.new_key()
                write_file(key_file, pki.key_pem(key), OWNER_ONLY)
            certificate = self._sign(identity, wanted, key.public_key(), lifetime)
            self._issued.add(certificate, present)
            write_file(folder / "cert.pem", pki.pem(certificate))
        return "issued" if present is None else "renewed", certificate.not_valid_after_utc

    def make_token(
        self,
        identity: Identity,
        hosts: Iterable[str],
        valid: datetime.timedelta,
        lifetime: datetime.timedelta = DEFAULT_LIFETIME,
    ) -> bytes:
        """Creates a join token for one certificate, and returns its secret, which is not stored.

        Args:
            hosts: Host names and IP addresses of the holder, besides its name and its observed address.
            valid: How long the token can be used.
            lifetime: Lifetime of the certificate.

        Raises:
            InvalidInputError: Another holder has one of the names.
        """
        wanted = frozenset(map(read_host, hosts))
        with _locked(self._folder):
            self._issued.check_names_free(identity, wanted)
            now = self._clock()
            self._tokens.delete_old(now)
            return self._tokens.add(
                Grant(
                    identity=identity,
                    hosts=wanted,
                    expires=now + valid,
                    lifetime_seconds=lifetime.total_seconds(),
                )
            )

    def has_token(self, secret: bytes) -> bool:
        """Returns whether a token with this secret exists and is unused. An expired token counts, too."""
        return self._tokens.is_unused(secret)

    def enroll(self, secret: bytes, request: bytes, observed_host: str | None) -> HolderCertificate:
        """Issues the certificate that a join token grants, and makes the token useless.

        The token stays usable if the request is refused.

        Args:
            request: Signing request, PKCS #10 in DER.
            observed_host: Address that the request came from; `None` if no other host can reach it.

        Raises:
            NotPermittedError: The token cannot be used, or the request asks for more than it grants.
            InvalidInputError: The request is malformed, or another holder has one of the names.
        """
        asked = pki.read_request(request)
        with _locked(self._folder):
            grant = self._tokens.find(secret, self._clock())
            identity, granted = grant.identity, grant.hosts
            self._issued.check_names_free(identity, granted)
            # Nobody calls a person, so the address does not matter.
            if observed_host is not None and identity.role not in PEOPLE:
                granted |= self._observed_hosts(grant, observed_host)
            _check_within(asked, identity, granted)
            lifetime = datetime.timedelta(seconds=grant.lifetime_seconds)
            certificate = self._sign(identity, granted, asked.public_key, lifetime)
            # This order keeps the token usable if the process dies in between or the disk is full.
            self._issued.add(certificate)
            self._tokens.use(secret)
        logger.info("enrolled %s from %s", identity, observed_host or "an unknown address")
        return HolderCertificate(identity, certificate)

    def renew(self, present: bytes, request: bytes) -> HolderCertificate:
        """Issues a certificate with the key, identity, hosts and lifetime of a valid one.

        Args:
            present: The valid certificate, in DER.
            request: Signing request for the same key, PKCS #10 in DER.

        Raises:
            NotPermittedError: The certificate is not valid or not of this authority, or the request has
                another key.
            InvalidInputError: The certificate or the request is malformed.
        """
        asked = pki.read_request(request)
        certificate = pki.read_certificate(present)
        refusal = NotPermittedError(
            "this authority has no valid record of this certificate: it has expired, was revoked, or is of another authority. Make "
            "a token with `collapipe certs token`, and run `collapipe join --again` with it"
        )
        # Anybody may ask, so a foreign certificate must cost little.
        if not pki.is_signed_by(certificate, self.certificate):
            raise refusal
        with _locked(self._folder):
            # A certificate that equals a stored one byte for byte needs no further check.
            held = next(
                (one for one in self._issued.valid() if one.certificate == certificate), None
            )
            if held is None:
                raise refusal
            identity, hosts = held.identity, held.hosts
            if not pki.is_of_key(certificate, asked.public_key):
                raise NotPermittedError(
                    f"the request is signed with another key than that of {identity}"
                )
            _check_within(asked, identity, hosts)
            lifetime = pki.lifetime_of(certificate)
            renewed = self._sign(identity, hosts, asked.public_key, lifetime)
            self._issued.add(renewed, certificate)
        logger.info("renewed the certificate of %s", identity)
        return HolderCertificate(identity, renewed)

    def revoke(self, identity: Identity) -> int:
        """Revokes every key for which a holder has a valid certificate, and deletes its unused tokens.

        Returns:
            The number of keys.

        Raises:
            InvalidInputError: The holder has neither, or the folder cannot be written.
        """
        with _locked(self._folder):
            with file_errors(self._folder):
                num_tokens = self._tokens.delete_of(identity)
            held = [one for one in self._issued.valid() if one.identity.is_same_holder(identity)]
            if not held and not num_tokens:
                raise InvalidInputError(
                    f"{identity} has neither a valid certificate of this authority nor a token: `collapipe certs list "
                    f"{self._folder}` shows who has a certificate"
                )
            revoked = self._revoked()
            new = {pki.key_sha256(one.certificate): one.identity.uri for one in held}
            revoked.keys.extend(
                RevokedKey(sha256=digest, identity=uri) for digest, uri in new.items()
            )
            # After a backup was restored, the number is still larger than any that a host has.
            revoked.number = max(revoked.number + 1, int(self._clock().timestamp()))
            write_file(self.revoked_file, sign_list(revoked, self._key).SerializeToString())
            with file_errors(self._folder):
                self._issued.remove(held)
        logger.info("revoked %d keys of %s", len(new), identity)
        return len(new)

    def _revoked(self) -> RevokedKeys:
        signed = read_required(self.revoked_file, parse_list, _NO_LIST)
        return read_signed(signed, pki.pem(self.certificate))

    def _is_revoked(self, key: ec.EllipticCurvePublicKey) -> bool:
        digest = pki.key_sha256(key)
        return any(revoked.sha256 == digest for revoked in self._revoked().keys)

    def _is_good(
        self, certificate: x509.Certificate, identity: Identity, hosts: frozenset[str]
    ) -> bool:
        held = HolderCertificate(identity, certificate)
        return (
            pki.identity_of(certificate) == identity
            and held.hosts == pki.hosts_for(identity, hosts)
            and not held.is_due(self._clock())
        )

    def _sign(
        self,
        identity: Identity,
        hosts: frozenset[str],
        public_key: ec.EllipticCurvePublicKey,
        lifetime: datetime.timedelta,
    ) -> x509.Certificate:
        now = self._clock()
        if self._is_revoked(public_key):
            raise NotPermittedError(
                f"the key of this request was revoked: {identity} needs a new key, so join with --again and a new token of "
                "`collapipe certs token`"
            )
        if now < self.certificate.not_valid_before_utc:
            raise InvalidInputError(
                f"the clock of this machine says {now:%Y-%m-%d %H:%M} UTC, but the authority was made after "
                f"{self.certificate.not_valid_before_utc:%Y-%m-%d}: set the clock"
            )
        if self.certificate.not_valid_after_utc <= now:
            raise InvalidInputError(
                f"the authority in {self._folder} expired at {self.certificate.not_valid_after_utc:%Y-%m-%d}: "
                "make a new authority and new certificates"
            )
        authority = (self._key, self.certificate)
        return pki.build_certificate(identity, hosts, public_key, authority, now, now + lifetime)

    def _observed_hosts(self, grant: Grant, host: str) -> frozenset[str]:
        """Returns the observed address of a box as a set; empty if the certificate does not need it.

        Raises:
            NotPermittedError: Another holder has the address, and the token grants no other.
        """
        if host in grant.hosts | OF_THIS_MACHINE:
            return frozenset()
        other = self._issued.other_holder(host, grant.identity)
        if other is None:
            return frozenset({host})
        if grant.hosts:
            return frozenset()
        raise NotPermittedError(
            f"{grant.identity} uses the address {host}, but the certificate of {other} has it already; if both are on "
            "one machine, or the address now belongs to another box, make a token that grants the address, with "
            f"`collapipe certs token ... --address {host}`"
        )


def _passphrase() -> bytes:
    return os.environ.get(PASSPHRASE_VARIABLE, "").encode()


def _read_key(pem: bytes, passphrase: bytes) -> ec.EllipticCurvePrivateKey:
    """Reads the key of the authority; raises `InvalidInputError`."""
    is_encrypted = b"ENCRYPTED" in pem
    if is_encrypted and not passphrase:
        raise InvalidInputError(
            f"the key is encrypted: set {PASSPHRASE_VARIABLE} to its passphrase. Only if you have lost that"
        )
    return pki.read_key(pem, passphrase if is_encrypted else b"")


def _check_within(asked: pki.Request, identity: Identity, granted: frozenset[str]) -> None:
    """Raises `NotPermittedError` if a request asks for more than its identity and the granted hosts."""
    if asked.identities not in ((), (identity.uri,)):
        raise NotPermittedError(
            f"the request asks to be {', '.join(map(repr, asked.identities))}, but may only be {identity.uri}"
        )
    allowed = pki.hosts_for(identity, granted) | OF_THIS_MACHINE
    beyond = asked.hosts - allowed
    if beyond:
        raise NotPermittedError(
            f"the request asks for the host {min(beyond)!r}, but {identity} may have {', '.join(sorted(allowed))}: "
            "make a token that grants it, with `collapipe certs token ... --address HOST`"
        )


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Locks the folder against other threads and processes."""
    with file_errors(folder):
        file = open(folder / "lock", "ab")  # noqa: SIM115
    with file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
