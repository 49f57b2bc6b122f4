"""Tests of documents that survive a crash."""

import os
from pathlib import Path
from types import SimpleNamespace

import pytest

from collapipe import documents
from collapipe.documents import decode_json, hold_directory, read_document, write_document
from collapipe.errors import CorruptDataError, WrongStateError


def test_written_document_is_read_back(tmp_path: Path) -> None:
    document = {"a": [1, 2.5, None], "ü": {"b": "text"}}
    path = tmp_path / "folder" / "document.json"
    write_document(path, document)
    assert read_document(path) == document
    write_document(path, {})
    assert read_document(path) == {}


def test_absent_document_is_none(tmp_path: Path) -> None:
    assert read_document(tmp_path / "document.json") is None


DEEP = "[" * 100_000 + "]" * 100_000


@pytest.mark.parametrize("content", [b"", b'{"a": 1', b"[1]", b"null", b"\xff\xfe", DEEP.encode()])
def test_damaged_document_is_corrupt_and_named(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "document.json"
    path.write_bytes(content)
    with pytest.raises(CorruptDataError, match="document.json .*damaged"):
        read_document(path)


@pytest.mark.parametrize("text", ["[" * 100_000, DEEP, '{"a":' * 100_000])
def test_text_that_is_nested_too_deeply_is_as_wrong_as_any_other(text: str) -> None:
    for each in (text, text.encode()):
        with pytest.raises(ValueError, match=str(len(text))):
            decode_json(each)


@pytest.mark.parametrize("function", ["fsync", "replace"])
def test_interrupted_write_keeps_the_old_document_and_leaves_one_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, function: str
) -> None:
    path = tmp_path / "document.json"
    write_document(path, {"number": 1})
    with pytest.raises(TypeError):
        write_document(path, {"number": 2, "unwritable": object()})

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, function, interrupt)
    for number in (3, 4):
        with pytest.raises(KeyboardInterrupt):
            write_document(path, {"number": number})
    assert read_document(path) == {"number": 1}
    assert len(list(tmp_path.iterdir())) == 2


def test_directory_can_be_held_by_one_process_at_a_time(tmp_path: Path) -> None:
    state = tmp_path / "state"
    held = hold_directory(state, 0.0)
    with pytest.raises(WrongStateError, match=f"{state} .* {os.getpid()}"):
        hold_directory(state, 0.0)
    held.close()
    hold_directory(state, 0.0).close()


def test_waits_for_a_process_that_is_about_to_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = hold_directory(tmp_path, 0.0)
    time = SimpleNamespace(monotonic=lambda: 0.0, sleep=lambda seconds: held.close())
    monkeypatch.setattr(documents, "time", time)
    hold_directory(tmp_path, 30.0).close()


def test_nothing_is_held_without_a_directory() -> None:
    hold_directory(None).close()


def test_document_is_written_for_people_with_its_keys_in_order(tmp_path: Path) -> None:
    document = {"b": 1, "a": "Ä\n"}
    write_document(tmp_path / "document.json", document)
    text = (tmp_path / "document.json").read_text()
    assert text == '{\n  "a": "\\u00c4\\n",\n  "b": 1\n}\n'
    assert read_document(tmp_path / "document.json") == document
    write_document(tmp_path / "document.json", {})
    assert read_document(tmp_path / "document.json") == {}
