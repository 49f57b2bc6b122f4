"""Finds the columns of a task among those of a file, by usual names, and guesses by content what a message should offer."""

import difflib
import shlex
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from collapipe.errors import InvalidInputError
from collapipe.job import DataConfig

NUM_SAMPLES = 200
"""Rows that are looked at to guess the meaning of columns."""
Sample = Callable[[], Mapping[str, Sequence[Any]]]
"""Returns some values of each column."""

_KNOWN: Mapping[str, Mapping[str, Sequence[str]]] = {
    "classification": {"text_column": ["sentence"], "label_column": []},
    "ner": {"text_column": ["tokens", "words"], "label_column": ["tags", "ner_tags"]},
    "translation": {"source_column": ["source"], "target_column": ["target"]},
    "causal_lm": {"text_column": ["content"]},
    "instruction": {"prompt_column": ["question"], "completion_column": ["answer", "response"]},
}
"""The settings that name the columns of each task, with the names that a column may have instead of the default."""
_TEXTS = (
    *(
        "abstract",
        "article",
        "body",
        "comment",
        "content",
        "document",
        "email",
        "headline",
        "input",
    ),
    *("message", "passage", "post", "query", "question", "review", "sentence", "sms", "story"),
    *("title", "tweet", "utterance"),
)
_USUAL: Mapping[str, Mapping[str, Sequence[str]]] = {
    "classification": {
        "text_column": _TEXTS,
        "label_column": (
            *("category", "class", "emotion", "intent", "labels", "sentiment", "tag", "target"),
            *("topic", "y"),
        ),
    },
    "ner": {"text_column": ("sentence", "token", "word"), "label_column": ("labels", "ner", "tag")},
    "translation": {"source_column": ("src",), "target_column": ("tgt", "trg")},
    "causal_lm": {"text_column": _TEXTS},
    "instruction": {
        "prompt_column": ("instruction", "query", "input"),
        "completion_column": ("output", "reply"),
    },
}
"""Names that are taken, too, if exactly one column has one of them, or one of the names above, in any case. The output says so."""
_ANSWERS = ("label_column", "completion_column")
"""Settings of columns that may have few values."""
_MOST_COLUMNS = 10_000
_FEW_VALUES = 0.5
"""A column with fewer different values than this share of its values is no text."""


def find_columns(
    names: Collection[str], kind: str, data: DataConfig, place: str
) -> tuple[str, ...]:
    """Finds the columns of a task among those of a row, in the order of the settings that name them.

    A setting with its default value also finds the other documented names of the column.

    Raises:
        InvalidInputError: There is no such column. The message names those found.
    """
    found = _known_columns(names, kind, data)
    if len(found) < len(_KNOWN[kind]):
        raise _missing_columns(names, found, kind, data, place, {})
    return tuple(found[setting] for setting in _KNOWN[kind])


def settle_columns(
    names: Collection[str], kind: str, data: DataConfig, place: str, sample: Sample
) -> tuple[DataConfig, str]:
    """Takes columns with usual names for those of a task, given the columns of a file.

    Returns:
        Settings that name such columns, and words that say so: "" if there are none.

    Raises:
        InvalidInputError: A column is missing. The message names those found, and the most likely ones by their content.
    """
    if len(names) > _MOST_COLUMNS:
        raise InvalidInputError(
            f"{place}: has {len(names)} columns, but at most {_MOST_COLUMNS} are read: remove those that the job does not need"
        )
    found = _known_columns(names, kind, data)
    guessed: dict[str, str] = {}
    for setting, usual in _USUAL[kind].items():
        if setting not in found and _is_default(setting, data):
            left = [name for name in names if name not in (found | guessed).values()]
            able = {getattr(data, setting), *_KNOWN[kind][setting], *usual}
            alike = [name for name in left if name.strip().casefold() in able]
            # What else there is may belong to a prompt.
            if len(alike) == 1 and (kind != "instruction" or len(names) == 2):
                guessed[setting] = alike[0]
    few = _of_few_values(sample()) if guessed else []
    guessed = {key: name for key, name in guessed.items() if key in _ANSWERS or name not in few}
    found |= guessed
    if len(found) < len(_KNOWN[kind]):
        raise _missing_columns(names, found, kind, data, place, sample())
    said = " and ".join(f"data.{setting}={column}" for setting, column in guessed.items())
    return data.model_copy(update=guessed), said


def _known_columns(names: Collection[str], kind: str, data: DataConfig) -> dict[str, str]:
    """Returns, for each setting, the column with its name or another documented name. Leaves out settings without such a column."""
    found: dict[str, str] = {}
    for setting, others in _KNOWN[kind].items():
        wanted: str = getattr(data, setting)
        candidates = [wanted, *others] if _is_default(setting, data) else [wanted]
        column = next((name for name in candidates if name in names), None)
        if column is not None:
            found[setting] = column
    return found


def _is_default(setting: str, data: DataConfig) -> bool:
    return bool(getattr(data, setting) == DataConfig.model_fields[setting].default)


def _missing_columns(
    names: Collection[str],
    found: Mapping[str, str],
    kind: str,
    data: DataConfig,
    place: str,
    values: Mapping[str, Sequence[Any]],
) -> InvalidInputError:
    left = [name for name in names if name not in found.values()]
    missing = [setting for setting in _KNOWN[kind] if setting not in found]
    hints: list[str] = []
    for setting in missing:
        wanted: str = getattr(data, setting)
        if near := _likely(setting, wanted, left, values):
            hints.append(f"data.{setting}={shlex.quote(near)}")
            left.remove(near)
        else:
            hints.append(f"data.{setting} to the name of one")
    wanted = getattr(data, missing[0])
    return InvalidInputError(
        f"{place}: has no column {wanted!r} (columns found: {', '.join(map(repr, names)) or 'none':.400}): set {' and '.join(hints)}, or rename "
        "the column in the file"
    )


def _likely(
    setting: str, wanted: str, names: Sequence[str], values: Mapping[str, Sequence[Any]]
) -> str | None:
    """Returns the column that a setting may mean. A column of few values is a label, and no text."""
    few = [name for name in _of_few_values(values) if name in names]
    is_answer = setting in _ANSWERS
    able = [name for name in names if is_answer or name not in few]
    near = difflib.get_close_matches(wanted, able, n=1)
    if near or len(able) == 1:
        return (near or able)[0]
    if is_answer:
        return few[0] if len(few) == 1 else None
    lengths = {name: sum(map(len, map(str, values[name]))) for name in able if name in values}
    has_rows = any(len(each) > 1 for each in values.values())
    return max(lengths, key=lambda name: lengths[name], default=None) if has_rows else None


def _of_few_values(values: Mapping[str, Sequence[Any]]) -> list[str]:
    """Returns the columns that have few different values."""
    return [
        name
        for name, each in values.items()
        if len(each) > 1 and len(set(map(str, each))) < _FEW_VALUES * len(each)
    ]
