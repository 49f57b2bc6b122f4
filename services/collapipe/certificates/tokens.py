"""Join tokens: the text that an operator takes to a box, and the files in which an authority keeps tokens."""

import base64
import binascii
import datetime
import hashlib
import secrets
from pathlib import Path
from typing import Annotated, Any

from google.protobuf.message import DecodeError
from pydantic import AwareDatetime, BaseModel, PlainSerializer, PlainValidator, ValidationError

from collapipe.certificates.identity import Identity
from collapipe.certificates.private_files import file_errors, files_in
from collapipe.documents import read_document, sync_directory, write_document
from collapipe.errors import InvalidInputError, NotPermittedError
from collapipe.v1.enrollment_pb2 import JoinToken

SECRET_BYTES = 32

_PREFIX = "collapipe-join-"
_CHECKSUM_BYTES = 4
_MAX_TEXT = 8192
_REMEMBERED = datetime.timedelta(days=30)
"""How long an authority can report a token as expired. Later it only reports the token as unknown."""

_REMEDY = "make a new one with `collapipe certs token`"


def encode_token(token: JoinToken) -> str:
    """Returns a token as one word without characters that a shell changes."""
    data = token.SerializeToString()
    text = base64.urlsafe_b64encode(data + _checksum(data)).decode().rstrip("=")
    return f"{_PREFIX}{text}"


def decode_token(text: str) -> tuple[JoinToken, Identity]:
    """Reads a token, and the identity that it is for.

    Raises:
        InvalidInputError: The text is no token, or a damaged one.
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
            raise ValueError("wrong checksum")
        token = JoinToken.FromString(content)
    except (ValueError, binascii.Error, DecodeError):
        raise InvalidInputError(
            f"the join token is damaged, cut off or mistyped: copy it as a whole, or {_REMEDY}"
        ) from None
    identity = Identity.from_uris([token.identity])
    if identity is None:
        raise InvalidInputError(
            f"the join token is for {token.identity!r}, which this version does not know: run the version of CollaPipe "
            "that made the token"
        )
    return token, identity


def _read_identity(value: Any) -> Identity:
    identity = value if isinstance(value, Identity) else Identity.from_uris([str(value)])
    if identity is None:
        raise ValueError(f"{value!r} is no identity")
    return identity


class Grant(BaseModel, frozen=True):
    """The rights that a token gives, stored as a JSON document."""

    identity: Annotated[
        Identity, PlainValidator(_read_identity), PlainSerializer(lambda identity: identity.uri)
    ]
    hosts: Annotated[frozenset[str], PlainSerializer(sorted)]
    """Host names and IP addresses of the box, besides the address from which it calls the authority."""
    expires: AwareDatetime
    """When the token, not the certificate, expires."""
    lifetime_seconds: float
    """Lifetime of the certificate."""


class TokenStore:
    """The tokens of an authority, each in a file named by the hash of its secret.

    Callers must hold the lock of the authority, except for `is_unused`.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def add(self, grant: Grant) -> bytes:
        """Creates a token and returns its secret, which is not stored."""
        secret = secrets.token_bytes(SECRET_BYTES)
        with file_errors(self._folder):
            write_document(self._unused_file(secret), grant.model_dump(mode="json"))
        return secret

    def is_unused(self, secret: bytes) -> bool:
        """Returns whether a token exists and is unused. An expired token counts, too."""
        return self._unused_file(secret).exists()

    def find(self, secret: bytes, now: datetime.datetime) -> Grant:
        """Returns the grant of a token.

        Raises:
            NotPermittedError: The token is unknown, was used, or has expired.
        """
        grant = _read_grant(self._unused_file(secret))
        if grant is None:
            if self._used_file(secret).exists():
                raise NotPermittedError(f"this join token was used before: {_REMEDY}")
            raise NotPermittedError(
                f"this join token is not of this authority, or expired long ago: {_REMEDY}"
            )
        if grant.expires <= now:
            raise NotPermittedError(
                f"this join token expired at {grant.expires:%Y-%m-%d %H:%M} UTC: {_REMEDY}"
            )
        return grant

    def use(self, secret: bytes) -> None:
        """Makes a token useless."""
        with file_errors(self._folder):
            self._unused_file(secret).replace(self._used_file(secret))
            sync_directory(self._folder)

    def delete_of(self, identity: Identity) -> int:
        """Deletes the tokens of a holder, and returns their number."""
        number = 0
        for path in files_in(self._folder, ".json"):
            grant = _read_grant(path)
            if grant is not None and grant.identity.is_same_holder(identity):
                path.unlink(missing_ok=True)
                number += 1
        return number

    def delete_all(self) -> None:
        """Deletes all tokens, used or not."""
        for path in files_in(self._folder, ".json"):
            path.unlink(missing_ok=True)

    def delete_old(self, now: datetime.datetime) -> None:
        """Deletes tokens that expired a month ago, used or not."""
        for path in files_in(self._folder, ".json"):
            grant = _read_grant(path)
            if grant is not None and grant.expires + _REMEMBERED <= now:
                path.unlink(missing_ok=True)

    def _unused_file(self, secret: bytes) -> Path:
        return self._folder / f"{hashlib.sha256(secret).hexdigest()}.json"

    def _used_file(self, secret: bytes) -> Path:
        return self._folder / f"{hashlib.sha256(secret).hexdigest()}.used.json"


def _read_grant(path: Path) -> Grant | None:
    """Returns the grant in a file; `None` if there is no file."""
    document = read_document(path)
    try:
        return None if document is None else Grant.model_validate(document)
    except ValidationError as error:
        raise InvalidInputError(
            f"the token in {path} is damaged ({error}): delete it, and {_REMEDY}"
        ) from None


def _checksum(data: bytes) -> bytes:
    return hashlib.sha256(data).digest()[:_CHECKSUM_BYTES]
