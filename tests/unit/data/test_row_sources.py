"""Files become rows, and the message for every mistake names file, line, value and remedy."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from collapipe.data.rows import Row, TaggedRow
from collapipe.data.sources import RowSource, open_file
from collapipe.errors import InvalidInputError
from collapipe.job import DataConfig

GOOD = '{"text": "it is warm", "label": "warm"}\n'
CONLL = "Ada B-person\nLovelace\tI-person\nruns O\n\nRain\tO\n"


def open_text(tmp_path: Path, name: str, content: str | bytes, kind: str) -> RowSource:
    path = tmp_path / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return open_file(str(path), kind, DataConfig())


def append(source: RowSource, content: str) -> None:
    with Path(source.name).open("a", encoding="utf-8", newline="") as file:
        file.write(content)


def tagged(file: str, line: int, words: tuple[str, ...], tags: tuple[str, ...]) -> TaggedRow:
    return TaggedRow(file, line, (" ".join(words),), tags, words)


def read_all(source: RowSource) -> list[str]:
    """Reads and accepts rows; returns their input texts."""
    rows = source.read()
    source.accept()
    return [row.key for row in rows]


def test_json_lines_are_rows_with_their_lines(tmp_path: Path) -> None:
    source = open_text(
        tmp_path, "a.jsonl", "\ufeff" + GOOD + "\n" + GOOD.replace('"warm"', "3"), "classification"
    )
    first, second = source.read()
    assert first == Row(source.name, 1, ("it is warm",), ("warm",))
    assert (second.group, second.place) == ("3", f"{source.name}:3")


def test_conll_is_sentences_separated_by_blank_lines(tmp_path: Path) -> None:
    source = open_text(tmp_path, "a.conll", CONLL.replace("\n", "\r\n"), "ner")
    assert source.read() == [
        tagged(source.name, 1, ("Ada", "Lovelace", "runs"), ("B-person", "I-person", "O")),
        tagged(source.name, 5, ("Rain",), ("O",)),
    ]


@pytest.mark.parametrize("separator", [" ", "\t"])
def test_conll_may_have_columns_between_word_and_tag(tmp_path: Path, separator: str) -> None:
    content = separator.join(["Ada", "NNP", "B-NP", "B-person"]) + "\n\n"
    source = open_text(tmp_path, "a.conll", content, "ner")
    assert source.read() == [tagged(source.name, 1, ("Ada",), ("B-person",))]
    source.accept()
    append(source, "Bob B-person\n\n")
    with pytest.raises(InvalidInputError, match=r"a\.conll:3: has 2 columns .* but needs 4"):
        source.read()


def test_ner_rows_in_json_lines(tmp_path: Path) -> None:
    source = open_text(tmp_path, "a.jsonl", '{"text": ["Ada"], "label": ["B-x"]}\n', "ner")
    assert source.read() == [tagged(source.name, 1, ("Ada",), ("B-x",))]


def test_parallel_files_are_pairs(tmp_path: Path) -> None:
    (tmp_path / "a.en").write_text("one\ntwo", encoding="utf-8")
    (tmp_path / "a.de").write_text("eins\nzwei\n", encoding="utf-8")
    source = open_file(f"{tmp_path}/a.en,{tmp_path}/a.de", "translation", DataConfig())
    name = f"{tmp_path}/a.en"
    assert source.read() == [Row(name, 1, ("one", "eins"), ()), Row(name, 2, ("two", "zwei"), ())]


@pytest.mark.parametrize(
    ("name", "kind", "content", "message"),
    [
        (
            "a.jsonl",
            "classification",
            GOOD + "{oops\n",
            r"a\.jsonl:2: is not JSON .*'\{oops'.*one object",
        ),
        ("a.jsonl", "classification", GOOD + "[1]\n", r"a\.jsonl:2: is '\[1\]', not a JSON object"),
        (
            "a.jsonl",
            "classification",
            GOOD + '{"text": "x", "intent": "y"}\n',
            r"a\.jsonl:2: has no column 'label' \(columns found: 'text', 'intent'\): set data",
        ),
        (
            "a.jsonl",
            "classification",
            '{"text": 5, "label": "y"}\n',
            r":1: column 'text' is 5, of type int",
        ),
        (
            "a.jsonl",
            "classification",
            '{"text": " ", "label": "y"}\n',
            r":1: column 'text' is empty",
        ),
        ("a.jsonl", "classification", '{"text": "a\\ud800", "label": "y"}\n', r":1: .*surrogate"),
        (
            "a.jsonl",
            "classification",
            GOOD.encode() + b'{"text": "caf\xe9", "label": "y"}\n',
            r"a\.jsonl:2: byte 0xe9 at position 14 of the line is not UTF-8: .*iconv",
        ),
        ("a.jsonl", "ner", '{"text": ["a", "b"], "label": ["O"]}\n', r":1: 2 words .* but 1 tags"),
        (
            "a.jsonl",
            "ner",
            '{"text": "a b", "label": ["O"]}\n',
            r":1: .*'a b', of type str.*list of",
        ),
        ("a.jsonl", "ner", '{"text": [], "label": []}\n', r":1: column 'text' is an empty list"),
        (
            "a.jsonl",
            "translation",
            '{"en": "a", "fr": "b"}\n',
            r"no column 'de' \(columns found: 'en', 'fr'\)",
        ),
        ("a.conll", "ner", "a O\nb NN B-x\n", r"a\.conll:2: has 3 columns \['b', 'NN', 'B-x'\]"),
        ("a.conll", "ner", "a O\nb\n", r"a\.conll:2: has 1 columns"),
        ("a.conll", "ner", "a O\nb X-y\n", r"a\.conll:2: tag 'X-y' is not IOB2"),
        ("a.conll", "ner", "a B-\n", r"a\.conll:1: tag 'B-' is not IOB2"),
        (
            "a.conll",
            "ner",
            "a O\nb I-y\n\nc B-z\n",
            r":2: tag 'I-y' follows 'O'.*open the entity with 'B-y'",
        ),
        ("a.conll", "ner", "a B-x\nb I-y\n", r":2: tag 'I-y' follows 'B-x'"),
        ("a.conll", "ner", "a B-x\n\nb I-x\n", r":3: tag 'I-x' follows 'O'"),
        ("a.conll", "ner", "\tO\n", r":1: the token is empty"),
    ],
)
def test_malformed_file_is_refused_with_its_line(
    tmp_path: Path, name: str, kind: str, content: str | bytes, message: str
) -> None:
    source = open_text(tmp_path, name, content, kind)
    with pytest.raises(InvalidInputError, match=message):
        source.read()


def test_missing_file_is_refused(tmp_path: Path) -> None:
    source = open_file(str(tmp_path / "none.jsonl"), "classification", DataConfig())
    with pytest.raises(InvalidInputError, match=r"none\.jsonl: cannot be read: No such file"):
        source.read()


@pytest.mark.parametrize(
    ("path", "kind"),
    [("a.json", "ner"), ("a.conll", "translation"), ("a.en,a.de", "classification")],
)
def test_unknown_format_is_refused_with_what_the_task_reads(path: str, kind: str) -> None:
    with pytest.raises(
        InvalidInputError, match=rf"{path}: .*format is not supported for {kind}: use"
    ):
        open_file(path, kind, DataConfig())


def test_unequal_parallel_files_are_refused_with_both_lengths(tmp_path: Path) -> None:
    (tmp_path / "a.en").write_text("one\ntwo\n", encoding="utf-8")
    (tmp_path / "a.de").write_text("eins\n", encoding="utf-8")
    source = open_file(f"{tmp_path}/a.en,{tmp_path}/a.de", "translation", DataConfig())
    with pytest.raises(InvalidInputError, match=r"a\.en has 2 lines but .*a\.de has 1"):
        source.read()


def test_empty_line_of_a_parallel_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.en").write_text("one\ntwo\n", encoding="utf-8")
    (tmp_path / "a.de").write_text("eins\n\n", encoding="utf-8")
    source = open_file(f"{tmp_path}/a.en,{tmp_path}/a.de", "translation", DataConfig())
    with pytest.raises(InvalidInputError, match=r"a\.de:2: the line is empty"):
        source.read()


def test_appended_lines_are_read_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = open_text(tmp_path, "a.jsonl", GOOD, "classification")
    assert read_all(source) == ["it is warm"]
    assert read_all(source) == []
    append(source, GOOD.replace("it is", "now"))
    parsed = []
    loads = json.loads

    def count(text: str) -> object:
        parsed.append(text)
        return loads(text)

    monkeypatch.setattr(json, "loads", count)
    [row] = source.read()
    assert (row.key, row.line) == ("now warm", 2)
    assert len(parsed) == 1


def test_half_written_last_line_is_left_for_the_next_reading(tmp_path: Path) -> None:
    source = open_text(tmp_path, "a.jsonl", GOOD, "classification")
    read_all(source)
    append(source, '{"text": "later", "label"')
    assert read_all(source) == []
    append(source, ': "warm"}\n')
    assert read_all(source) == ["later"]


def test_half_written_last_line_at_the_first_reading_is_left_too(tmp_path: Path) -> None:
    source = open_text(tmp_path, "a.jsonl", GOOD + '{"text": "later", "la', "classification")
    assert read_all(source) == ["it is warm"]
    append(source, 'bel": "warm"}\n')
    assert read_all(source) == ["later"]


def test_last_line_without_line_end_counts_at_the_first_reading(tmp_path: Path) -> None:
    source = open_text(tmp_path, "a.jsonl", GOOD + GOOD.strip(), "classification")
    assert len(read_all(source)) == 2
    append(source, "\n" + GOOD.replace("it is", "now"))
    [row] = source.read()
    assert (row.key, row.line) == ("now warm", 3)
    source.accept()
    append(source, GOOD)
    assert read_all(source) == ["it is warm"]


def test_continued_last_line_is_refused(tmp_path: Path) -> None:
    source = open_text(tmp_path, "a.jsonl", GOOD.strip(), "classification")
    read_all(source)
    append(source, GOOD)
    with pytest.raises(
        InvalidInputError, match=r"a\.jsonl:1: the line was the last, without line end"
    ):
        source.read()


def test_bad_appended_row_loses_nothing(tmp_path: Path) -> None:
    source = open_text(tmp_path, "a.jsonl", GOOD, "classification")
    read_all(source)
    before = Path(source.name).read_bytes()
    append(source, GOOD + "oops\n")
    for _ in range(2):
        with pytest.raises(InvalidInputError, match=r"a\.jsonl:3: is not JSON"):
            source.read()
    Path(source.name).write_bytes(before + 2 * GOOD.encode())
    assert len(read_all(source)) == 2


@pytest.mark.parametrize("content", ["", GOOD.replace("warm", "cold") + GOOD])
def test_changed_earlier_rows_are_refused(tmp_path: Path, content: str) -> None:
    source = open_text(tmp_path, "a.jsonl", GOOD, "classification")
    read_all(source)
    Path(source.name).write_text(content, encoding="utf-8")
    with pytest.raises(
        InvalidInputError, match=r"first 1 lines \(\d+ bytes\) have changed.*restore them"
    ):
        source.read()


def test_appended_sentence_waits_for_its_blank_line(tmp_path: Path) -> None:
    source = open_text(tmp_path, "a.conll", CONLL, "ner")
    assert read_all(source) == ["Ada Lovelace runs", "Rain"]
    append(source, "\nBob B-person\n")
    assert read_all(source) == []
    append(source, "sleeps O\n\n")
    assert read_all(source) == ["Bob sleeps"]


def test_sentence_that_continues_a_read_one_is_refused(tmp_path: Path) -> None:
    source = open_text(tmp_path, "a.conll", CONLL, "ner")
    read_all(source)
    append(source, "falls O\n\n")
    with pytest.raises(InvalidInputError, match=r"a\.conll:6: continues the sentence.*blank line"):
        source.read()


def test_appended_pairs_wait_for_both_files(tmp_path: Path) -> None:
    paths = tmp_path / "a.en", tmp_path / "a.de"
    for path in paths:
        path.write_text("one\n", encoding="utf-8")
    source = open_file(",".join(map(str, paths)), "translation", DataConfig())
    read_all(source)
    paths[0].write_text("one\ntwo\nthree\n", encoding="utf-8")
    assert read_all(source) == []
    paths[1].write_text("one\nzwei\n", encoding="utf-8")
    assert read_all(source) == ["two"]
    paths[1].write_text("one\nzwei\ndrei\n", encoding="utf-8")
    [row] = source.read()
    assert (row.texts, row.line) == (("three", "drei"), 3)


def test_reading_an_unchanged_file_opens_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = open_text(tmp_path, "a.jsonl", GOOD, "classification")
    read_all(source)

    def refuse(*_: object, **__: object) -> Callable[..., object]:
        raise AssertionError("opened")

    monkeypatch.setattr(Path, "open", refuse)
    assert source.read() == []
