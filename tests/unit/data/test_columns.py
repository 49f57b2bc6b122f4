"""Columns are found by the name that a setting gives, or by a usual name, and errors suggest the likely one."""

import json
from pathlib import Path
from typing import Any

import pytest

from collapipe.data.sources import open_file
from collapipe.errors import InvalidInputError
from collapipe.job import DataConfig


def read(tmp_path: Path, kind: str, record: dict[str, Any], **data: Any) -> tuple[str, ...]:
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps(record), encoding="utf-8")
    [row] = open_file(str(path), kind, DataConfig(**data)).read()
    return row.texts + row.labels


@pytest.mark.parametrize(
    ("kind", "record"),
    [
        ("classification", {"sentence": "a", "label": "b"}),
        ("ner", {"tokens": ["a"], "tags": ["O"]}),
        ("ner", {"words": ["a"], "ner_tags": ["O"]}),
        ("translation", {"source": "a", "target": "b"}),
        ("causal_lm", {"content": "a"}),
        ("instruction", {"question": "a", "answer": "b"}),
        ("instruction", {"prompt": "a", "response": "b"}),
    ],
)
def test_usual_names_are_found(tmp_path: Path, kind: str, record: dict[str, Any]) -> None:
    expected = tuple(value if isinstance(value, str) else value[0] for value in record.values())
    assert read(tmp_path, kind, record) == expected


def test_default_names_come_first(tmp_path: Path) -> None:
    record = {"source": "x", "target": "y", "en": "a", "de": "b"}
    assert read(tmp_path, "translation", record) == ("a", "b")


def test_setting_with_another_value_finds_only_this_name(tmp_path: Path) -> None:
    record = {"body": "a", "label": "b"}
    assert read(tmp_path, "classification", record, text_column="body") == ("a", "b")
    with pytest.raises(InvalidInputError, match=r"no column 'body' \(columns found: 'sentence'"):
        read(tmp_path, "classification", {"sentence": "a", "label": "b"}, text_column="body")


@pytest.mark.parametrize(
    ("record", "data", "hint"),
    [
        (
            {"text": "a", "lbel": "b", "id": "c"},
            {},
            r"data\.label_column=lbel \(did you mean 'lbel'",
        ),
        ({"text": "a", "intent": "b"}, {}, r"data\.label_column=intent \(did you mean 'intent'"),
        (
            {"text": "a", "b": "b", "c": "c"},
            {},
            r"data\.label_column to the name of one, or rename",
        ),
        (
            {"text": "a", "label": "b", "id": "c"},
            {"text_column": "txt"},
            r"no column 'txt' .*data\.text_column=text \(did you mean 'text'",
        ),
    ],
)
def test_likely_column_is_suggested(
    tmp_path: Path, record: dict[str, Any], data: dict[str, Any], hint: str
) -> None:
    with pytest.raises(InvalidInputError, match=hint):
        read(tmp_path, "classification", record, **data)
