"""The data files of a job: how they are opened, and how much memory reading them may take."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import psutil

from collapipe.documents import no_permission, open_regular
from collapipe.errors import InvalidInputError, NotPermittedError

MOST_CHARACTERS = 1 << 22
"""Longest line in bytes, and longest text of a row in characters. While a text is encoded, a character takes up to 220 bytes."""
_BYTES_OF_A_ROW = 1000
"""Memory of a row beside its text."""
_BYTES_OF_A_BYTE = 4
"""Memory of a byte of a file of lines: as it is in the file, as a line, as a text, and as tokens."""
_LEAST_FREE_SHARE, _LEAST_FREE_BYTES = 0.05, 1 << 28
"""Memory that rows must leave free: this part of all, or so many bytes if they are less."""


@dataclass(frozen=True)
class DataFile:
    """A file or folder that a job or a client names.

    Args:
        name: What messages call it.
        path: Where it is.
        folders: Folders of which one must hold it, after symbolic links are followed. Empty for any place.
    """

    name: str
    path: Path
    folders: Sequence[Path] = ()

    def stat(self) -> os.stat_result:
        """Raises `InvalidInputError` if there is no such file."""
        try:
            return self.path.stat()
        except (OSError, ValueError) as error:  # A name with NUL is no `OSError`.
            raise self.unreadable(error) from error

    def open(self) -> BinaryIO:
        """Opens the file.

        Raises:
            InvalidInputError: It cannot be read. A pipe or a device, which may have no end, is refused.
            NotPermittedError: It is in none of the folders.
        """
        try:
            file = open_regular(self.path, self.name)
        except (OSError, ValueError) as error:  # A name with NUL is no `OSError`.
            raise self.unreadable(error) from error
        try:
            # A symbolic link may have changed since the job was checked, so what was opened is checked.
            if self.folders:
                self.check_place(Path(os.readlink(f"/proc/self/fd/{file.fileno()}")))
        except BaseException:
            file.close()
            raise
        return file

    def check_place(self, place: Path) -> None:
        """Raises `NotPermittedError` if a path without symbolic links is in none of the folders."""
        folders = [folder.resolve() for folder in self.folders]
        if folders and not any(place.is_relative_to(folder) for folder in folders):
            raise NotPermittedError(
                f"{self.name} is a link to {place}, but on this host jobs may only read files in {' and '.join(map(str, folders))}: "
                "move the file there"
            )

    def unreadable(self, error: OSError | ValueError) -> InvalidInputError:
        """Returns the error that says why the file cannot be read."""
        if isinstance(error, PermissionError):
            return InvalidInputError(f"{self.name:.200}: {no_permission(self.path, error)}")
        reason = error.strerror if isinstance(error, OSError) else error
        start = self.folders[0] if self.folders else Path.cwd()
        return InvalidInputError(
            f"{self.name:.200}: cannot be read: {reason}; on this host a relative path starts at {start}"
        )


def check_memory(
    place: str, num_bytes: int = 0, num_rows: int = 0, *, is_read: bool = False
) -> None:
    """Refuses rows that this process has no memory for.

    Args:
        place: The file, or the file and line, for the message.
        num_bytes: Bytes of lines of which rows are going to be made.
        is_read: Whether these bytes are in memory, and so no longer free.

    Raises:
        InvalidInputError: Too little memory is left, or would be.
    """
    free, total = memory()
    needed = (_BYTES_OF_A_BYTE - is_read) * num_bytes + _BYTES_OF_A_ROW * num_rows
    if free - needed < min(_LEAST_FREE_SHARE * total, _LEAST_FREE_BYTES):
        what = (
            f"{num_bytes:,} bytes in {num_rows:,} lines need about {needed / 1e6:,.0f} MB of memory"
        )
        raise InvalidInputError(
            f"{place}: its {what if needed else 'rows need too much memory'}, and {free / 1e6:,.0f} MB of {total / 1e6:,.0f} MB are "
            "free: give the job fewer rows, or end other programs on this host"
        )


def memory(root: Path = Path("/sys/fs/cgroup")) -> tuple[int, int]:
    """Returns the bytes of memory that are free, and all, of this machine or of the container that limits this process."""
    machine = psutil.virtual_memory()
    try:
        limit = int((root / "memory.max").read_text())
        used = int((root / "memory.current").read_text())
        kept = dict(line.split() for line in (root / "memory.stat").read_text().splitlines())
    except (OSError, ValueError):  # There is no limit.
        return machine.available, machine.total
    # The kernel takes back what it keeps of files.
    free = limit - used + int(kept["inactive_file"]) + int(kept["active_file"])
    return min(free, machine.available), min(limit, machine.total)
