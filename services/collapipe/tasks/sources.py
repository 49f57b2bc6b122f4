"""Sources of rows: files of four formats, and fixed lists.

A source is read and then accepted. The caller accepts what it read only if all rows are usable. Otherwise the
next reading returns the same rows again, so a mistake in appended rows loses nothing.
"""

import json
import logging
from abc import ABC, abstractmethod
from collections.abc import Sequence
from itertools import zip_longest
from pathlib import Path

from collapipe.errors import InvalidInputError
from collapipe.job import DataConfig
from collapipe.tasks.appended_file import AppendedFile, Unread
from collapipe.tasks.rows import Row, TaggedRow, check_iob2, check_text, make_row

_log = logging.getLogger(__name__)


class RowSource(ABC):
    """Rows in a fixed order, to which more may be appended."""

    name: str

    @abstractmethod
    def read(self) -> list[Row]:
        """Returns the rows after the accepted ones; cheap if there are none.

        Raises:
            InvalidInputError: A row is wrong.
        """

    @abstractmethod
    def accept(self) -> None:
        """Marks the rows of the last reading as accepted."""


class FixedRows(RowSource):
    """Rows to which none are appended."""

    def __init__(self, name: str, rows: Sequence[Row]) -> None:
        self.name = name
        self._rows = list(rows)

    def read(self) -> list[Row]:
        return self._rows

    def accept(self) -> None:
        self._rows = []


class FileRows(RowSource):
    """Rows of one or more text files, which are read line by line.

    Args:
        stored: Where the files are, if not at their paths.
    """

    def __init__(self, *paths: str, stored: Sequence[Path] = ()) -> None:
        self.name = ",".join(paths)
        self._files = [AppendedFile(path, place) for path, place in zip_longest(paths, stored)]
        self._pending: tuple[list[Unread], int] | None = None

    def read(self) -> list[Row]:
        self._pending = None
        if not any(file.has_changed() for file in self._files):
            return []
        unread = [file.read() for file in self._files]
        rows, num_lines = self._parse(*unread)
        self._pending = unread, num_lines
        return rows

    def accept(self) -> None:
        if self._pending is not None:
            unread, num_lines = self._pending
            for file, lines in zip(self._files, unread, strict=True):
                file.accept(lines, num_lines)

    @abstractmethod
    def _parse(self, *unread: Unread) -> tuple[list[Row], int]:
        """Converts the unread lines of each file to rows; also returns the number of lines that it used."""


class JsonLinesFile(FileRows):
    """A file with one JSON object in each line; blank lines do not count."""

    def __init__(self, path: str, kind: str, data: DataConfig, stored: Sequence[Path] = ()) -> None:
        super().__init__(path, stored=stored)
        self._kind, self._data = kind, data

    def _parse(self, *unread: Unread) -> tuple[list[Row], int]:
        [lines] = unread
        rows: list[Row] = []
        for index, text in enumerate(lines.lines):
            line = lines.first_line + index
            if not text.strip():
                continue
            try:
                record = json.loads(text)
            except ValueError as error:
                if rows and index == len(lines.lines) - 1 and not lines.ends_complete:
                    _log.warning(
                        "%s:%d: the line is half-written: it is read in a later round",
                        self.name,
                        line,
                    )
                    return rows, index
                raise InvalidInputError(
                    f"{self.name}:{line}: is not JSON ({error}): {text!r:.80}; write one object in each line"
                ) from error
            if not isinstance(record, dict):
                raise InvalidInputError(
                    f"{self.name}:{line}: is {text!r:.80}, not a JSON object: write one object in each line, "
                    'such as {"text": "...", "label": "..."}'
                )
            rows.append(make_row(record, self._kind, self._data, self.name, line))
        return rows, len(lines.lines)


