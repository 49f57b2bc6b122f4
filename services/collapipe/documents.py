"""Small JSON documents that are replaced atomically, so that a reader sees the old one or the new one."""

import errno
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from collapipe.errors import CorruptDataError


def write_document(path: Path, document: dict[str, Any]) -> None:
    """Replaces a document. On return, the new one survives a crash of the process or of the machine."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f"{path.name}.tmp")
    with name_full_disk(temporary), open(temporary, "w", encoding="utf-8") as file:
        json.dump(document, file, indent=1, sort_keys=True)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)
    sync_directory(path.parent)


def read_document(path: Path) -> dict[str, Any] | None:
    """Reads a document; returns `None` if there is no file.

    Raises:
        CorruptDataError: The file is not a JSON object.
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
def name_full_disk(path: Path) -> Iterator[None]:
    """Adds the path of the file to the error about a full disk."""
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise OSError(error.errno, error.strerror, str(path)) from error


def sync_directory(directory: Path) -> None:
    """Makes earlier renames in a directory survive a crash of the machine."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
