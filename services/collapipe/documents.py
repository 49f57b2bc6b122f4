"""Small JSON documents that are replaced atomically, so that a reader sees the old one or the new one.

Files of somebody else are opened here, too.
"""

import errno
import fcntl
import json
import os
import pwd
import stat
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

from collapipe.errors import CorruptDataError, InvalidInputError, WrongStateError

_POLL_SECONDS = 0.1


def write_document(path: Path, document: dict[str, Any]) -> None:
    """Replaces a document. On return, the new one survives a crash of the process or of the machine."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f"{path.name}.tmp")
    with name_full_disk(temporary), open(temporary, "w", encoding="utf-8", opener=_open) as file:
        file.write(json.dumps(document, indent=2, sort_keys=True) + "\n")
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)
    sync_directory(path.parent)


def _open(path: str, flags: int) -> int:
    """Opens a file, but follows no link, which the owner of the folder could have made while this process is root."""
    return os.open(path, flags | os.O_NOFOLLOW, 0o666)


def decode_json(text: str | bytes, **options: Any) -> Any:
    """Does what `json.loads` does, for text that somebody else wrote.

    Raises:
        ValueError: It is not JSON, or nested more deeply than Python can read.
    """
    try:
        return json.loads(text, **options)
    except RecursionError:
        raise ValueError(
            f"its {len(text)} characters or bytes are nested too deeply: use at most 100 levels"
        ) from None


def open_regular(path: Path, name: str = "") -> BinaryIO:
    """Opens a file that somebody else may replace at any moment.

    Args:
        name: What the error calls it, if not by its path.

    Raises:
        InvalidInputError: It is a pipe or a device, which may have no end, or a folder.
        OSError: It cannot be opened.
    """
    irregular = InvalidInputError(
        f"{name or path}: is no regular file, but a pipe, a device or a folder: copy its content to a file"
    )
    if not stat.S_ISREG(path.stat().st_mode):
        raise irregular
    # It may have become a pipe since, and must not be waited for. So what was opened is checked.
    file = os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb")
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise irregular
    return file


def read_document(
    path: Path,
    remedy: str = "restore it or delete it",
    types: Mapping[str, type] | None = None,
) -> dict[str, Any] | None:
    """Reads a document; returns `None` if there is no file.

    Args:
        remedy: What to do if the file is damaged.
        types: The types of the keys that it must have.

    Raises:
        CorruptDataError: The file cannot be read, or is not a JSON object with these keys.
    """
    try:
        document = decode_json(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except OSError as error:
        raise CorruptDataError(
            f"{path} cannot be read ({error.strerror or error}): mend its permissions or its disk"
        ) from error
    except ValueError as error:
        raise CorruptDataError(f"{path} is damaged ({error}): {remedy}") from error
    if not isinstance(document, dict):
        raise CorruptDataError(f"{path} is damaged (not an object): {remedy}")
    for key, expected in (types or {}).items():
        if not isinstance(document.get(key), expected):
            raise CorruptDataError(
                f"{path} is damaged ({key} is {document.get(key)!r:.80}): {remedy}"
            )
    return document


def keep_older(path: Path) -> None:
    """Renames a document that an older version wrote, after its content was stored elsewhere, so that it is not read again."""
    path.replace(path.with_name(f"{path.name}.migrated"))


def hold_directory(directory: Path | None, wait_seconds: float = 10.0) -> ExitStack:
    """Keeps other processes from using a directory, until the result is closed or this process ends.

    Args:
        directory: Made if it does not exist. With `None`, nothing is held.
        wait_seconds: How long to wait for another process, which may be about to end.

    Raises:
        WrongStateError: Another process still uses the directory.
    """
    held = ExitStack()
    if directory is None:
        return held
    directory.mkdir(parents=True, exist_ok=True)
    file = open(directory / "lock", "a+", encoding="utf-8")  # noqa: SIM115  # `held` closes it.
    held.callback(file.close)
    deadline = time.monotonic() + wait_seconds
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        except BlockingIOError:
            if time.monotonic() > deadline:
                file.seek(0)
                raise WrongStateError(
                    f"--state-dir {directory} is in use by process {file.read() or 'unknown'}: end it, or give each service "
                    "a directory of its own"
                ) from None
            time.sleep(_POLL_SECONDS)
    # Only the text of the error needs the number, and the disk may be full.
    with suppress(OSError):
        file.truncate(0)
        file.write(str(os.getpid()))
        file.flush()
    return held


def no_permission(path: object, error: OSError) -> str:
    """Says which user may not use a file or folder, and what to do."""
    is_home = str(path).startswith(("/home/", "/root/"))
    hidden = "; systemd hides home folders from services of the system" if is_home else ""
    return (
        f"{path} cannot be used by the user {user_name()} ({error.strerror or error}{hidden}): give that user access with chown or "
        "chmod, or choose another folder"
    )


def user_name() -> str:
    """Returns the name of the user of this process, or its number if it has none, as in a container."""
    try:
        return pwd.getpwuid(os.geteuid()).pw_name
    except KeyError:
        return str(os.geteuid())


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
