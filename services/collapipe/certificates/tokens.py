"""Join tokens: the text that an operator carries to a box, and what the authority remembers of it."""

import base64
import binascii
import datetime
import hashlib
import secrets
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from google.protobuf.message import DecodeError

from collapipe.certificates.identity import Identity
from collapipe.certificates.private_files import explained, make_folder
from collapipe.documents import read_document, sync_directory, write_document
from collapipe.errors import InvalidInputError, NotPermittedError
from collapipe.v1.enrollment_pb2 import JoinToken

SECRET_BYTES = 32

_PREFIX = "collapipe-join-"
_CHECKSUM_BYTES = 4
_MAX_TEXT = 8192
_REMEMBERED = datetime.timedelta(days=30)
"""How long after its end a token is told from one that never was."""

_REMEDY = "make a new one with `collapipe certs token`"


def encode_token(token: JoinToken) -> str:
    """A token as text: one word that no shell and no terminal changes."""
    data = token.SerializeToString()
    text = base64.urlsafe_b64encode(data + _checksum(data)).decode().rstrip("=")
    return f"{_PREFIX}{text}"


def decode_token(text: str) -> JoinToken:
    """Reads a token.

    Raises:
        InvalidInputError: It is damaged, or none.
    """
    text = text.strip()
    if not text.startswith(_PREFIX) or len(text) > _MAX_TEXT:
        raise InvalidInputError(
            f"this is no join token, which is one word that begins with {_PREFIX}: copy it as a whole, or {_REMEDY}"
        )
    try:
        encoded = text.removeprefix(_PREFIX).encode("ascii")
        padded = encoded + b"=" * (-len(encoded) % 4)
        data = base64.b64decode(padded, altchars=b"-_", validate=True)
        content, checksum = data[:-_CHECKSUM_BYTES], data[-_CHECKSUM_BYTES:]
        if checksum != _checksum(content):
            raise ValueError("the checksum is another")
        token = JoinToken.FromString(content)
    except (ValueError, binascii.Error, DecodeError):
        raise InvalidInputError(
            f"the join token is damaged, cut off or mistyped: copy it as a whole, or {_REMEDY}"
        ) from None
    if identity_of_token(token) is None:
        raise InvalidInputError(
            f"the join token is for {token.identity!r}, which this version does not know: run the same version as "
            "whoever made it"
        )
    return token


def identity_of_token(token: JoinToken) -> Identity | None:
    """Who the box becomes; `None` for what is no identity."""
    return Identity.from_uris([token.identity])


@dataclass(frozen=True)
class Grant:
    """What the bearer of a token gets."""

    identity: Identity
    hosts: frozenset[str]
    """By which others may reach the box, besides the one that the authority sees it at."""
    expires: datetime.datetime
    lifetime: datetime.timedelta
    """Of the certificate."""


class TokenStore:
    """The tokens of an authority, each a file named by the hash of its secret; whoever changes one holds a lock.

    Args:
        folder: Where they are; made when absent.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def add(self, grant: Grant) -> bytes:
        """Makes a token; returns its secret, which is kept nowhere."""
        make_folder(self._folder)
        secret = secrets.token_bytes(SECRET_BYTES)
        document = {
            "identity": grant.identity.uri,
            "hosts": sorted(grant.hosts),
            "expires": grant.expires.isoformat(),
            "lifetime_seconds": grant.lifetime.total_seconds(),
        }
        with explained(self._folder):
            write_document(self._waiting(secret), document)
        return secret

    def is_waiting(self, secret: bytes) -> bool:
        """Whether a token is known and was not used; it may have expired."""
        return self._waiting(secret).exists()

    def find(self, secret: bytes, now: datetime.datetime) -> Grant:
        """What a token that may be used grants.

        Raises:
            NotPermittedError: It is not known, was used, or has expired.
        """
        document = read_document(self._waiting(secret))
        if document is None:
            if self._used(secret).exists():
                raise NotPermittedError(f"this join token was used before: {_REMEDY}")
            raise NotPermittedError(
                f"this join token is not of this authority, or has long expired: {_REMEDY}"
            )
        grant = _grant(document)
        if grant.expires <= now:
            raise NotPermittedError(
                f"this join token expired at {grant.expires:%Y-%m-%d %H:%M} UTC: {_REMEDY}"
            )
        return grant

    def use(self, secret: bytes) -> None:
        """Makes a token useless, for ever."""
        with explained(self._folder):
            self._waiting(secret).replace(self._used(secret))
            sync_directory(self._folder)

    def forget_old(self, now: datetime.datetime) -> None:
        """Removes what nobody asks for any more."""
        for path in self._files():
            document = read_document(path)
            if document is not None and _grant(document).expires + _REMEMBERED <= now:
                path.unlink(missing_ok=True)

    def _files(self) -> Iterable[Path]:
        return list(self._folder.glob("*.json"))

    def _waiting(self, secret: bytes) -> Path:
        return self._folder / f"{hashlib.sha256(secret).hexdigest()}.json"

    def _used(self, secret: bytes) -> Path:
        return self._folder / f"{hashlib.sha256(secret).hexdigest()}.used.json"


def _grant(document: dict[str, object]) -> Grant:
    try:
        identity = Identity.from_uris([str(document["identity"])])
        hosts = document["hosts"]
        seconds = document["lifetime_seconds"]
        if identity is None or not isinstance(hosts, list) or not isinstance(seconds, float | int):
            raise ValueError("a field has another form")
        expires = datetime.datetime.fromisoformat(str(document["expires"]))
        lifetime = datetime.timedelta(seconds=seconds)
        return Grant(identity, frozenset(map(str, hosts)), expires, lifetime)
    except (KeyError, ValueError) as error:
        raise InvalidInputError(
            f"a token in the authority's folder is damaged ({error}): delete it, and {_REMEDY}"
        ) from None


def _checksum(data: bytes) -> bytes:
    return hashlib.sha256(data).digest()[:_CHECKSUM_BYTES]
