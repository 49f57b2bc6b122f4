"""What one example is, for each task, and what makes it wrong.

Every row remembers where it came from, so that a mistake found late (a label that the job does not
know) can still name the file and the line.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from collapipe.errors import InvalidInputError
from collapipe.job import DataConfig

RowBuilder = Callable[[Mapping[str, Any], str, int], "Row"]
"""Makes a row of a record: (record, file, line)."""


@dataclass(frozen=True)
class Row(ABC):
    """One example."""

    file: str
    line: int
    """The (first) line, from 1; of a data set without lines the row, from 1."""

    @property
    def place(self) -> str:
        """Where the row came from, for messages."""
        return f"{self.file}:{self.line}"

    @property
    @abstractmethod
    def key(self) -> str:
        """The input as text: of rows with equal keys, all are held out or none."""

    @property
    @abstractmethod
    def texts(self) -> tuple[str, ...]:
        """What a vocabulary is made from."""

    @property
    @abstractmethod
    def labels(self) -> tuple[str, ...]:
        """Names of the labels in it."""

    @property
    @abstractmethod
    def group(self) -> str:
        """What Dirichlet sharding skews by."""


@dataclass(frozen=True)
class TextRow(Row):
    """A text and its class."""

    text: str
    label: str

    @property
    def key(self) -> str:
        return self.text

    @property
    def texts(self) -> tuple[str, ...]:
        return (self.text,)

    @property
    def labels(self) -> tuple[str, ...]:
        return (self.label,)

    @property
    def group(self) -> str:
        return self.label


@dataclass(frozen=True)
class TaggedRow(Row):
    """The words of a sentence and their IOB2 tags."""

    words: tuple[str, ...]
    tags: tuple[str, ...]

    @property
    def key(self) -> str:
        return " ".join(self.words)

    @property
    def texts(self) -> tuple[str, ...]:
        return (self.key,)

    @property
    def labels(self) -> tuple[str, ...]:
        return self.tags

    @property
    def group(self) -> str:
        """The type of the first entity: most sentences have one or none."""
        return next((tag[2:] for tag in self.tags if tag != "O"), "O")


@dataclass(frozen=True)
class PairRow(Row):
    """A sentence and its translation."""

    source: str
    target: str

    @property
    def key(self) -> str:
        return self.source

    @property
    def texts(self) -> tuple[str, ...]:
        return (self.source, self.target)

    @property
    def labels(self) -> tuple[str, ...]:
        return ()

    @property
    def group(self) -> str:
        raise InvalidInputError(
            'data.sharding is "dirichlet", which skews labels, but translation has none: use '
            '"iid", or one file a cluster'
        )


def row_builder(kind: str, data: DataConfig) -> RowBuilder:
    """Says how records (of JSON Lines or of the hub) become rows of a task.

    Args:
        kind: `TaskConfig.kind`.
        data: Names the columns.
    """

    def text_row(record: Mapping[str, Any], file: str, line: int) -> Row:
        place = f"{file}:{line}"
        label = _column(record, data, "label_column", place)
        if isinstance(label, int) and not isinstance(label, bool):
            record = {**record, data.label_column: str(label)}
        text = _text(record, data, "text_column", place)
        return TextRow(file, line, text, _text(record, data, "label_column", place))

    def tagged_row(record: Mapping[str, Any], file: str, line: int) -> Row:
        place = f"{file}:{line}"
        words = _texts(record, data, "text_column", place)
        tags = _texts(record, data, "label_column", place)
        if len(words) != len(tags):
            raise InvalidInputError(
                f"{place}: {len(words)} words in {data.text_column!r} but {len(tags)} tags in "
                f"{data.label_column!r}: give each word one tag"
            )
        check_iob2(tags, lambda _: place)
        return TaggedRow(file, line, words, tags)

    def pair_row(record: Mapping[str, Any], file: str, line: int) -> Row:
        place = f"{file}:{line}"
        nested = record.get("translation")  # the hub's own layout of parallel text
        if isinstance(nested, Mapping) and data.source_column not in record:
            record = nested
        source = _text(record, data, "source_column", place)
        return PairRow(file, line, source, _text(record, data, "target_column", place))

    return {"classification": text_row, "ner": tagged_row, "translation": pair_row}[kind]


def check_iob2(tags: Sequence[str], place: Callable[[int], str]) -> None:
    """Refuses what is not IOB2: B- opens every entity, I- continues one of the same type.

    Args:
        tags: The tags of one sentence.
        place: Says where the tag of a word stands, for the message.
    """
    before = "O"
    for index, tag in enumerate(tags):
        prefix, _, entity_type = tag.partition("-")
        if tag != "O" and (prefix not in ("B", "I") or not entity_type):
            raise InvalidInputError(
                f"{place(index)}: tag {tag!r} is not IOB2: use O, B-TYPE or I-TYPE, such as "
                "B-person"
            )
        if prefix == "I" and before[2:] != entity_type:
            raise InvalidInputError(
                f"{place(index)}: tag {tag!r} follows {before!r}, so it continues no entity of "
                f"its type: IOB2 opens an entity with 'B-{entity_type}'"
            )
        before = tag


def check_text(text: str, what: str, place: str) -> str:
    """Returns a text that holds something and can be encoded; refuses any other."""
    if not text.strip():
        raise InvalidInputError(f"{place}: {what} is empty: remove the row or fill it in")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InvalidInputError(
            f"{place}: {what} holds {text[error.start]!r} at character {error.start + 1}, half a "
            "surrogate pair and no character: write the character itself, in UTF-8"
        ) from error
    return text


def _column(record: Mapping[str, Any], data: DataConfig, setting: str, place: str) -> Any:
    """The value of the column that a setting names."""
    name = getattr(data, setting)
    if name not in record:
        found = ", ".join(map(repr, record)) or "none"
        raise InvalidInputError(
            f"{place}: has no column {name!r} (columns found: {found}): set data.{setting}"
        )
    return record[name]


def _text(record: Mapping[str, Any], data: DataConfig, setting: str, place: str) -> str:
    value = _column(record, data, setting, place)
    what = f"column {getattr(data, setting)!r}"
    if not isinstance(value, str):
        raise InvalidInputError(
            f"{place}: {what} is {value!r:.80}, of type {type(value).__name__}: it must be a text"
        )
    return check_text(value, what, place)


def _texts(
    record: Mapping[str, Any], data: DataConfig, setting: str, place: str
) -> tuple[str, ...]:
    values = _column(record, data, setting, place)
    what = f"column {getattr(data, setting)!r}"
    if not isinstance(values, list) or not all(isinstance(value, str) for value in values):
        raise InvalidInputError(
            f"{place}: {what} is {values!r:.80}, of type {type(values).__name__}: for ner it must "
            "be a list of texts, one a word"
        )
    if not values:
        raise InvalidInputError(f"{place}: {what} is an empty list: remove the row or fill it in")
    return tuple(check_text(value, what, place) for value in values)
