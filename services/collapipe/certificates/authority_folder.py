"""An authority: a folder with a key that signs, and everything that it has signed.

Several processes may use it at a time: a lock makes each decision whole.
"""

import datetime
import fcntl
import logging
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeVar

from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec

from collapipe.certificates import forms
from collapipe.certificates.forms import utc_now
from collapipe.certificates.identity import Identity, Role, is_host_name, read_host
from collapipe.certificates.private_files import OWNER_ONLY, explained, make_folder, write_file
from collapipe.certificates.tokens import Grant, TokenStore
from collapipe.errors import InvalidInputError, NotPermittedError

T = TypeVar("T")

logger = logging.getLogger(__name__)

DEFAULT_LIFETIME = datetime.timedelta(days=365)
AUTHORITY_LIFETIME = datetime.timedelta(days=3650)
Outcome = Literal["issued", "renewed", "kept"]


@dataclass(frozen=True)
class Issued:
    """A certificate of this authority, as its list shows it."""

    identity: Identity
    hosts: frozenset[str]
    expires: datetime.datetime


@dataclass(frozen=True)
class Enrolled:
    """The answer to an enrollment."""

    certificate: x509.Certificate
    identity: Identity


class AuthorityFolder:
    """An authority.

    Args:
        folder: Of `create`.
        clock: Tells the time.

    Raises:
        InvalidInputError: There is no authority, or its files cannot be used.
    """

    def __init__(self, folder: Path, clock: Callable[[], datetime.datetime] = utc_now) -> None:
        self._folder = folder
        self._clock = clock
        self._tokens = TokenStore(folder / "tokens")
        if not self.exists(folder):
            raise InvalidInputError(
                f"there is no authority in {folder}: make one with `collapipe certs init {folder}`"
            )
        self._certificate = _read_whole(self.ca_file, forms.read_certificate)
        self._key = _read_whole(_key_file(folder), forms.read_key)
        if not forms.is_of_key(self._certificate, self._key.public_key()):
            raise InvalidInputError(
                f"{_key_file(folder)} is not the key of {self.ca_file}: restore both from one backup"
            )

    @staticmethod
    def exists(folder: Path) -> bool:
        """Whether there is an authority, or a part of one."""
        with explained(folder):
            return _ca_file(folder).exists() or _key_file(folder).exists()

    @classmethod
    def create(
        cls, folder: Path, clock: Callable[[], datetime.datetime] = utc_now
    ) -> "AuthorityFolder":
        """Makes an authority.

        Raises:
            InvalidInputError: There is one already: everything that it signed would become worthless.
        """
        make_folder(folder)
        with _locked(folder):
            if cls.exists(folder):
                raise InvalidInputError(
                    f"{folder} holds an authority: another one in its place would make every certificate of the "
                    "deployment worthless; choose another folder, or delete this one by hand"
                )
            key = forms.new_key()
            certificate = forms.build_authority(key, clock(), AUTHORITY_LIFETIME)
            # what is half made is not taken for an authority that works: `__init__` misses the certificate
            write_file(_key_file(folder), forms.key_pem(key), OWNER_ONLY)
            write_file(_ca_file(folder), forms.pem(certificate))
        return cls(folder, clock)

    @property
    def ca_file(self) -> Path:
        """The certificate that every peer trusts."""
        return _ca_file(self._folder)

    @property
    def certificate(self) -> x509.Certificate:
        """The same."""
        return self._certificate

    def certificates(self) -> list[Issued]:
        """What is valid, by role and name; of each holder the certificate that lasts longest."""
        newest: dict[Identity, Issued] = {}
        for identity, certificate in self._valid():
            expires = certificate.not_valid_after_utc
            known = newest.get(identity)
            if known is None or known.expires < expires:
                newest[identity] = Issued(identity, forms.hosts_of(certificate), expires)
        return sorted(newest.values(), key=lambda issued: str(issued.identity))

    def issue(
        self,
        identity: Identity,
        hosts: Iterable[str],
        folder: Path,
        lifetime: datetime.timedelta = DEFAULT_LIFETIME,
    ) -> tuple[Outcome, datetime.datetime]:
        """Sees to it that a folder holds a certificate: `ca.pem`, `cert.pem` and `key.pem`.

        What is there stays while it is good: of this holder, for these hosts, and young. A key outlives its
        certificates, so that a renewal replaces one file and nobody ever reads a key with another's certificate.

        Args:
            identity: Who gets it.
            hosts: By which others reach the holder, besides its name. Several holders on one machine may share an
                address; never a name.
            folder: Made when absent.
            lifetime: Of the certificate.

        Returns:
            What was done, and when the certificate expires.

        Raises:
            InvalidInputError: Another holder has one of the names, or the folder cannot be used.
        """
        wanted = frozenset(map(read_host, hosts))
        make_folder(folder)
        key_file, certificate_file = folder / "key.pem", folder / "cert.pem"
        with _locked(self._folder):
            self._check_names_free(identity, wanted)
            key, present = self._present(key_file, certificate_file)
            if _read_or_none(folder / "ca.pem", forms.read_certificate) != self._certificate:
                write_file(folder / "ca.pem", forms.pem(self._certificate))
            if present is not None and self._is_good(present, identity, wanted):
                return "kept", present.not_valid_after_utc
            if key is None:
                key = forms.new_key()
                write_file(key_file, forms.key_pem(key), OWNER_ONLY)
            certificate = self._sign(identity, wanted, key.public_key(), lifetime)
            self._record(certificate, present)
            write_file(certificate_file, forms.pem(certificate))
        return "issued" if present is None else "renewed", certificate.not_valid_after_utc

    def make_token(
        self,
        identity: Identity,
        hosts: Iterable[str],
        valid: datetime.timedelta,
        lifetime: datetime.timedelta = DEFAULT_LIFETIME,
    ) -> bytes:
        """Makes a one-time token, with which a box gets a certificate; returns its secret, which is kept nowhere.

        Args:
            identity: Who the box becomes.
            hosts: By which others reach it, besides its name and the address that it is seen at.
            valid: How long the token can be used.
            lifetime: Of the certificate.

        Raises:
            InvalidInputError: Another holder has one of the names.
        """
        wanted = frozenset(map(read_host, hosts))
        with _locked(self._folder):
            self._check_names_free(identity, wanted)
            now = self._clock()
            self._tokens.forget_old(now)
            return self._tokens.add(Grant(identity, wanted, now + valid, lifetime))

    def has_token(self, secret: bytes) -> bool:
        """Whether somebody has a token that was not used yet; it may have expired."""
        return self._tokens.is_waiting(secret)

    def enroll(self, secret: bytes, request: bytes, observed_host: str | None) -> Enrolled:
        """Answers the bearer of a token, once.

        Args:
            secret: Of the token.
            request: PKCS #10, DER. What it asks for beyond the grant is refused, and the token stays good.
            observed_host: The address that the request came from, if it says where the box is.

        Raises:
            NotPermittedError: The token is no good, or the request asks for what it does not grant.
            InvalidInputError: The request is none, or another holder has one of the names.
        """
        asked = forms.read_request(request)
        with _locked(self._folder):
            grant = self._tokens.find(secret, self._clock())
            granted = grant.hosts
            self._check_names_free(grant.identity, granted)
            if (
                observed_host is not None
                and observed_host not in granted | forms.OF_THIS_MACHINE
                and grant.identity.role is not Role.CLIENT  # which nobody calls
            ):
                granted |= self._observed(grant, observed_host)
            _check_within(asked, grant.identity, granted)
            certificate = self._sign(grant.identity, granted, asked.public_key, grant.lifetime)
            # in this order: whoever dies between the two, or finds the disk full, leaves the token good
            self._record(certificate)
            self._tokens.use(secret)
        logger.info("enrolled %s from %s", grant.identity, observed_host or "an unknown address")
        return Enrolled(certificate, grant.identity)

    def renew(self, present: bytes, request: bytes) -> Enrolled:
        """Replaces a certificate that is still valid by one for the same key, identity, hosts and time.

        Args:
            present: The certificate, DER.
            request: PKCS #10, DER, signed with its key.

        Raises:
            NotPermittedError: The certificate is not a valid one of this authority, or the key another.
            InvalidInputError: Either is not what it should be.
        """
        asked = forms.read_request(request)
        certificate = forms.read_certificate(present)
        with _locked(self._folder):
            # one of those on record, byte for byte: nothing in it need be checked again
            identity = next(
                (holder for holder, valid in self._valid() if valid == certificate), None
            )
            if identity is None:
                raise NotPermittedError(
                    "this certificate has expired, or is not of this authority: join again with a new token of "
                    "`collapipe certs token`"
                )
            if not forms.is_of_key(certificate, asked.public_key):
                raise NotPermittedError(
                    f"the request is signed with another key than that of {identity}"
                )
            hosts = forms.hosts_of(certificate)
            _check_within(asked, identity, hosts)
            lifetime = forms.lifetime_of(certificate)
            renewed = self._sign(identity, hosts, asked.public_key, lifetime)
            self._record(renewed, certificate)
        logger.info("renewed the certificate of %s", identity)
        return Enrolled(renewed, identity)

    def _present(
        self, key_file: Path, certificate_file: Path
    ) -> tuple[ec.EllipticCurvePrivateKey | None, x509.Certificate | None]:
        """The key of a folder, if it can be used, and the certificate, if it is of the key and of this authority."""
        key = _read_or_none(key_file, forms.read_key)
        certificate = _read_or_none(certificate_file, forms.read_certificate)
        if (
            key is None
            or certificate is None
            or not forms.is_of_key(certificate, key.public_key())
            or not forms.is_signed_by(certificate, self._certificate)
        ):
            return key, None
        return key, certificate

    def _is_good(
        self, certificate: x509.Certificate, identity: Identity, hosts: frozenset[str]
    ) -> bool:
        born, expires = certificate.not_valid_before_utc, certificate.not_valid_after_utc
        return (
            forms.identity_of(certificate) == identity
            and forms.hosts_of(certificate) == forms.hosts_for(identity, hosts)
            and not forms.is_due(born, expires, self._clock())
        )

    def _sign(
        self,
        identity: Identity,
        hosts: frozenset[str],
        public_key: ec.EllipticCurvePublicKey,
        lifetime: datetime.timedelta,
    ) -> x509.Certificate:
        now = self._clock()
        if now < self._certificate.not_valid_before_utc:
            raise InvalidInputError(
                f"the clock of the authority's machine says {now:%Y-%m-%d %H:%M} UTC, and the authority was made after "
                f"{self._certificate.not_valid_before_utc:%Y-%m-%d}: set the clock"
            )
        if self._certificate.not_valid_after_utc <= now:
            raise InvalidInputError(
                f"the authority in {self._folder} expired at {self._certificate.not_valid_after_utc:%Y-%m-%d}: "
                "make another, and every certificate anew"
            )
        authority = (self._key, self._certificate)
        return forms.build_certificate(identity, hosts, public_key, authority, now, now + lifetime)

    def _valid(self) -> Iterator[tuple[Identity, x509.Certificate]]:
        """Everything signed that has not expired."""
        now = self._clock()
        for certificate in self._recorded().values():
            identity = forms.identity_of(certificate)
            if identity is not None and now < certificate.not_valid_after_utc:
                yield identity, certificate

    def _recorded(self) -> dict[Path, x509.Certificate]:
        """Everything signed that is not forgotten."""
        return {
            path: _read_whole(path, forms.read_certificate, "restore it or delete it")
            for path in (self._folder / "certificates").glob("*.pem")
        }

    def _record(
        self, certificate: x509.Certificate, replaced: x509.Certificate | None = None
    ) -> None:
        """Remembers a certificate, and of the older ones of its key only the one that it replaces.

        That one is what its holder has until the answer arrives; without the others, whoever renews again and again
        fills no disk. Nothing is forgotten for its age: a clock that is ahead for an hour would end the deployment.
        """
        folder = make_folder(self._folder / "certificates")
        older = self._recorded()
        write_file(folder / f"{certificate.serial_number:x}.pem", forms.pem(certificate))
        for path, other in older.items():
            if other.public_key() == certificate.public_key() and other != replaced:
                path.unlink(missing_ok=True)

    def _check_names_free(self, identity: Identity, hosts: Iterable[str]) -> None:
        wanted = {identity.name, *filter(is_host_name, hosts)}
        for other, certificate in self._valid():
            if other == identity:
                continue
            taken = wanted & {other.name, *forms.hosts_of(certificate)}
            if taken:
                raise InvalidInputError(
                    f"{identity} cannot have the name {min(taken)}, which the certificate of {other} has until "
                    f"{certificate.not_valid_after_utc:%Y-%m-%d}: choose another, every name is of one host"
                )

    def _observed(self, grant: Grant, host: str) -> frozenset[str]:
        """The address that a box is seen at, if nobody else has it; where the operator gave others, it may be left out."""
        for other, certificate in self._valid():
            if other != grant.identity and host in forms.hosts_of(certificate):
                if grant.hosts:
                    return frozenset()
                raise NotPermittedError(
                    f"{grant.identity} is seen at {host}, which the certificate of {other} has: if both are on one "
                    "machine, or the address changed hands, make a token that grants it, with `collapipe certs "
                    f"token ... --address {host}`"
                )
        return frozenset({host})


