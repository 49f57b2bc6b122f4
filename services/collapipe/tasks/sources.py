"""Where rows come from: a source is read, and accepted once all that was read proved usable."""

import json
import logging
from abc import ABC, abstractmethod
from collections.abc import Sequence

from collapipe.errors import InvalidInputError
from collapipe.job import DataConfig
from collapipe.tasks.appended_file import AppendedFile, Unread
from collapipe.tasks.rows import (
    PairRow,
    Row,
    RowBuilder,
    TaggedRow,
    check_iob2,
    check_text,
    row_builder,
)

_log = logging.getLogger(__name__)


class RowSource(ABC):
    """Rows in a fixed order, to which more may be appended."""

    name: str

    @abstractmethod
    def read(self) -> list[Row]:
        """Returns the rows after the accepted ones; cheap when there are none.

        Raises:
            InvalidInputError: A row is wrong. Nothing is lost: the next reading returns the same
                rows again.
        """

    @abstractmethod
    def accept(self) -> None:
        """Takes the rows that the last `read` returned as used."""


class FixedRows(RowSource):
    """Rows that never become more."""

    def __init__(self, name: str, rows: Sequence[Row]) -> None:
        self.name = name
        self._rows = list(rows)

    def read(self) -> list[Row]:
        return self._rows

    def accept(self) -> None:
        self._rows = []


class JsonLinesFile(RowSource):
    """One JSON object a line; blank lines do not count."""

    def __init__(self, path: str, build_row: RowBuilder) -> None:
        self.name = path
        self._file = AppendedFile(path)
        self._build_row = build_row
        self._read: tuple[Unread, int] | None = None

    def read(self) -> list[Row]:
        self._read = None
        if not self._file.has_changed():
            return []
        unread = self._file.read()
        rows: list[Row] = []
        num_lines = len(unread.lines)
        for index, text in enumerate(unread.lines):
            line = unread.first_line + index
            if not text.strip():
                continue
            try:
                record = json.loads(text)
            except ValueError as error:
                if rows and index == num_lines - 1 and not unread.ends_complete:
                    num_lines -= 1
                    _log.warning("%s:%d: is half-written: left for a later round", self.name, line)
                    break
                raise InvalidInputError(
                    f"{self.name}:{line}: is not JSON ({error}): {text!r:.80}; write one object a "
                    "line"
                ) from error
            if not isinstance(record, dict):
                raise InvalidInputError(
                    f"{self.name}:{line}: is {text!r:.80}, not a JSON object: write one object a "
                    "line, "
                    'such as {"text": "...", "label": "..."}'
                )
            rows.append(self._build_row(record, self.name, line))
        self._read = unread, num_lines
        return rows

    def accept(self) -> None:
        if self._read is not None:
            self._file.accept(*self._read)


class ConllFile(RowSource):
    """One `token<TAB or space>tag` a line, a blank line after each sentence.

    The sentence that ends the file needs no blank line at the first reading. Later it counts as
    half-written without one.
    """

    def __init__(self, path: str) -> None:
        self.name = path
        self._file = AppendedFile(path)
        self._read: tuple[Unread, int, bool] | None = None
        self._sentence_is_open = False

    def read(self) -> list[Row]:
        self._read = None
        if not self._file.has_changed():
            return []
        unread = self._file.read()
        if self._sentence_is_open and unread.lines and unread.lines[0].strip():
            raise InvalidInputError(
                f"{self.name}:{unread.first_line}: continues a sentence that ended the file when "
                "it was read: put a blank line between them"
            )
        rows: list[Row] = []
        start = 0
        for index, text in enumerate(unread.lines):
            if not text.strip():
                rows += self._sentence(unread, start, index)
                start = index + 1
        is_open = unread.is_first and start < len(unread.lines)
        if is_open:
            rows += self._sentence(unread, start, len(unread.lines))
            start = len(unread.lines)
        self._read = unread, start, is_open
        return rows

    def accept(self) -> None:
        if self._read is not None:
            unread, num_lines, is_open = self._read
            self._file.accept(unread, num_lines)
            self._sentence_is_open = is_open if num_lines else self._sentence_is_open

    def _sentence(self, unread: Unread, start: int, stop: int) -> list[Row]:
        """The sentence in lines `start` to `stop`, if there is one."""
        first_line = unread.first_line + start
        words, tags = [], []
        for line, text in enumerate(unread.lines[start:stop], start=first_line):
            columns = text.split("\t") if "\t" in text else text.split()
            if len(columns) != 2:
                raise InvalidInputError(
                    f"{self.name}:{line}: has {len(columns)} columns {columns!r:.80} where 2 are "
                    "wanted: a token and its tag, separated by a tab or spaces"
                )
            words.append(check_text(columns[0], "the token", f"{self.name}:{line}"))
            tags.append(columns[1].strip())
        check_iob2(tags, lambda index: f"{self.name}:{first_line + index}")
        return [TaggedRow(self.name, first_line, tuple(words), tuple(tags))] if words else []


class ParallelFiles(RowSource):
    """Two text files: line i of the one translates to line i of the other."""

    def __init__(self, source_path: str, target_path: str) -> None:
        self.name = f"{source_path},{target_path}"
        self._files = AppendedFile(source_path), AppendedFile(target_path)
        self._read: tuple[Unread, Unread, int] | None = None

    def read(self) -> list[Row]:
        self._read = None
        source_file, target_file = self._files
        if not (source_file.has_changed() or target_file.has_changed()):
            return []
        source, target = source_file.read(), target_file.read()
        lengths = len(source.lines), len(target.lines)
        if source.is_first and lengths[0] != lengths[1]:
            raise InvalidInputError(
                f"{source_file.path} has {lengths[0]} lines but {target_file.path} has "
                f"{lengths[1]}: line i of the one must translate to line i of the other, so their "
                "numbers must be equal"
            )
        rows: list[Row] = []
        pairs = zip(
            source.lines, target.lines, strict=False
        )  # of appended lines, one file may have more yet
        for line, (text, translation) in enumerate(pairs, start=source.first_line):
            check_text(text, "the line", f"{source_file.path}:{line}")
            check_text(translation, "the line", f"{target_file.path}:{line}")
            rows.append(PairRow(source_file.path, line, text, translation))
        self._read = source, target, len(rows)
        return rows

    def accept(self) -> None:
        if self._read is not None:
            source, target, num_lines = self._read
            self._files[0].accept(source, num_lines)
            self._files[1].accept(target, num_lines)


def open_file(path: str, kind: str, data: DataConfig) -> RowSource:
    """Chooses the reader by the file's name and the task.

    Args:
        path: As `DataConfig.train` names it.
        kind: `TaskConfig.kind`.
        data: Names the columns.
    """
    if path.endswith(".jsonl"):
        return JsonLinesFile(path, row_builder(kind, data))
    if path.endswith(".conll") and kind == "ner":
        return ConllFile(path)
    if path.count(",") == 1 and kind == "translation":
        return ParallelFiles(*(part.strip() for part in path.split(",")))
    formats = {
        "classification": ".jsonl",
        "ner": ".conll or .jsonl",
        "translation": '.jsonl, or two parallel text files as "SOURCE,TARGET"',
    }
    raise InvalidInputError(f"{path}: is no format that {kind} reads: give {formats[kind]}")
