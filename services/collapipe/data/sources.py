"""Sources of rows: files of lines in five formats, and fixed lists.

A source is read and then accepted. The caller accepts what it read only if all rows are usable. Otherwise the
next reading returns the same rows again, so a mistake in appended rows loses nothing.
"""

import codecs
import csv
import logging
import os
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from collapipe.data.appended_file import AppendedFile, Unread
from collapipe.data.columns import NUM_SAMPLES, settle_columns
from collapipe.data.data_files import MOST_CHARACTERS, DataFile
from collapipe.data.findings import SourceFacts
from collapipe.data.rows import (
    Row,
    TaggedRow,
    check_text,
    clean_label,
    make_row,
    parse_json,
    settle_columns_of,
)
from collapipe.data.tables import Table, read_json, read_parquet, read_saved
from collapipe.data.tag_schemes import in_iob2, scheme_of
from collapipe.errors import InvalidInputError
from collapipe.job import DataConfig
from collapipe.job_files import file_names, place_of

_log = logging.getLogger(__name__)

csv.field_size_limit(MOST_CHARACTERS)  # The default refuses texts of more than 131,072 characters.


_SEPARATORS = {"\t": ".tsv", ",": ".csv", ";": ".csv", "|": ".csv"}
"""The suffix of a file whose values are separated so."""
_COMPRESSED = {
    ".gz": "gunzip",
    ".bz2": "bunzip2",
    ".xz": "unxz",
    ".zst": "unzstd",
    ".zip": "unzip",
    ".tgz": "tar -xzf",
}
"""What unpacks a file, by its suffix."""
_DOCUMENT_START = "-DOCSTART-"


