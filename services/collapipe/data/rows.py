"""The rows of a data set: what a row is, how a record becomes a row, and what makes a row wrong.

Every row knows its file and its line. So the message about a mistake can name them, even if the mistake is
found late.
"""

import math
import unicodedata
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from collapipe.data.columns import find_columns, settle_columns
from collapipe.data.data_files import MOST_CHARACTERS, check_memory
from collapipe.documents import decode_json
from collapipe.errors import InvalidInputError
from collapipe.job import DataConfig

READING_VERSION = 1
"""Increase it when the same files would give other rows, labels, tokens or held-out rows: jobs that have begun would go on wrongly."""

_ROWS_BETWEEN_CHECKS = 256
_LONG_TEXT = 1 << 20
"""After so many rows, and at each text with more characters than this, it is checked whether memory is left."""


@dataclass(frozen=True)
class Row:
    """One row of a data set, before it is encoded."""

    file: str
    line: int
    """First line of the row, from 1. In a data set without lines it is the number of the row, from 1."""
    texts: tuple[str, ...]
    """The input text; for translation also the target text, and for instruction also the answer."""
    labels: tuple[str, ...]
    """The class of the text, or the tag of each word; empty for a task without labels."""

    @property
    def place(self) -> str:
        """File and line, for messages."""
        return f"{self.file}:{self.line}"

    @property
    def key(self) -> str:
        """The input text; it decides whether the row is held out."""
        return self.texts[0]

    @property
    def group(self) -> str:
        """The label by which Dirichlet sharding distributes the row."""
        if not self.labels:
            raise InvalidInputError(
                'data.sharding is "dirichlet", which skews labels, but the rows have none: use '
                '"iid", or one file for each cluster'
            )
        return self.labels[0]


@dataclass(frozen=True)
class TaggedRow(Row):
    """A sentence with a tag for each word; its text is the words, joined by spaces.

    The tags are as in the file, until a `RowSource` has converted them to IOB2.
    """

    words: tuple[str, ...]

    @property
    def group(self) -> str:
        """The type of the first entity, because most sentences have one or none."""
        return next((tag[2:] for tag in self.labels if tag != "O"), "O")


@dataclass(frozen=True)
class ChatRow(Row):
    """A chat that ends with an answer. Its texts are the contents before the answer, joined, and the answer."""

    messages: tuple[dict[str, Any], ...]


class _Repeating(dict[str, Any]):
    """An object of JSON that has some keys more than once."""

    repeated: frozenset[str]


def parse_json(text: str) -> Any:
    """Returns the value of a JSON text; raises `ValueError`. `check_keys` refuses an object that has a key twice, of which `json` takes the last value."""
    return decode_json(text, object_pairs_hook=_object)


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    record = dict(pairs)
    if len(record) == len(pairs):
        return record
    counts = Counter(key for key, _ in pairs)
    found = _Repeating(record)
    found.repeated = frozenset(key for key, number in counts.items() if number > 1)
    return found


def check_keys(record: Mapping[str, Any], keys: Iterable[str], place: str) -> None:
    """Raises `InvalidInputError` if an object of `parse_json` has one of the keys more than once."""
    repeated = record.repeated.intersection(keys) if isinstance(record, _Repeating) else ()
    if repeated:
        raise InvalidInputError(f"{place}: has the key {min(repeated)!r} twice: keep one of them")


def make_row(record: Mapping[str, Any], kind: str, data: DataConfig, file: str, line: int) -> Row:
    """Converts a record, such as an object of a JSON Lines file, to a row.

    Raises:
        InvalidInputError: A column is missing or has a wrong value.
    """
    place = f"{file}:{line}"
    if line % _ROWS_BETWEEN_CHECKS == 0:
        check_memory(place)
    outer, record = record, _unnested(record, kind, data)
    if outer is not record:
        check_keys(outer, ["translation"], place)
    if kind == "instruction" and data.messages_column in record:
        check_keys(record, [data.messages_column], place)
        return _chat(record[data.messages_column], data, file, line)
    first, *others = find_columns(record, kind, data, place)
    check_keys(record, [first, *others], place)
    if kind == "ner":
        [second] = others
        words = _texts(record, first, place)
        tags = tuple(map(clean_label, _texts(record, second, place)))
        if len(words) != len(tags):
            raise InvalidInputError(
                f"{place}: {len(words)} words in {first!r} but {len(tags)} tags in {second!r}: give each word one tag"
            )
        text = check_text(" ".join(words), "the sentence", place)
        return TaggedRow(file, line, (text,), tags, words)
    text = _text(record, first, place, may_be_blank=kind == "causal_lm")
    if kind == "causal_lm":
        return Row(file, line, (text,), ())
    [second] = others
    if kind == "classification":
        record = {**record, second: _written(record[second])}
        return Row(file, line, (text,), (clean_label(_text(record, second, place)),))
    return Row(file, line, (text, _text(record, second, place)), ())


