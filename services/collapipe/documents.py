"""Small JSON documents that are replaced atomically: a reader sees the old one or the new one."""

import errno
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from collapipe.errors import CorruptDataError


def write_document(path: Path, document: dict[str, Any]) -> None:
    """Replaces a document; after the return it survives the death of the process and of the machine."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f"{path.name}.tmp")
    with naming(temporary), open(temporary, "w", encoding="utf-8") as file:
        json.dump(document, file, indent=1, sort_keys=True)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)
    sync_directory(path.parent)


def read_document(path: Path) -> dict[str, Any] | None:
    """Reads a document; `None` where there is none.

    Raises:
        CorruptDataError: The file is not what `write_document` writes.
    """
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except ValueError as error:
        raise CorruptDataError(f"{path} is damaged ({error}): restore it or delete it") from error
    if not isinstance(document, dict):
        raise CorruptDataError(f"{path} is damaged (not an object): restore it or delete it")
    return document


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Makes the error of a full disk name the file that found no room."""
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise OSError(error.errno, error.strerror, str(path)) from error


def sync_directory(directory: Path) -> None:
    """Makes renames in a directory durable."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