class ConllFile(FileRows):
    """A file with `token<TAB or space>tag` in each line, and a blank line after each sentence.

    At the first reading, the last sentence of the file needs no blank line. Later, a last sentence without a
    blank line counts as half-written.
    """

    def __init__(self, path: str, stored: Sequence[Path] = ()) -> None:
        super().__init__(path, stored=stored)
        self._sentence_is_open = False

    def accept(self) -> None:
        super().accept()
        if self._pending is not None and self._pending[1] > 0:
            [lines], num_lines = self._pending
            self._sentence_is_open = bool(lines.lines[num_lines - 1].strip())

    def _parse(self, *unread: Unread) -> tuple[list[Row], int]:
        [lines] = unread
        if self._sentence_is_open and lines.lines and lines.lines[0].strip():
            raise InvalidInputError(
                f"{self.name}:{lines.first_line}: continues the sentence that was the last of the file when it was "
                "read: put a blank line between them"
            )
        rows: list[Row] = []
        start = 0
        for index, text in enumerate(lines.lines):
            if not text.strip():
                rows += self._sentence(lines, start, index)
                start = index + 1
        if lines.is_first:
            rows += self._sentence(lines, start, len(lines.lines))
            start = len(lines.lines)
        return rows, start

    def _sentence(self, lines: Unread, start: int, stop: int) -> list[Row]:
        """Returns the sentence in lines `start` to `stop`, or an empty list if there are no lines."""
        first_line = lines.first_line + start
        words, tags = [], []
        for line, text in enumerate(lines.lines[start:stop], start=first_line):
            columns = text.split("\t") if "\t" in text else text.split()
            if len(columns) != 2:
                raise InvalidInputError(
                    f"{self.name}:{line}: has {len(columns)} columns {columns!r:.80}, but needs 2: a token and its "
                    "tag, separated by a tab or spaces"
                )
            words.append(check_text(columns[0], "the token", f"{self.name}:{line}"))
            tags.append(columns[1].strip())
        if not words:
            return []
        check_iob2(tags, lambda index: f"{self.name}:{first_line + index}")
        return [TaggedRow(self.name, first_line, (" ".join(words),), tuple(tags), tuple(words))]


class TextFile(FileRows):
    """A file with one text in each line."""

    def _parse(self, *unread: Unread) -> tuple[list[Row], int]:
        [lines] = unread
        rows = [
            Row(self.name, line, (text,), ())
            for line, text in enumerate(lines.lines, start=lines.first_line)
        ]
        return rows, len(rows)


class ParallelFiles(FileRows):
    """Two text files: line i of the second one is the translation of line i of the first one."""

    def _parse(self, *unread: Unread) -> tuple[list[Row], int]:
        source, target = unread
        source_path, target_path = (file.path for file in self._files)
        lengths = len(source.lines), len(target.lines)
        if source.is_first and lengths[0] != lengths[1]:
            raise InvalidInputError(
                f"{source_path} has {lengths[0]} lines but {target_path} has {lengths[1]}: line i of one file must "
                "translate line i of the other, so give them the same number of lines"
            )
        rows: list[Row] = []
        # After lines were appended, one of the files may have more lines than the other.
        pairs = zip(source.lines, target.lines, strict=False)
        for line, texts in enumerate(pairs, start=source.first_line):
            for text, path in zip(texts, (source_path, target_path), strict=True):
                check_text(text, "the line", f"{path}:{line}")
            rows.append(Row(source_path, line, texts, ()))
        return rows, len(rows)


def open_file(path: str, kind: str, data: DataConfig, stored: Sequence[Path] = ()) -> RowSource:
    """Opens a file of `DataConfig` in the format that fits its name and the kind of the task.

    Args:
        stored: Where the file is, or both parallel files, if not at their paths.
    """
    if path.endswith(".jsonl"):
        return JsonLinesFile(path, kind, data, stored)
    if path.endswith(".conll") and kind == "ner":
        return ConllFile(path, stored)
    if path.endswith(".txt") and kind == "causal_lm":
        return TextFile(path, stored=stored)
    if path.count(",") == 1 and kind == "translation":
        return ParallelFiles(*(part.strip() for part in path.split(",")), stored=stored)
    formats = {
        "classification": ".jsonl",
        "ner": ".conll or .jsonl",
        "causal_lm": ".jsonl, or .txt with one text a line",
        "instruction": ".jsonl",
        "translation": '.jsonl, or two parallel text files as "SOURCE,TARGET"',
    }
    raise InvalidInputError(
        f"{path}: this file format is not supported for {kind}: use {formats[kind]}"
    )