class RowSource(ABC):
    """Rows in a fixed order, to which more may be appended."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.facts = SourceFacts(name)
        """What the first reading counted."""

    @abstractmethod
    def read(self) -> list[Row]:
        """Returns the rows after the accepted ones; cheap if there are none.

        Raises:
            InvalidInputError: A row is wrong.
        """

    @abstractmethod
    def accept(self) -> None:
        """Marks the rows of the last reading as accepted."""

    def _in_iob2(self, rows: Sequence[Row], *, is_first: bool) -> list[Row]:
        """Returns the rows with their tags in IOB2, if they have tags, and without marks of documents."""
        if is_first:
            self.facts.scheme = scheme_of(rows)
        converted: list[Row] = []
        for row in rows:
            if not isinstance(row, TaggedRow):
                converted.append(row)
            elif row.words == (_DOCUMENT_START,):
                self.facts.document_starts.add(row.place)
            else:
                place = partial(self._tag_place, row)
                converted.append(in_iob2(row, self.facts.scheme, place))
        return converted

    def _tag_place(self, row: Row, index: int) -> str:
        """Returns the place of the tag of a word."""
        return row.place


class FixedRows(RowSource):
    """Rows to which none are appended."""

    def __init__(self, name: str, rows: Sequence[Row], columns: str = "") -> None:
        super().__init__(name)
        self._rows = self._in_iob2(rows, is_first=True)
        self.facts.num_rows, self.facts.columns = len(self._rows), columns

    def read(self) -> list[Row]:
        return self._rows

    def accept(self) -> None:
        self._rows = []


class FileRows(RowSource):
    """Rows of one or more text files, which are read line by line."""

    def __init__(self, *files: DataFile) -> None:
        super().__init__(",".join(file.name for file in files))
        self._files = [AppendedFile(file) for file in files]
        self._pending: tuple[list[Unread], int] | None = None

    def read(self) -> list[Row]:
        self._pending = None
        if not any(file.has_changed() for file in self._files):
            return []
        unread = [file.read() for file in self._files]
        is_first = unread[0].is_first
        if is_first:
            self.facts = SourceFacts(self.name)
        rows, num_lines = self._parse(*unread)
        rows = self._in_iob2(rows, is_first=is_first)
        if is_first:
            self.facts.num_lines, self.facts.num_rows = len(unread[0].lines), len(rows)
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

    def __init__(self, file: DataFile, kind: str, data: DataConfig) -> None:
        super().__init__(file)
        self._kind, self._data = kind, data
        self._settled = data

    def _parse(self, *unread: Unread) -> tuple[list[Row], int]:
        [lines] = unread
        rows: list[Row] = []
        for index, text in enumerate(lines.lines):
            line = lines.first_line + index
            if not text.strip():
                continue
            try:
                record = parse_json(text)
            except ValueError as error:
                if rows and index == len(lines.lines) - 1 and not lines.ends_complete:
                    _warn_half_written(self.name, line)
                    return rows, index
                raise InvalidInputError(
                    f"{self.name}:{line}: is not JSON ({error}): {text!r:.80}; write one object in each line"
                ) from error
            if not isinstance(record, dict):
                raise InvalidInputError(
                    f"{self.name}:{line}: is {text!r:.80}, not a JSON object: write one object in each line, "
                    'such as {"text": "...", "label": "..."}'
                )
            if lines.is_first and not rows:
                self._settled, self.facts.columns = settle_columns_of(
                    _sample(lines) or [record], self._kind, self._data, f"{self.name}:{line}"
                )
            rows.append(make_row(record, self._kind, self._settled, self.name, line))
        return rows, len(lines.lines)


def _sample(lines: Unread) -> list[Mapping[str, Any]]:
    """Returns the objects in the first lines."""
    records: list[Mapping[str, Any]] = []
    num_characters = 0
    for line in lines.lines[:NUM_SAMPLES]:
        num_characters += len(line)
        if num_characters > MOST_CHARACTERS:
            break  # An object may take 40 times the memory of its line.
        try:
            record = parse_json(line)
        except ValueError:
            continue
        if isinstance(record, dict):
            records.append(record)
    return records


class CsvFile(FileRows):
    """A file of values that are separated by commas or tabs. Its first line names the columns.

    A value with a separator, a quote or a line break is in double quotes, and quotes in it are doubled. For ner, the words
    of a sentence are separated by spaces, and so are their tags. If the first line of a .csv file has no commas but semicolons or
    bars, these separate its values. In a .tsv file no value spans lines, because most such files have quotes that mean nothing.
    """

    def __init__(self, file: DataFile, kind: str, data: DataConfig) -> None:
        super().__init__(file)
        self._kind, self._data = kind, data
        self._settled = data
        self._separator = ""
        self._header: list[str] = []

    def _parse(self, *unread: Unread) -> tuple[list[Row], int]:
        [lines] = unread
        texts = lines.lines
        if lines.is_first:
            self._header = []
            self._separator = self._separator_of(texts[0] if texts else "")
        reader = csv.reader((f"{text}\n" for text in texts), delimiter=self._separator, strict=True)
        rows: list[Row] = []
        num_used = 0
        while num_used < len(texts):
            line = lines.first_line + num_used
            try:
                cells = next(reader)
                if reader.line_num > num_used + 1:
                    self._take_spanning(lines, num_used, reader.line_num)
                if cells and not self._header:
                    self._read_header(cells, line, texts[reader.line_num :])
                elif cells:
                    rows.append(self._row(cells, line))
            except (csv.Error, _WrongCellsError) as error:
                is_last = reader.line_num == len(texts)
                if is_last and (rows or not lines.is_first) and self._may_grow(lines, error):
                    _warn_half_written(self.name, line)
                    break
                raise InvalidInputError(
                    f"{self.name}:{line}: is not CSV ({error}): {texts[num_used]!r:.80}; put each value with {self._separator!r}, a "
                    "double quote or a line break in double quotes, and double the quotes in it"
                ) from error
            num_used = reader.line_num
        return rows, num_used

    @property
    def _is_tsv(self) -> bool:
        return self.name.lower().endswith(".tsv")

    def _separator_of(self, first_line: str) -> str:
        if self._is_tsv:
            return "\t"
        return next((each for each in ",;|" if each in first_line), ",")

    def _take_spanning(self, lines: Unread, start: int, stop: int) -> None:
        """Counts a row with a value that spans lines, or refuses it in .tsv. It has the lines from index `start` to `stop`."""
        line = lines.first_line + start
        if self._is_tsv:
            raise InvalidInputError(
                f"{self.name}:{line}: a value in quotes spans {stop - start} lines, up to line {lines.first_line + stop - 1}, but a "
                "value of a .tsv file must be on one line: put a value that begins with a quote in quotes, and double the quotes in it"
            )
        self.facts.spanning.add(f"{self.name}:{line}")
        separators = len(self._header) - 1
        if all(text.count(self._separator) == separators > 0 for text in lines.lines[start:stop]):
            self.facts.spanning_rows.add(f"{self.name}:{line}")

    def _may_grow(self, lines: Unread, error: Exception) -> bool:
        """Returns whether the last row may be half-written: its line has no end, or a later line may close a quote."""
        has_open_quote = not lines.is_first and "end of data" in str(error)
        return not lines.ends_complete or (has_open_quote and not self._is_tsv)

    def _read_header(self, names: list[str], line: int, below: Sequence[str]) -> None:
        names = [name.strip() for name in names]
        twice = next((name for name, number in Counter(names).items() if number > 1), None)
        if twice is not None:
            raise InvalidInputError(
                f"{self.name}:{line}: names the column {twice!r} twice: give each column a name of its own"
            )
        try:
            self._settled, self.facts.columns = settle_columns(
                names,
                self._kind,
                self._data,
                f"{self.name}:{line}",
                partial(self._sample, names, below),
            )
        except InvalidInputError as error:
            shape = "; or if each line is a word and its tag, name the file .conll"
            separated = next((x for x in _SEPARATORS if len(names) == 1 and x in names[0]), None)
            if separated is not None and self._kind != "ner":
                raise InvalidInputError(
                    f"{self.name}:{line}: {names[0]!r:.80} has {separated!r} and no {self._separator!r} between names of columns: "
                    f"name the file {_SEPARATORS[separated]}"
                ) from error
            raise InvalidInputError(
                f"{error}; the first line must name the columns{shape if self._kind == 'ner' else ''}"
            ) from error
        self._header = names

    def _sample(self, names: Sequence[str], below: Sequence[str]) -> Mapping[str, Sequence[Any]]:
        """Returns values of the columns in some lines."""
        rows: list[list[str]] = []
        for text in below[:NUM_SAMPLES]:
            try:
                rows += csv.reader([text], delimiter=self._separator)
            except csv.Error:
                continue
        whole = [row for row in rows if len(row) == len(names)]
        return dict(zip(names, zip(*whole, strict=True), strict=True)) if whole else {}

    def _row(self, cells: list[str], line: int) -> Row:
        if len(cells) != len(self._header):
            raise _WrongCellsError(f"{len(cells)} values for {len(self._header)} columns")
        values = [cell.split() for cell in cells] if self._kind == "ner" else cells
        record = dict(zip(self._header, values, strict=True))
        return make_row(record, self._kind, self._settled, self.name, line)


class _WrongCellsError(Exception):
    """A row has more or fewer values than there are columns."""


class ConllFile(FileRows):
    """A file with a word, a tab or spaces, and its tag in each line, and a blank line, or one with -DOCSTART-, after each sentence.

    All lines have as many columns as the first one. The tag is the last of them, and those between are not used.

    At the first reading, the last sentence of the file needs no blank line. Later, a last sentence without a
    blank line counts as half-written.
    """

    def __init__(self, file: DataFile) -> None:
        super().__init__(file)
        self._sentence_is_open = False
        self._num_columns = 2

    def accept(self) -> None:
        super().accept()
        if self._pending is not None and self._pending[1] > 0:
            [lines], num_lines = self._pending
            self._sentence_is_open = not _is_boundary(lines.lines[num_lines - 1])

    def _parse(self, *unread: Unread) -> tuple[list[Row], int]:
        [lines] = unread
        if self._sentence_is_open and lines.lines and not _is_boundary(lines.lines[0]):
            raise InvalidInputError(
                f"{self.name}:{lines.first_line}: continues the sentence that was the last of the file when it was "
                "read: put a blank line between them"
            )
        if lines.is_first:
            first = next((text for text in lines.lines if not _is_boundary(text)), "")
            self._num_columns = max(2, len(_conll_columns(first)))
        rows: list[Row] = []
        start = 0
        for index, text in enumerate(lines.lines):
            if _is_boundary(text):
                rows += self._sentence(lines, start, index)
                start = index + 1
            if text.startswith(_DOCUMENT_START):
                self.facts.document_starts.add(f"{self.name}:{lines.first_line + index}")
        if lines.is_first:
            rows += self._sentence(lines, start, len(lines.lines))
            start = len(lines.lines)
        return rows, start

    def _tag_place(self, row: Row, index: int) -> str:
        return f"{self.name}:{row.line + index}"

    def _sentence(self, lines: Unread, start: int, stop: int) -> list[Row]:
        """Returns the sentence in lines `start` to `stop`, or an empty list if there are no lines."""
        first_line = lines.first_line + start
        words, tags = [], []
        for line, text in enumerate(lines.lines[start:stop], start=first_line):
            _refuse_carriage_return(text, f"{self.name}:{line}")
            columns = _conll_columns(text)
            if len(columns) != self._num_columns:
                raise InvalidInputError(
                    f"{self.name}:{line}: has {len(columns)} columns {columns!r:.80}, but needs {self._num_columns}, as in "
                    "the first line: a token, separated by a tab or spaces from its tag, which is the last column"
                )
            words.append(check_text(columns[0], "the token", f"{self.name}:{line}"))
            tags.append(clean_label(columns[-1]))
        if not words:
            return []
        text = check_text(" ".join(words), "the sentence", f"{self.name}:{first_line}")
        return [TaggedRow(self.name, first_line, (text,), tuple(tags), tuple(words))]


def _is_boundary(line: str) -> bool:
    return not line.strip() or line.startswith(_DOCUMENT_START)


def _conll_columns(line: str) -> list[str]:
    return line.split("\t") if "\t" in line else line.split()


class TextFile(FileRows):
    """A file with one text in each line."""

    def _parse(self, *unread: Unread) -> tuple[list[Row], int]:
        [lines] = unread
        rows: list[Row] = []
        for line, text in enumerate(lines.lines, start=lines.first_line):
            _refuse_carriage_return(text, f"{self.name}:{line}")
            rows.append(Row(self.name, line, (text,), ()))
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
                _refuse_carriage_return(text, f"{path}:{line}")
                check_text(text, "the line", f"{path}:{line}")
            rows.append(Row(source_path, line, texts, ()))
        return rows, len(rows)


def open_file(
    path: str,
    kind: str,
    data: DataConfig,
    stored: Sequence[Path] = (),
    folders: Sequence[Path] = (),
) -> RowSource:
    """Opens a file or folder of `DataConfig` in the format that fits its name and the kind of the task.

    Rows that are appended to a Parquet file or to a folder are not noticed.

    Args:
        stored: Where the file is, or both parallel files, if not at their paths.
        folders: Folders that must hold it. Empty for any place.

    Raises:
        InvalidInputError: The task does not read this format, or a file that is read at once is wrong.
        NotPermittedError: A file is in none of the folders.
    """
    names = file_names(path, kind)
    places = stored or [place_of(name, folders) for name in names]
    if len(places) != len(names):
        raise InvalidInputError(
            f"{path}: names {len(names)} files, but {len(places)} were given: rename them without commas, and give two parallel files "
            "names without a suffix of another format"
        )
    file, *others = (
        DataFile(name, place, folders) for name, place in zip(names, places, strict=True)
    )
    suffix = Path(path).suffix.lower()
    if others:
        return ParallelFiles(file, *others)
    if os.path.isdir(file.path):  # Unlike `Path.is_dir`, it raises nothing.
        return _fixed(path, read_saved(file, kind, data))
    if suffix == ".json" and _begins_with(file, b"["):
        return _fixed(path, read_json(file, kind, data))
    if suffix in (".jsonl", ".ndjson", ".json"):
        return JsonLinesFile(file, kind, data)
    if suffix in (".csv", ".tsv"):
        return CsvFile(file, kind, data)
    if suffix == ".parquet":
        return _fixed(path, read_parquet(file, kind, data))
    if suffix == ".conll" and kind == "ner":
        return ConllFile(file)
    if suffix == ".txt" and kind == "causal_lm":
        return TextFile(file)
    if suffix in _COMPRESSED:
        raise InvalidInputError(
            f"{path}: is compressed: unpack it with `{_COMPRESSED[suffix]}`, and name the unpacked file"
        )
    formats = {
        "ner": ", or .conll with a word and its tag a line",
        "causal_lm": ", or .txt with one text a line",
        "translation": ', or two parallel text files as "SOURCE,TARGET"',
    }
    raise InvalidInputError(
        f"{path}: this file format is not supported for {kind}: use .jsonl (or .ndjson, .json){formats.get(kind, '')}, or .csv, .tsv, .parquet, or a "
        "folder that `save_to_disk` of datasets has written"
    )


def _fixed(path: str, table: Table) -> FixedRows:
    return FixedRows(path, table.rows, table.columns)


def _begins_with(file: DataFile, start: bytes) -> bool:
    """Returns whether a file begins so, apart from blanks."""
    with file.open() as opened:
        return opened.read(1024).removeprefix(codecs.BOM_UTF8).lstrip().startswith(start)


def _refuse_carriage_return(text: str, place: str) -> None:
    """Refuses a line of a format in which a carriage return within a line can only be a line end."""
    if (position := text.find("\r") + 1) > 0:
        raise InvalidInputError(
            f"{place}: has a carriage return at character {position}, but lines end with a line feed: convert the file, for example "
            r"with `tr '\r' '\n'`"
        )


def _warn_half_written(file: str, line: int) -> None:
    _log.warning("%s:%d: the line is half-written: it is read in a later round", file, line)
