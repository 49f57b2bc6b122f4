"""The folder of an authority: its issuing authority, the certificates that this has signed, and the join tokens.

Several processes may use the folder at a time: a lock makes each operation atomic. The key of the root is in a folder of its own.
"""

import datetime
import fcntl
import logging
import shlex
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
from collapipe.certificates.pki import Chain, Clock, HolderCertificate, utc_now
from collapipe.certificates.private_files import (
    OWNER_ONLY,
    file_errors,
    make_folder,
    passphrase_of_environment,
    read_authority_key,
    read_chain_of_key,
    read_if_valid,
    read_required,
    write_file,
)
from collapipe.certificates.revoked_keys import (
    parse_list,
    read_revoked_issuers,
    read_signed,
    sign_list,
)
from collapipe.certificates.root_folder import RootFolder
from collapipe.certificates.tokens import Grant, TokenStore
from collapipe.errors import InvalidInputError, NotPermittedError
from collapipe.v1.enrollment_pb2 import RevokedKey, RevokedKeys, SignedRevokedKeys

logger = logging.getLogger(__name__)

DEFAULT_LIFETIME = datetime.timedelta(days=365)
Outcome = Literal["issued", "renewed", "kept"]

_ROOT, _ISSUER, _REVOKED = "ca.pem", "issuing.pem", "revoked.pb"
_OLD_KEY = "ca-key.pem"
"""Older versions of CollaPipe had the only key of an authority here."""

_LOST = (
    "restore the folder from a backup; if it has signed nothing yet, delete it and repeat `collapipe certs "
    "init`"
)


_NO_LIST = (
    "restore this file from a backup. If an older version of CollaPipe made this authority, the file never existed: make a new "
    "authority and new certificates"
)