def settle_columns_of(
    records: Iterable[Mapping[str, Any]], kind: str, data: DataConfig, place: str
) -> tuple[DataConfig, str]:
    """Does what `settle_columns` does, given the first records of a file, which may have different columns."""
    values: dict[str, list[Any]] = {}
    for record in records:
        for name, value in _unnested(record, kind, data).items():
            values.setdefault(name, []).append(value)
    if kind == "instruction" and data.messages_column in values:
        return data, ""
    return settle_columns(values, kind, data, place, lambda: values)


def clean_label(label: str) -> str:
    """Returns a label without blanks around it, and with one way of writing for accents."""
    return unicodedata.normalize("NFC", label).strip()


def _written(label: Any) -> Any:
    """Returns a number or a truth value as a file of text writes it."""
    if isinstance(label, bool):
        return str(label).lower()
    is_number = isinstance(label, int) or (isinstance(label, float) and math.isfinite(label))
    return str(label) if is_number else label


def _unnested(record: Mapping[str, Any], kind: str, data: DataConfig) -> Mapping[str, Any]:
    """Returns the columns of parallel texts, which the hub nests."""
    nested = record.get("translation") if kind == "translation" else None
    return nested if isinstance(nested, Mapping) and data.source_column not in record else record


def _chat(messages: Any, data: DataConfig, file: str, line: int) -> ChatRow:
    """Makes a row of the value of the column of messages."""
    place, what = f"{file}:{line}", f"column {data.messages_column!r}"
    remedy = (
        'write messages such as {"role": "user", "content": "..."}, of which the last one is the answer, '
        'by the role "assistant"'
    )
    if not isinstance(messages, list) or len(messages) < 2:
        raise InvalidInputError(
            f"{place}: {what} is {messages!r:.80}, but must be a list of at least 2 messages: {remedy}"
        )
    for number, message in enumerate(messages, start=1):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise InvalidInputError(
                f"{place}: message {number} in {what} is {message!r:.80}, which is no object with a role: {remedy}"
            )
        check_keys(message, ["role", "content"], place)
        content = message.get("content")
        if not isinstance(content, str):
            raise InvalidInputError(
                f"{place}: the content of message {number} in {what} is {content!r:.80}, of type {type(content).__name__}: "
                "it must be a string"
            )
        is_answer = number == len(messages)
        check_text(content, f"message {number} in {what}", place, may_be_blank=not is_answer)
    if messages[-1]["role"] != "assistant":
        raise InvalidInputError(
            f"{place}: the last message in {what} has the role {messages[-1]['role']!r}, so there is no answer to learn: {remedy}"
        )
    *before, answer = (message["content"] for message in messages)
    return ChatRow(file, line, ("\n".join(before), answer), (), tuple(messages))


def check_text(text: str, what: str, place: str, *, may_be_blank: bool = False) -> str:
    """Returns the text if it is not blank and UTF-8 can encode it. The error calls the text `what`.

    Raises:
        InvalidInputError: It is blank, too long, or has a character that UTF-8 cannot encode.
    """
    if len(text) > _LONG_TEXT:
        check_memory(place)
    if len(text) > MOST_CHARACTERS:
        raise InvalidInputError(
            f"{place}: {what} has {len(text)} characters, but at most {MOST_CHARACTERS} are read: divide the row"
        )
    if not (may_be_blank or text.strip()):
        raise InvalidInputError(f"{place}: {what} is empty: remove the row or fill it in")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InvalidInputError(
            f"{place}: {what} holds {text[error.start]!r} at character {error.start + 1}, which is half of a "
            "surrogate pair: write the character itself, in UTF-8"
        ) from error
    return text


def _text(record: Mapping[str, Any], column: str, place: str, *, may_be_blank: bool = False) -> str:
    value, what = record[column], f"column {column!r}"
    if value is None:
        value = ""
    if not isinstance(value, str):
        raise InvalidInputError(
            f"{place}: {what} is {value!r:.80}, of type {type(value).__name__}: it must be a string"
        )
    return check_text(value, what, place, may_be_blank=may_be_blank)


def _texts(record: Mapping[str, Any], column: str, place: str) -> tuple[str, ...]:
    values, what = record[column], f"column {column!r}"
    if not isinstance(values, list) or not all(isinstance(value, str) for value in values):
        raise InvalidInputError(
            f"{place}: {what} is {values!r:.80}, of type {type(values).__name__}: for ner it must "
            "be a list of strings, one for each word"
        )
    if not values:
        raise InvalidInputError(f"{place}: {what} is an empty list: remove the row or fill it in")
    return tuple(check_text(value, what, place) for value in values)
