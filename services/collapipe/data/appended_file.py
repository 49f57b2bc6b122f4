"""A text file that may grow while a job uses it. Only the appended lines are read again."""

import codecs
import hashlib
import os
from collections.abc import Sequence
from dataclasses import dataclass

from collapipe.data.data_files import MOST_CHARACTERS, DataFile, check_memory
from collapipe.errors import InvalidInputError

_BLOCK_BYTES = 1 << 20
_OTHER_FORMATS = {
    b"\x1f\x8b": "is compressed: unpack it with gunzip",
    b"PK\x03\x04": "is a ZIP archive or a workbook: unpack it, or save it as CSV",
    b"PAR1": "is a Parquet file: name it .parquet",
    codecs.BOM_UTF16_LE: "is in UTF-16: convert it with `iconv -f utf-16 -t utf-8`",
    codecs.BOM_UTF16_BE: "is in UTF-16: convert it with `iconv -f utf-16 -t utf-8`",
}
"""By their first bytes: files that are no text in UTF-8, and the remedy."""


@dataclass(frozen=True)
class Unread:
    """The lines of a file that are not accepted yet."""

    lines: Sequence[str]
    """Without line ends."""
    first_line: int
    """Number of the first of these lines, from 1."""
    is_first: bool
    """Whether no line of the file was accepted before."""
    ends_complete: bool
    """Whether the last line has a line end."""
    content: bytes
    stops: Sequence[int]
    """For each line, the position in `content` after its line end."""
    signature: tuple[int, ...]
    """Size, time of change and inode of the file before it was read."""


class AppendedFile:
    """Reads the lines of a file after the accepted ones.

    Only `accept` changes the state, so appended lines with a mistake are read again after its correction.
    Accepted lines must not change, because a row is identified by its position.
    """

    def __init__(self, file: DataFile) -> None:
        self.path = file.name
        self._file = file
        self._num_bytes = 0
        self._num_lines = 0
        self._digest = hashlib.sha256()
        self._line_is_open = False
        self._signature: tuple[int, ...] = ()

    def has_changed(self) -> bool:
        """Returns whether the file has changed since the last accepted reading; one `stat` call."""
        return self._stat() != self._signature

    def read(self) -> Unread:
        """Reads the lines after the accepted ones.

        At the first reading, a last line without a line end counts as complete. Later it counts as
        half-written, and is left out.
        """
        signature = self._stat()
        content = self._read_tail()
        is_first = self._num_lines == 0
        start = self._open_line_end(content)
        check_memory(self.path, len(content), content.count(b"\n"), is_read=True)
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
        if is_first and len(lines) == 1:
            self._refuse_carriage_returns(lines[0])
        return Unread(
            lines, self._num_lines + 1, is_first, ends_complete, content, stops, signature
        )

    def accept(self, unread: Unread, num_lines: int) -> None:
        """Marks the first `num_lines` of the unread lines as accepted."""
        self._signature = unread.signature
        if num_lines == 0:
            return
        stop = unread.stops[num_lines - 1]
        self._digest.update(unread.content[:stop])
        self._num_bytes += stop
        self._num_lines += num_lines
        self._line_is_open = not unread.ends_complete and num_lines == len(unread.lines)

    def _stat(self) -> tuple[int, ...]:
        stat = self._file.stat()
        return stat.st_size, stat.st_mtime_ns, stat.st_ino

    def _read_tail(self) -> bytes:
        """Returns the bytes after the accepted ones, up to the size that the file has now.

        Raises:
            InvalidInputError: The accepted bytes have changed, or there are too many others.
        """
        digest = hashlib.sha256()
        remaining = self._num_bytes
        with self._file.open() as file:
            num_new = max(0, os.fstat(file.fileno()).st_size - remaining)
            check_memory(self.path, num_new)
            try:
                while remaining and (block := file.read(min(_BLOCK_BYTES, remaining))):
                    digest.update(block)
                    remaining -= len(block)
                tail = file.read(num_new)
            except OSError as error:  # The disk may be damaged.
                raise self._file.unreadable(error) from error
        if digest.digest() != self._digest.digest():
            raise InvalidInputError(
                f"{self.path}: its first {self._num_lines} lines ({self._num_bytes} bytes) "
                "have changed since they were read, but the job uses their rows: restore them and "
                "append new rows at the end, or start a new job"
            )
        return tail

    def _open_line_end(self, content: bytes) -> int:
        """Returns where the next line starts. The last accepted line may get its line end only now."""
        if not (self._line_is_open and content):
            return 0
        for line_end in (b"\n", b"\r\n"):
            if content.startswith(line_end):
                return len(line_end)
        raise InvalidInputError(
            f"{self.path}:{self._num_lines}: the line was the last, without line end, when it was "
            "read, and has been continued since: restore it, and put a line end before new rows"
        )

    def _decode(self, piece: bytes, line: int) -> str:
        if len(piece) > MOST_CHARACTERS:
            raise InvalidInputError(
                f"{self.path}:{line}: has {len(piece)} bytes in one line, but at most {MOST_CHARACTERS} are read: divide it"
            )
        if line == 1:
            piece = piece.removeprefix(codecs.BOM_UTF8)
            for start, remedy in _OTHER_FORMATS.items():
                if piece.startswith(start):
                    raise InvalidInputError(f"{self.path}:1: {remedy}")
        if (position := piece.find(b"\0") + 1) > 0:
            raise InvalidInputError(
                f"{self.path}:{line}: has a NUL byte at position {position} of the line, which no text has: write the file again, or "
                "convert it, for example with `iconv -f utf-16 -t utf-8`"
            )
        try:
            return piece.removesuffix(b"\r").decode()
        except UnicodeDecodeError as error:
            raise InvalidInputError(
                f"{self.path}:{line}: byte 0x{piece[error.start]:02x} at position "
                f"{error.start + 1} of the line is not UTF-8: convert the file, for example with "
                "`iconv -f cp1252 -t utf-8 OLD > NEW` if it comes from Windows"
            ) from error

    def _refuse_carriage_returns(self, line: str) -> None:
        """Refuses the line ends of old Macs, with which the file is a single line."""
        if num_ends := line.removesuffix("\r").count("\r"):
            raise InvalidInputError(
                f"{self.path}:1: has {num_ends} line ends that are a carriage return alone: convert the file, for example with "
                r"`tr '\r' '\n'`"
            )
