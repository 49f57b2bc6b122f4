"""A text file that may grow while it is read: only what was appended is parsed again."""

import codecs
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from collapipe.errors import InvalidInputError

_BLOCK_BYTES = 1 << 20


@dataclass(frozen=True)
class Unread:
    """The lines of a file that were not accepted yet."""

    lines: Sequence[str]
    """Without line ends."""
    first_line: int
    """Number of the first of them, from 1."""
    is_first: bool
    """Nothing of the file was accepted before."""
    ends_complete: bool
    """The last line has its line end."""
    content: bytes
    """What the lines were decoded from."""
    stops: Sequence[int]
    """For each line, where in `content` it ends, line end included."""
    signature: tuple[int, ...]


class AppendedFile:
    """Reads a file from where it was last accepted.

    Reading changes nothing here; `accept` does. So a mistake in appended lines loses nothing: they
    are read again once the file has been corrected. Lines that were accepted must stay as they are,
    because trained rows are named by position.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        self._num_bytes = 0
        self._num_lines = 0
        self._digest = hashlib.sha256()
        self._line_is_open = False
        self._signature: tuple[int, ...] = ()

    def has_changed(self) -> bool:
        """Whether size or time of change differ from the last accepted reading; one `stat`."""
        return self._stat() != self._signature

    def read(self) -> Unread:
        """Reads the lines after the accepted ones.

        A last line without line end counts as complete at the first reading. Later it is
        half-written, and left out.
        """
        signature = self._stat()
        content = self._read_tail()
        is_first = self._num_lines == 0
        start = self._open_line_end(content)
        pieces = content[start:].split(b"\n")
        ends_complete = pieces[-1] == b"" or not is_first
        if ends_complete:
            pieces.pop()
        stops, stop = [], start
        for piece in pieces:
            stop = min(stop + len(piece) + 1, len(content))
            stops.append(stop)
        lines = [
            self._decode(piece, self._num_lines + index + 1) for index, piece in enumerate(pieces)
        ]
        return Unread(
            lines, self._num_lines + 1, is_first, ends_complete, content, stops, signature
        )

    def accept(self, unread: Unread, num_lines: int) -> None:
        """Goes on after the first `num_lines` of what was read."""
        self._signature = unread.signature
        if num_lines == 0:
            return
        stop = unread.stops[num_lines - 1]
        self._digest.update(unread.content[:stop])
        self._num_bytes += stop
        self._num_lines += num_lines
        self._line_is_open = not unread.ends_complete and num_lines == len(unread.lines)

    def _stat(self) -> tuple[int, ...]:
        try:
            stat = Path(self.path).stat()
        except OSError as error:
            raise self._unreadable(error) from error
        return stat.st_size, stat.st_mtime_ns, stat.st_ino

    def _read_tail(self) -> bytes:
        """Returns the bytes after the accepted ones; refuses a file in which those changed."""
        digest = hashlib.sha256()
        remaining = self._num_bytes
        try:
            with Path(self.path).open("rb") as file:
                while remaining and (block := file.read(min(_BLOCK_BYTES, remaining))):
                    digest.update(block)
                    remaining -= len(block)
                tail = file.read()
        except OSError as error:
            raise self._unreadable(error) from error
        if digest.digest() != self._digest.digest():
            raise InvalidInputError(
                f"{self.path}: its first {self._num_lines} lines ({self._num_bytes} bytes) "
                "changed since they were read, but rows in use may not change: restore them and "
                "append new rows at the end, or start a new job"
            )
        return tail

    def _open_line_end(self, content: bytes) -> int:
        """Skips the line end of an accepted line that had none: where the next line starts."""
        if not (self._line_is_open and content):
            return 0
        for line_end in (b"\n", b"\r\n"):
            if content.startswith(line_end):
                return len(line_end)
        raise InvalidInputError(
            f"{self.path}:{self._num_lines}: the line was the last, without line end, when it was "
            "read, and was continued since: restore it, and put a line end after it before new "
            "rows"
        )

    def _decode(self, piece: bytes, line: int) -> str:
        if line == 1:
            piece = piece.removeprefix(codecs.BOM_UTF8)
        try:
            return piece.removesuffix(b"\r").decode()
        except UnicodeDecodeError as error:
            raise InvalidInputError(
                f"{self.path}:{line}: byte 0x{piece[error.start]:02x} at position "
                f"{error.start + 1} of the line is not UTF-8: convert the file, for example with "
                "`iconv -f latin1 -t utf-8`"
            ) from error

    def _unreadable(self, error: OSError) -> InvalidInputError:
        return InvalidInputError(
            f"{self.path}: cannot be read: {error.strerror}; a relative path starts at the "
            f"directory in which the control unit runs ({Path.cwd()})"
        )