class AuthorityFolder:
    """Opens the folder of an authority that `create` has made. This does not need the key of the root.

    Args:
        passphrase: That of the keys; empty if they are not encrypted. The default is that of the environment.

    Raises:
        InvalidInputError: There is no authority, or its files are damaged.
    """

    def __init__(
        self, folder: Path, clock: Clock = utc_now, passphrase: bytes | None = None
    ) -> None:
        if not self.exists(folder):
            raise InvalidInputError(
                f"there is no authority in {folder}: make one with `collapipe certs init {shlex.quote(str(folder))}`"
            )
        if self.is_old(folder):
            raise InvalidInputError(
                f"{folder} holds an authority without a root, which an older version of CollaPipe made: make a new authority in another "
                "folder with `collapipe certs init`, and new certificates for all hosts"
            )
        self._folder = folder
        self._clock = clock
        self._passphrase = passphrase_of_environment() if passphrase is None else passphrase
        self.ca_file = folder / _ROOT
        """The certificate of the root, which every host trusts."""
        self.root = read_required(self.ca_file, pki.read_certificate, _LOST)
        self._issuer_pem: bytes | None = None
        self._read_issuer()
        self.revoked_file = folder / _REVOKED
        """The signed list of revoked keys."""
        self._issued = IssuedCertificates(folder / "certificates", clock)
        self._tokens = TokenStore(folder / "tokens")

    @staticmethod
    def exists(folder: Path) -> bool:
        """Returns whether a folder holds a file of an authority."""
        with file_errors(folder):
            return any((folder / name).exists() for name in (_ROOT, _ISSUER, _OLD_KEY))

    @staticmethod
    def is_old(folder: Path) -> bool:
        """Returns whether an older version of CollaPipe made the authority in a folder. This version cannot use it."""
        with file_errors(folder):
            return (folder / _OLD_KEY).exists()

    @classmethod
    def create(
        cls,
        folder: Path,
        clock: Clock = utc_now,
        passphrase: bytes | None = None,
        root: Path | None = None,
    ) -> "AuthorityFolder":
        """Creates a root and an issuing authority. The other arguments are those of the class.

        Args:
            root: The folder for the root. The default is the result of `root_in`.

        Raises:
            InvalidInputError: A folder holds an authority already, or cannot be written.
        """
        root = root or cls.root_in(folder)
        passphrase = passphrase_of_environment() if passphrase is None else passphrase
        make_folder(folder)
        with _locked(folder):
            if cls.exists(folder) or root.resolve() == folder.resolve():
                raise InvalidInputError(
                    f"{folder} holds an authority, or is the folder of the root: replacing an authority would invalidate every "
                    "certificate of the deployment; choose another folder, or delete this one by hand"
                )
            opened = RootFolder.create(root, clock, passphrase)
            key = pki.new_key()
            issuer = opened.make_issuer(key.public_key())
            empty = sign_list(RevokedKeys(number=1), key, issuer)
            # If this process dies in between, `__init__` reports the file that is missing.
            _write_issuer(folder, key, issuer, passphrase)
            write_file(folder / _REVOKED, empty.SerializeToString())
            write_file(folder / _ROOT, pki.pem(opened.certificate))
        return cls(folder, clock, passphrase)

    @staticmethod
    def root_in(folder: Path) -> Path:
        """Returns the folder of the root, if nobody names another one."""
        return folder / "root"

    @property
    def is_issuer_due(self) -> bool:
        """Whether certificates with the default lifetime outlive the issuing authority, which shortens them."""
        return self._clock() + DEFAULT_LIFETIME > self.issuer.not_valid_after_utc

    def renew_issuer(self, root: Path, *, revoke: bool = False) -> None:
        """Replaces the key and the certificate of the issuing authority. What earlier ones have signed counts until it expires.

        Args:
            root: The folder of the root.
            revoke: Whether everything that earlier issuing authorities have signed counts no more. Then their certificates cannot be
                renewed, and all join tokens are deleted, because the thief of a key may have made some.

        Raises:
            InvalidInputError: The root is another one, or a folder cannot be used.
        """
        opened = RootFolder(root, self._clock, self._passphrase)
        if opened.certificate != self.root:
            raise InvalidInputError(
                f"{root} holds another root than that of {self.ca_file}: give the folder that `collapipe certs init` made with it"
            )
        with self._locked():
            key = pki.new_key()
            issuer = opened.make_issuer(key.public_key())
            before = self._signed_list()
            keys, now = self._revoked(), int(self._clock().timestamp())
            # The thief of a key may have chosen the last number. A list of a revoked issuing authority does not count.
            keys.number = now if revoke else max(keys.number + 1, now)
            signed = sign_list(keys, key, issuer)
            issuers = opened.revoke_all_but(issuer) if revoke else before
            signed.revoked_issuers = issuers.revoked_issuers
            signed.root_signature = issuers.root_signature
            # If this process dies after this, the present issuing authority signs nothing more, and the command can be repeated.
            write_file(self.revoked_file, signed.SerializeToString())
            if revoke:
                with file_errors(self._folder):
                    self._issued.remove_all()
                    self._tokens.delete_all()
            _write_issuer(self._folder, key, issuer, self._passphrase)
            self._read_issuer()
        logger.info(
            "made a new issuing authority%s", ", and revoked all earlier ones" if revoke else ""
        )

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
        with self._locked():
            self._issued.check_names_free(identity, wanted)
            if read_if_valid(ca_file, pki.read_certificate) != self.root:
                write_file(ca_file, pki.pem(self.root))
            present = read_chain_of_key(folder, self.root)
            key = read_if_valid(key_file, pki.read_key)
            # If the issuing authority was revoked, a thief may have this key, too.
            if (key is not None and self._is_revoked(key.public_key())) or (
                present is not None and self._is_of_revoked_issuer(present.issuer)
            ):
                key = present = None
            if present is not None and self._is_good(present, identity, wanted):
                return "kept", present.certificate.not_valid_after_utc
            if key is None:
                key = pki.new_key()
                write_file(key_file, pki.key_pem(key), OWNER_ONLY)
            chain = self._sign(identity, wanted, key.public_key(), lifetime)
            self._issued.add(chain, present)
            write_file(folder / "cert.pem", chain.pem)
        outcome: Outcome = "issued" if present is None else "renewed"
        return outcome, chain.certificate.not_valid_after_utc

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
        with self._locked():
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

    def enroll(
        self, secret: bytes, request: bytes, observed_host: str | None, *, is_own: bool = False
    ) -> HolderCertificate:
        """Issues the certificate that a join token grants, and makes the token useless.

        The token stays usable if the request is refused.

        Args:
            request: Signing request, PKCS #10 in DER.
            observed_host: Address that the request came from; `None` if no other host can reach it.
            is_own: Whether it is an address of the authority's own machine. All services there may have it.

        Raises:
            NotPermittedError: The token cannot be used, or the request asks for more than it grants.
            InvalidInputError: The request is malformed, or another holder has one of the names.
        """
        asked = pki.read_request(request)
        with self._locked():
            grant = self._tokens.find(secret, self._clock())
            identity, granted = grant.identity, grant.hosts
            self._issued.check_names_free(identity, granted)
            # Nobody calls a person, so the address does not matter.
            if observed_host is not None and identity.role not in PEOPLE:
                granted |= self._observed_hosts(grant, observed_host, is_own)
            _check_within(asked, identity, granted)
            lifetime = datetime.timedelta(seconds=grant.lifetime_seconds)
            chain = self._sign(identity, granted, asked.public_key, lifetime)
            # This order keeps the token usable if the process dies in between or the disk is full.
            self._issued.add(chain)
            self._tokens.use(secret)
        logger.info("enrolled %s from %s", identity, observed_host or "an unknown address")
        return HolderCertificate(identity, chain)

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
        with self._locked():
            held = self._issued.find(certificate)
            if held is None:
                raise refusal
            identity, hosts = held.identity, held.hosts
            if not pki.is_of_key(certificate, asked.public_key):
                raise NotPermittedError(
                    f"the request is signed with another key than that of {identity}: renew on the box that has its key, or "
                    "make a new token with `collapipe certs token`"
                )
            _check_within(asked, identity, hosts)
            lifetime = pki.lifetime_of(certificate)
            if held.expires == held.chain.issuer.not_valid_after_utc:
                # The end of the issuing authority made it shorter than its holder wanted.
                lifetime = max(lifetime, DEFAULT_LIFETIME)
            renewed = self._sign(identity, hosts, asked.public_key, lifetime)
            self._issued.add(renewed, held.chain)
        logger.info("renewed the certificate of %s", identity)
        return HolderCertificate(identity, renewed)

    def revoke(self, identity: Identity) -> int:
        """Revokes every key for which a holder has a valid certificate, and deletes its unused tokens.

        Returns:
            The number of keys.

        Raises:
            InvalidInputError: The holder has neither, or the folder cannot be written.
        """
        with self._locked():
            with file_errors(self._folder):
                num_tokens = self._tokens.delete_of(identity)
            held = [one for one in self._issued.valid() if one.identity.is_same_holder(identity)]
            if not held and not num_tokens:
                raise InvalidInputError(
                    f"{identity} has neither a valid certificate of this authority nor a token: `collapipe certs list "
                    f"{self._folder}` shows who has a certificate"
                )
            self._check_issuer()
            revoked = self._revoked()
            new = {pki.key_sha256(one.certificate): one.identity.uri for one in held}
            revoked.keys.extend(
                RevokedKey(sha256=digest, identity=uri) for digest, uri in new.items()
            )
            # After a backup was restored, the number is still larger than any that a host has.
            revoked.number = max(revoked.number + 1, int(self._clock().timestamp()))
            before, signed = self._signed_list(), sign_list(revoked, self._key, self.issuer)
            signed.revoked_issuers = before.revoked_issuers
            signed.root_signature = before.root_signature
            write_file(self.revoked_file, signed.SerializeToString())
            with file_errors(self._folder):
                self._issued.remove(held)
        logger.info("revoked %d keys of %s", len(new), identity)
        return len(new)

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """Locks the folder. If another process has replaced the issuing authority, this one uses the new one."""
        with _locked(self._folder):
            self._read_issuer()
            yield

    def _read_issuer(self) -> None:
        data = read_required(self._folder / _ISSUER, bytes, _LOST)
        if data != self._issuer_pem:
            read_key = partial(read_authority_key, passphrase=self._passphrase)
            self._key = read_required(self._folder / _ISSUER, read_key, _LOST)
            self.issuer = read_required(self._folder / _ISSUER, pki.read_certificate, _LOST)
            """The certificate of the issuing authority, which signs all others."""
            try:
                pki.check_issuer(self.issuer, self.root, self.issuer.not_valid_before_utc)
            except NotPermittedError as error:
                raise InvalidInputError(
                    f"{self._folder / _ISSUER} and {self.ca_file} do not belong together ({error}): restore both from one backup"
                ) from None
            self._issuer_pem = data

    def _signed_list(self) -> SignedRevokedKeys:
        return read_required(self.revoked_file, parse_list, _NO_LIST)

    def _revoked(self) -> RevokedKeys:
        return read_signed(self._signed_list(), self.root)

    def _is_of_revoked_issuer(self, issuer: x509.Certificate) -> bool:
        return pki.key_sha256(issuer) in read_revoked_issuers(self._signed_list(), self.root)

    def _check_issuer(self) -> None:
        """Raises `InvalidInputError` if nobody would accept what the issuing authority signs."""
        now, remedy = (
            self._clock(),
            f"make a new one with `collapipe certs issuing {shlex.quote(str(self._folder))}`",
        )
        if now < self.issuer.not_valid_before_utc:
            raise InvalidInputError(
                f"the clock of this machine says {now:%Y-%m-%d %H:%M} UTC, but the authority was made after "
                f"{self.issuer.not_valid_before_utc:%Y-%m-%d}: set the clock"
            )
        if self.issuer.not_valid_after_utc <= now:
            raise InvalidInputError(
                f"the issuing authority in {self._folder} expired at {self.issuer.not_valid_after_utc:%Y-%m-%d}: {remedy}"
            )
        if self._is_of_revoked_issuer(self.issuer):
            raise InvalidInputError(
                f"the issuing authority in {self._folder} was revoked: {remedy}"
            )

    def _is_revoked(self, key: ec.EllipticCurvePublicKey) -> bool:
        digest = pki.key_sha256(key)
        return any(revoked.sha256 == digest for revoked in self._revoked().keys)

    def _is_good(self, chain: Chain, identity: Identity, hosts: frozenset[str]) -> bool:
        held = HolderCertificate(identity, chain)
        return (
            pki.identity_of(chain.certificate) == identity
            and held.hosts == pki.hosts_for(identity, hosts)
            and not held.is_due(self._clock())
        )

    def _sign(
        self,
        identity: Identity,
        hosts: frozenset[str],
        public_key: ec.EllipticCurvePublicKey,
        lifetime: datetime.timedelta,
    ) -> Chain:
        self._check_issuer()
        if self._is_revoked(public_key):
            raise NotPermittedError(
                f"the key of this request was revoked: {identity} needs a new key, so join with --again and a new token of "
                "`collapipe certs token`"
            )
        now, authority = self._clock(), (self._key, self.issuer)
        certificate = pki.build_certificate(
            identity, hosts, public_key, authority, now, now + lifetime
        )
        return Chain(certificate, self.issuer)

    def _observed_hosts(self, grant: Grant, host: str, is_own: bool) -> frozenset[str]:
        """Returns the observed address of a box as a set; empty if the certificate does not need it.

        Raises:
            NotPermittedError: Another holder has the address, and the token grants no other.
        """
        if host in grant.hosts | OF_THIS_MACHINE:
            return frozenset()
        other = self._issued.other_holder(host, grant.identity)
        if other is None or is_own:
            return frozenset({host})
        if grant.hosts:
            return frozenset()
        raise NotPermittedError(
            f"{grant.identity} uses the address {host}, but the certificate of {other} has it already; if both are on "
            "one machine, or the address now belongs to another box, make a token that grants the address, with "
            f"`collapipe certs token ... --address {host}`"
        )


def _write_issuer(
    folder: Path, key: ec.EllipticCurvePrivateKey, issuer: x509.Certificate, passphrase: bytes
) -> None:
    """Writes the key and the certificate in one file, so that they always belong together."""
    write_file(folder / _ISSUER, pki.key_pem(key, passphrase) + pki.pem(issuer), OWNER_ONLY)


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