def _check_within(asked: forms.Request, identity: Identity, granted: frozenset[str]) -> None:
    if asked.identities not in ((), (identity.uri,)):
        raise NotPermittedError(
            f"the request asks to be {', '.join(map(repr, asked.identities))}, but may only be {identity.uri}"
        )
    allowed = forms.hosts_for(identity, granted) | forms.OF_THIS_MACHINE
    beyond = asked.hosts - allowed
    if beyond:
        raise NotPermittedError(
            f"the request asks for the host {min(beyond)!r}, but {identity} may have {', '.join(sorted(allowed))}: "
            "make a token that grants it, with `collapipe certs token ... --address HOST`"
        )


_LOST = (
    "restore the folder from a backup; if it has signed nothing yet, delete it and repeat `collapipe certs "
    "init`"
)


def _read_whole(path: Path, read: Callable[[bytes], T], remedy: str = _LOST) -> T:
    """What a file of the authority holds; raises `InvalidInputError`, which names the file."""
    with explained(path):
        data = path.read_bytes() if path.exists() else b""
    try:
        return read(data)
    except InvalidInputError as error:
        reason = error if data else "missing or empty"
        raise InvalidInputError(f"{path}: {reason}: {remedy}") from None


def _read_or_none(path: Path, read: Callable[[bytes], T]) -> T | None:
    """What a file holds; `None` where there is none, or no such thing in it."""
    with explained(path):
        data = path.read_bytes() if path.exists() else b""
    try:
        return read(data)
    except InvalidInputError:
        return None


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Holds the lock of an authority, against other threads and other processes."""
    with explained(folder):
        file = open(folder / "lock", "ab")  # noqa: SIM115
    with file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _ca_file(folder: Path) -> Path:
    return folder / "ca.pem"


def _key_file(folder: Path) -> Path:
    return folder / "ca-key.pem"
