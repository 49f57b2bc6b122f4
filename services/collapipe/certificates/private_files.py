"""Writes files of keys and certificates atomically with the right permissions, and reads them."""

import errno
import os
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TypeVar

from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec

from collapipe.certificates import pki
from collapipe.certificates.pki import Chain
from collapipe.documents import name_full_disk, no_permission, sync_directory
from collapipe.errors import InvalidInputError, NotPermittedError

T = TypeVar("T")

PASSPHRASE_VARIABLE = "COLLAPIPE_AUTHORITY_PASSPHRASE"
"""The environment variable with the passphrase of both keys of an authority. Without it, they are not encrypted."""

OWNER_ONLY = 0o600
EVERYBODY_READS = 0o644


def write_file(path: Path, data: bytes, mode: int = EVERYBODY_READS) -> None:
    """Replaces a file atomically and durably.

    Raises:
        InvalidInputError: The file cannot be written.
    """
    with file_errors(path):
        replace_file(path, data, mode)


def replace_file(path: Path, data: bytes, mode: int) -> None:
    """Does the same as `write_file`; raises `OSError`.

    Unlike `collapipe.documents`, this sets the permissions before it writes. Several processes may write at a
    time.
    """
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
    try:
        with name_full_disk(path):
            descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
            with open(descriptor, "wb") as file:
                os.fchmod(descriptor, mode)  # The umask may have removed permissions.
                file.write(data)
                file.flush()
                os.fsync(descriptor)
        os.replace(temporary, path)
        sync_directory(path.parent)
    finally:
        temporary.unlink(missing_ok=True)


def make_folder(path: Path) -> None:
    """Creates a folder if it does not exist. Raises `InvalidInputError` if that is not possible."""
    with file_errors(path):
        path.mkdir(parents=True, exist_ok=True)


def files_in(folder: Path, suffix: str) -> list[Path]:
    """Returns the files of a folder with a suffix; none if there is no folder. Unlike `Path.glob`, it names a folder that it cannot read."""
    with file_errors(folder), suppress(FileNotFoundError):
        return sorted(folder / name for name in os.listdir(folder) if name.endswith(suffix))
    return []


def read_required(path: Path, parse: Callable[[bytes], T], remedy: str) -> T:
    """Returns the parsed content of a file.

    Raises:
        InvalidInputError: The file is missing or damaged. The message ends with the remedy.
    """
    data = _read(path)
    try:
        return parse(data)
    except InvalidInputError as error:
        reason = error if data else "missing or empty"
        raise InvalidInputError(f"{path}: {reason}: {remedy}") from None


def read_if_valid(path: Path, parse: Callable[[bytes], T]) -> T | None:
    """Returns the parsed content of a file; `None` if the file is missing or damaged."""
    data = _read(path)
    try:
        return parse(data)
    except InvalidInputError:
        return None


def read_chain_of_key(folder: Path, root: x509.Certificate) -> Chain | None:
    """Returns `cert.pem` of a folder if it fits `key.pem` there and ends at the root; else `None`. It may have expired."""
    key = read_if_valid(folder / "key.pem", pki.read_key)
    chain = read_if_valid(folder / "cert.pem", pki.read_chain)
    if key is None or chain is None or not pki.is_of_key(chain.certificate, key.public_key()):
        return None
    try:
        chain.check(root, chain.certificate.not_valid_before_utc)
    except NotPermittedError:
        return None
    return chain


def passphrase_of_environment() -> bytes:
    """Returns the passphrase of the keys of an authority; empty if the environment has none."""
    return os.environ.get(PASSPHRASE_VARIABLE, "").encode()


def read_authority_key(pem: bytes, passphrase: bytes) -> ec.EllipticCurvePrivateKey:
    """Reads the key of an authority; raises `InvalidInputError`. A passphrase does not matter if the key is not encrypted."""
    is_encrypted = b"ENCRYPTED" in pem
    if is_encrypted and not passphrase:
        raise InvalidInputError(
            f"the key is encrypted: set {PASSPHRASE_VARIABLE} to its passphrase. Only if you have lost that"
        )
    return pki.read_key(pem, passphrase if is_encrypted else b"")


def _read(path: Path) -> bytes:
    with file_errors(path):
        return path.read_bytes() if path.exists() else b""


@contextmanager
def file_errors(path: Path) -> Iterator[None]:
    """Turns an error of the file system into an `InvalidInputError` that names the path and a remedy."""
    try:
        yield
    except OSError as error:
        if isinstance(error, PermissionError):
            raise InvalidInputError(no_permission(path, error)) from error
        is_full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        remedy = "free space there" if is_full else "check its path and its disk"
        raise InvalidInputError(
            f"{path} cannot be used ({error.strerror or error}): choose another folder, or {remedy}"
        ) from error
