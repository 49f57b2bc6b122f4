"""The rows of a data set: what a row is, how a record becomes a row, and what makes a row wrong.

Every row knows its file and its line. So the message about a mistake can name them, even if the mistake is
found late.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from collapipe.errors import InvalidInputError
from collapipe.job import DataConfig


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
    """A sentence with an IOB2 tag for each word; its text is the words, joined by spaces."""

    words: tuple[str, ...]

    @property
    def group(self) -> str:
        """The type of the first entity, because most sentences have one or none."""
        return next((tag[2:] for tag in self.labels if tag != "O"), "O")


@dataclass(frozen=True)
class ChatRow(Row):
    """A chat that ends with an answer. Its texts are the contents before the answer, joined, and the answer."""

    messages: tuple[dict[str, Any], ...]


def make_row(record: Mapping[str, Any], kind: str, data: DataConfig, file: str, line: int) -> Row:
    """Converts a record of a JSON Lines file or of the hub to a row.

    Raises:
        InvalidInputError: A column is missing or has a wrong value.
    """
    place = f"{file}:{line}"
    if kind == "ner":
        words = _texts(record, data, "text_column", place)
        tags = _texts(record, data, "label_column", place)
        if len(words) != len(tags):
            raise InvalidInputError(
                f"{place}: {len(words)} words in {data.text_column!r} but {len(tags)} tags in "
                f"{data.label_column!r}: give each word one tag"
            )
        check_iob2(tags, lambda _: place)
        return TaggedRow(file, line, (" ".join(words),), tags, words)
    if kind == "translation":
        nested = record.get("translation")  # The hub nests the columns of parallel texts.
        if isinstance(nested, Mapping) and data.source_column not in record:
            record = nested
        source = _text(record, data, "source_column", place)
        return Row(file, line, (source, _text(record, data, "target_column", place)), ())
    if kind == "causal_lm":
        text = _text(record, data, "text_column", place, may_be_blank=True)
        return Row(file, line, (text,), ())
    if kind == "instruction":
        if data.messages_column in record:
            return _chat(record[data.messages_column], data, file, line)
        prompt = _text(record, data, "prompt_column", place)
        return Row(file, line, (prompt, _text(record, data, "completion_column", place)), ())
    label = _column(record, data, "label_column", place)
    if isinstance(label, int) and not isinstance(label, bool):
        record = {**record, data.label_column: str(label)}
    text = _text(record, data, "text_column", place)
    return Row(file, line, (text,), (_text(record, data, "label_column", place),))


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


def check_iob2(tags: Sequence[str], place: Callable[[int], str]) -> None:
    """Refuses tags of a sentence that are not IOB2: B- opens every entity, and I- continues one of its type.

    Args:
        place: Returns the place of a tag for the message, given its index.
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
                f"its type: open the entity with 'B-{entity_type}', as IOB2 does"
            )
        before = tag


def check_text(text: str, what: str, place: str, *, may_be_blank: bool = False) -> str:
    """Returns the text if it is not blank and UTF-8 can encode it. The error calls the text `what`.

    Raises:
        InvalidInputError: It is blank, or has a character that UTF-8 cannot encode.
    """
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


def _column(record: Mapping[str, Any], data: DataConfig, setting: str, place: str) -> Any:
    """Returns the value of the column that a setting names."""
    name = getattr(data, setting)
    if name not in record:
        found = ", ".join(map(repr, record)) or "none"
        raise InvalidInputError(
            f"{place}: has no column {name!r} (columns found: {found}): set data.{setting}"
        )
    return record[name]


def _text(
    record: Mapping[str, Any],
    data: DataConfig,
    setting: str,
    place: str,
    *,
    may_be_blank: bool = False,
) -> str:
    value = _column(record, data, setting, place)
    what = f"column {getattr(data, setting)!r}"
    if not isinstance(value, str):
        raise InvalidInputError(
            f"{place}: {what} is {value!r:.80}, of type {type(value).__name__}: it must be a string"
        )
    return check_text(value, what, place, may_be_blank=may_be_blank)


def _texts(
    record: Mapping[str, Any], data: DataConfig, setting: str, place: str
) -> tuple[str, ...]:
    values = _column(record, data, setting, place)
    what = f"column {getattr(data, setting)!r}"
    if not isinstance(values, list) or not all(isinstance(value, str) for value in values):
        raise InvalidInputError(
            f"{place}: {what} is {values!r:.80}, of type {type(values).__name__}: for ner it must "
            "be a list of strings, one for each word"
        )
    if not values:
        raise InvalidInputError(f"{place}: {what} is an empty list: remove the row or fill it in")
    return tuple(check_text(value, what, place) for value in values)
