"""Files that are replaced atomically, with the right permissions from their first byte on."""

import errno
import os
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from collapipe.documents import sync_directory
from collapipe.errors import InvalidInputError

OWNER_ONLY = 0o600
EVERYBODY_READS = 0o644


def write_file(path: Path, data: bytes, mode: int = EVERYBODY_READS) -> None:
    """Replaces a file; a reader sees the old one or the new one, whatever dies meanwhile.

    Raises:
        InvalidInputError: It cannot be written.
    """
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
    with explained(path):
        try:
            descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
            with open(descriptor, "wb") as file:
                os.fchmod(descriptor, mode)  # whatever the umask
                file.write(data)
                file.flush()
                os.fsync(descriptor)
            os.replace(temporary, path)
            sync_directory(path.parent)
        finally:
            temporary.unlink(missing_ok=True)


def make_folder(path: Path) -> Path:
    """Makes a folder unless it is there; raises `InvalidInputError`."""
    with explained(path):
        path.mkdir(parents=True, exist_ok=True)
    return path


@contextmanager
def explained(path: Path) -> Iterator[None]:
    """Makes an error of the file system one that an operator understands."""
    try:
        yield
    except OSError as error:
        is_full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        remedy = "free space there" if is_full else "run this as the user who owns it"
        raise InvalidInputError(
            f"{path} cannot be used ({error.strerror or error}): choose another folder, or {remedy}"
        ) from error
