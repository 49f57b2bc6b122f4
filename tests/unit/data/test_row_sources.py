"""Files become rows, also while they grow, and the message for every mistake names file, line and value."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from collapipe.data.cluster_rows import ClusterRows
from collapipe.data.findings import Counted
from collapipe.data.rows import Row, TaggedRow
from collapipe.data.sources import RowSource, open_file
from collapipe.data.texts import read_texts
from collapipe.errors import InvalidInputError
from collapipe.job import DataConfig, JobConfig

GOOD = '{"text": "it is warm", "label": "warm"}\n'
NOW = GOOD.replace("it is", "now")
HEADER = "text,label\n"
CONLL = "Ada B-person\nLovelace\tI-person\nruns O\n\nRain\tO\n"


def open_text(
    tmp_path: Path, name: str, content: str | bytes, kind: str = "classification"
) -> RowSource:
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


def open_pair(tmp_path: Path, source: str, target: str) -> RowSource:
    (tmp_path / "a.en").write_text(source, encoding="utf-8")
    (tmp_path / "a.de").write_text(target, encoding="utf-8")
    return open_file(f"{tmp_path}/a.en,{tmp_path}/a.de", "translation", DataConfig())


def test_json_lines_are_rows_with_their_lines(tmp_path: Path) -> None:
    source = open_text(tmp_path, "a.jsonl", "\ufeff" + GOOD + "\n" + GOOD.replace('"warm"', "3"))
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
    with pytest.raises(InvalidInputError, match=r"a\.conll:3: .* 2 .* 4"):
        source.read()


def test_words_and_tags_are_lists_in_json_lines_and_separated_by_spaces_in_csv(
    tmp_path: Path,
) -> None:
    source = open_text(tmp_path, "a.jsonl", '{"text": ["Ada"], "label": ["B-x"]}\n', "ner")
    assert source.read() == [tagged(source.name, 1, ("Ada",), ("B-x",))]
    source = open_text(tmp_path, "a.csv", "tokens,tags\nAda runs,B-person O\n", "ner")
    assert source.read() == [tagged(source.name, 2, ("Ada", "runs"), ("B-person", "O"))]


def test_parallel_files_are_pairs(tmp_path: Path) -> None:
    source = open_pair(tmp_path, "one\ntwo", "eins\nzwei\n")
    name = f"{tmp_path}/a.en"
    assert source.read() == [Row(name, 1, ("one", "eins"), ()), Row(name, 2, ("two", "zwei"), ())]


def test_quoted_values_may_have_separators_quotes_and_line_breaks(tmp_path: Path) -> None:
    content = '\ufefflabel,text\r\nwarm,"hot, he said\r\n""very"" hot"\r\n\r\n3,plain\r\n'
    source = open_text(tmp_path, "a.csv", content)
    assert source.read() == [
        Row(source.name, 2, ('hot, he said\n"very" hot',), ("warm",)),
        Row(source.name, 5, ("plain",), ("3",)),
    ]


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.tsv", "text\tlabel\na, b\tc\n"),
        ("A.CSV", "text;label\na, b;c\n"),
        ("a.csv", 'text,label\n"a, b",c\n'),
    ],
)
def test_separator_is_that_of_the_first_line(tmp_path: Path, name: str, content: str) -> None:
    [row] = open_text(tmp_path, name, content).read()
    assert (row.texts, row.labels) == (("a, b",), ("c",))


def test_long_text_is_read(tmp_path: Path) -> None:
    [row] = open_text(tmp_path, "a.csv", f"text\n{'a' * 200_000}\n", "causal_lm").read()
    assert len(row.key) == 200_000


MALFORMED: dict[tuple[str, str], list[tuple[str | bytes, str]]] = {
    ("a.jsonl", "classification"): [
        (GOOD + "{oops\n", r":2: .*'\{oops'"),
        (GOOD + "[1]\n", r":2: is '\[1\]'"),
        (GOOD + '{"text": "x", "intent": "y"}\n', ":2: .*'label' .*'text', 'intent'"),
        ('{"text": 5, "label": "y"}\n', ":1: .*'text' is 5.* int"),
        ('{"text": " ", "label": "y"}\n', ":1: .*'text' is empty"),
        ('{"text": "a\\ud800", "label": "y"}\n', ":1: .*surrogate"),
        (GOOD.encode() + b'{"text": "caf\xe9", "label": "y"}\n', ":2: .* 0xe9 .* 14 "),
    ],
    ("a.jsonl", "ner"): [
        ('{"text": ["a", "b"], "label": ["O"]}\n', ":1: 2 words .* 1 tags"),
        ('{"text": "a b", "label": ["O"]}\n', ":1: .*'a b', of type str"),
        ('{"text": [], "label": []}\n', ":1: .*'text' .*empty"),
    ],
    ("a.conll", "ner"): [
        ("a O\nb NN B-x\n", r":2: .* 3 .*\['b', 'NN', 'B-x'\]"),
        ("a O\nb\n", ":2: has 1 columns"),
        ("a O\nb X-y\n", ":2: tag 'X-y'"),
        ("a B-\n", ":1: tag 'B-'"),
        ("a O\nb I-y\n\nc B-z\n", ":2: tag 'I-y' .*'O'.*'B-y'"),
        ("a B-x\nb I-y\n", ":2: tag 'I-y' .*'B-x'"),
        ("a B-x\n\nb I-x\n", ":3: tag 'I-x' .*'O'"),
        ("\tO\n", ":1: .*empty"),
    ],
    ("a.csv", "classification"): [
        ("text,lable\na,b\n", r":1: .*data\.label_column=lable"),
        ("text,text,label\n", ":1: .*'text'"),
        ("text\tlabel\na\tb\n", r":1: .*\.tsv"),
        ("text,label\na,b\nhi, there,warm\n", ":3: .*3 .* 2 .*'hi, there"),
        ('text,label\na,b\n"c,d\ne,f\n', ":3: .*CSV .*'\"c,d'"),
        ('text,label\n"a" b,c\nd,e\n', ":2: .*CSV"),
        ("text,label\na,\n", ":2: .*'label'"),
    ],
    ("a.csv", "ner"): [
        ("Ada\tB-person\n", r":1: .*'text'.*\.conll"),
        ("text,label\na b,O\n", ":2: 2 words .* 1 tags"),
        ("text,label\na b,O B\n", ":2: tag 'B'"),
    ],
}
"""For a file and a kind of task: contents, and what the error says behind the name of the file."""


@pytest.mark.parametrize(
    ("name", "kind", "content", "message"),
    [(*key, *case) for key, cases in MALFORMED.items() for case in cases],
)
def test_malformed_file_is_refused_with_its_line(
    tmp_path: Path, name: str, kind: str, content: str | bytes, message: str
) -> None:
    with pytest.raises(InvalidInputError, match=name + message):
        open_text(tmp_path, name, content, kind).read()


@pytest.mark.parametrize(
    ("source", "target", "message"),
    [
        ("one\ntwo\n", "eins\n", r"a\.en has 2 .*a\.de has 1"),
        ("one\ntwo\n", "eins\n\n", r"a\.de:2: "),
    ],
)
def test_malformed_parallel_files_are_refused(
    tmp_path: Path, source: str, target: str, message: str
) -> None:
    with pytest.raises(InvalidInputError, match=message):
        open_pair(tmp_path, source, target).read()


def test_missing_file_is_refused(tmp_path: Path) -> None:
    source = open_file(str(tmp_path / "none.jsonl"), "classification", DataConfig())
    with pytest.raises(InvalidInputError, match=r"none\.jsonl"):
        source.read()


@pytest.mark.parametrize(
    ("path", "kind", "known"),
    [
        ("a.xml", "ner", r"\.conll"),
        ("a.conll", "translation", r"\.jsonl"),
        ("a.en,a.de", "classification", r"\.jsonl"),
        ("a.txt", "instruction", r"\.jsonl"),
        ("a.conll", "causal_lm", r"\.txt"),
    ],
)
def test_unknown_format_is_refused_with_what_the_task_reads(
    path: str, kind: str, known: str
) -> None:
    with pytest.raises(InvalidInputError, match=rf"{path}: .*{kind}: use .*{known}"):
        open_file(path, kind, DataConfig())


# --- columns


def read_record(tmp_path: Path, kind: str, record: dict[str, Any], **data: Any) -> Sequence[str]:
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
        ("translation", {"en": "a", "de": "b", "source": "x", "target": "y"}),
        ("causal_lm", {"content": "a"}),
        ("instruction", {"question": "a", "answer": "b"}),
        ("instruction", {"prompt": "a", "response": "b"}),
    ],
)
def test_columns_with_usual_names_are_found(
    tmp_path: Path, kind: str, record: dict[str, Any]
) -> None:
    expected = [value if isinstance(value, str) else value[0] for value in record.values()]
    assert list(read_record(tmp_path, kind, record)) == expected[:2]


@pytest.mark.parametrize(
    ("record", "data", "hint"),
    [
        ({"text": "a", "lbel": "b", "id": "c"}, {}, r"data\.label_column=lbel,"),
        ({"text": "a", "queue": "b"}, {}, r"data\.label_column=queue,"),
        ({"text": "a", "b": "b", "c": "c"}, {}, r"data\.label_column to "),
        (
            {"text": "a", "label": "b", "id": "c"},
            {"text_column": "txt"},
            "'txt' .*text_column=text,",
        ),
        ({"sentence": "a", "label": "b"}, {"text_column": "body"}, "'body' .*'sentence'"),
    ],
)
def test_likely_column_is_suggested(
    tmp_path: Path, record: dict[str, Any], data: dict[str, Any], hint: str
) -> None:
    with pytest.raises(InvalidInputError, match=hint):
        read_record(tmp_path, "classification", record, **data)


@pytest.mark.parametrize(
    ("name", "content", "texts"),
    [
        ("a.txt", " one \n\ttwo\n", [" one ", "\ttwo"]),
        ("a.jsonl", '{"text": "one:\\n"}\n{"text": " two"}\n', ["one:\n", " two"]),
        ("a.csv", 'text\n"one:\n"\n two \n', ["one:\n", " two "]),
    ],
)
def test_texts_to_answer_keep_their_blanks(
    tmp_path: Path, name: str, content: str, texts: list[str]
) -> None:
    (tmp_path / name).write_text(content, encoding="utf-8")
    assert read_texts(tmp_path / name, "text")[0] == texts


def test_column_of_a_setting_is_read_and_its_option_of_the_command_is_named(tmp_path: Path) -> None:
    record = {"words": "a", "label": "b"}
    assert read_record(tmp_path, "classification", record, text_column="words") == ("a", "b")
    path = tmp_path / "rows.csv"
    path.write_text("words\nhello\n", encoding="utf-8")
    assert read_texts(path, "words") == (["hello"], [])
    with pytest.raises(InvalidInputError, match="'words'.*--column=words,"):
        read_texts(path, "text")
    path.write_text("words,queue\nhello,a\n", encoding="utf-8")
    with pytest.raises(InvalidInputError, match="--column to "):
        read_texts(path, "text")


# --- growing files


def test_appended_lines_are_read_alone_and_an_unchanged_file_is_not_opened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = open_text(tmp_path, "a.jsonl", GOOD)
    assert read_all(source) == ["it is warm"]
    with monkeypatch.context() as patched:
        patched.setattr(Path, "open", lambda *_, **__: pytest.fail("opened"))
        assert source.read() == []
    append(source, NOW)
    parsed = []
    loads = json.loads

    def count(text: str, **options: Any) -> object:
        parsed.append(text)
        return loads(text, **options)

    monkeypatch.setattr(json, "loads", count)
    [row] = source.read()
    assert (row.key, row.line) == ("now warm", 2)
    assert len(parsed) == 1


def test_appended_row_of_csv_waits_until_its_quote_is_closed(tmp_path: Path) -> None:
    source = open_text(tmp_path, "a.csv", HEADER + "one,a\n")
    assert read_all(source) == ["one"]
    append(source, 'two,b\n"three\n')
    assert read_all(source) == ["two"]
    append(source, 'lines",c\n')
    [row] = source.read()
    assert (row.key, row.line) == ("three\nlines", 4)
    source.accept()
    assert read_all(source) == []


@pytest.mark.parametrize(
    ("name", "first", "half", "rest"),
    [
        ("a.jsonl", GOOD, '{"text": "now warm", "la', 'bel": "warm"}\n'),
        ("a.csv", HEADER + "it is warm,a\n", "now wa", "rm,b\n"),
    ],
)
@pytest.mark.parametrize("is_first", [True, False])
def test_half_written_last_line_is_left_for_the_next_reading(
    tmp_path: Path, name: str, first: str, half: str, rest: str, is_first: bool
) -> None:
    source = open_text(tmp_path, name, first + half * is_first)
    assert read_all(source) == ["it is warm"]
    if not is_first:
        append(source, half)
        assert read_all(source) == []
    append(source, rest)
    assert read_all(source) == ["now warm"]


def test_last_line_without_line_end_counts_at_the_first_reading(tmp_path: Path) -> None:
    source = open_text(tmp_path, "a.jsonl", GOOD + GOOD.strip())
    assert len(read_all(source)) == 2
    append(source, "\n" + NOW)
    [row] = source.read()
    assert (row.key, row.line) == ("now warm", 3)
    source.accept()
    append(source, GOOD)
    assert read_all(source) == ["it is warm"]


def test_continued_last_line_is_refused(tmp_path: Path) -> None:
    source = open_text(tmp_path, "a.jsonl", GOOD.strip())
    read_all(source)
    append(source, GOOD)
    with pytest.raises(InvalidInputError, match=r"a\.jsonl:1: "):
        source.read()


@pytest.mark.parametrize(
    ("name", "first", "wrong", "good", "place"),
    [
        ("a.jsonl", GOOD, GOOD + "oops\n", NOW, r"a\.jsonl:3: .*JSON"),
        ("a.csv", HEADER + "x,a\n", "two,b\nx\n", "now warm,b\n", r"a\.csv:4: .*CSV"),
        ("a.csv", HEADER + "x,a\n", 'two,b\n"x" y,z\n', "now warm,b\n", r"a\.csv:4: .*CSV"),
    ],
)
def test_bad_appended_row_loses_nothing(
    tmp_path: Path, name: str, first: str, wrong: str, good: str, place: str
) -> None:
    source = open_text(tmp_path, name, first)
    read_all(source)
    append(source, wrong)
    for _ in range(2):
        with pytest.raises(InvalidInputError, match=place):
            source.read()
    Path(source.name).write_text(first + 2 * good, encoding="utf-8")
    assert read_all(source) == ["now warm", "now warm"]


@pytest.mark.parametrize("content", ["", GOOD.replace("warm", "cold") + GOOD])
def test_changed_earlier_rows_are_refused(tmp_path: Path, content: str) -> None:
    source = open_text(tmp_path, "a.jsonl", GOOD)
    read_all(source)
    Path(source.name).write_text(content, encoding="utf-8")
    with pytest.raises(InvalidInputError, match=rf" 1 lines \({len(GOOD)} bytes\)"):
        source.read()


def test_appended_sentence_waits_for_its_blank_line_and_does_not_continue_a_read_one(
    tmp_path: Path,
) -> None:
    source = open_text(tmp_path, "a.conll", CONLL, "ner")
    assert read_all(source) == ["Ada Lovelace runs", "Rain"]
    append(source, "falls O\n\n")
    with pytest.raises(InvalidInputError, match=r"a\.conll:6: "):
        source.read()
    Path(source.name).write_text(CONLL + "\nBob B-person\n", encoding="utf-8")
    assert read_all(source) == []
    append(source, "sleeps O\n\n")
    assert read_all(source) == ["Bob sleeps"]


def test_appended_pairs_wait_for_both_files(tmp_path: Path) -> None:
    source = open_pair(tmp_path, "one\n", "one\n")
    read_all(source)
    (tmp_path / "a.en").write_text("one\ntwo\nthree\n", encoding="utf-8")
    assert read_all(source) == []
    (tmp_path / "a.de").write_text("one\nzwei\n", encoding="utf-8")
    assert read_all(source) == ["two"]
    (tmp_path / "a.de").write_text("one\nzwei\ndrei\n", encoding="utf-8")
    [row] = source.read()
    assert (row.texts, row.line) == (("three", "drei"), 3)


# --- schemes of tags


IOB2 = ["B-x", "I-x", "B-x", "O", "B-y", "B-x"]
SCHEMES = {
    "IOB2": IOB2,
    "IOB1": ["I-x", "I-x", "B-x", "O", "I-y", "I-x"],
    "BIOES": ["B-x", "E-x", "S-x", "O", "S-y", "S-x"],
    "BILOU": ["B-x", "L-x", "U-x", "O", "U-y", "U-x"],
    "BMEWO": ["B-x", "E-x", "W-x", "O", "W-y", "W-x"],
    "BMES": ["B-x", "M-x", "S-x", "O", "S-y", "S-x"],
}


def write_tags(path: Path, *sentences: list[str]) -> str:
    if path.suffix == ".jsonl":
        rows = [{"tokens": ["a"] * len(tags), "tags": tags} for tags in sentences]
        path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    else:
        blocks = ["".join(f"a {tag}\n" for tag in tags) for tags in sentences]
        path.write_text("\n".join(blocks), encoding="utf-8")
    return str(path)


def read_tags(path: str) -> tuple[list[tuple[str, ...]], str]:
    source = open_file(path, "ner", DataConfig())
    return [row.labels for row in source.read()], source.facts.scheme


@pytest.mark.parametrize("suffix", ["conll", "jsonl"])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_every_scheme_is_read_as_iob2(tmp_path: Path, scheme: str, suffix: str) -> None:
    labels, found = read_tags(write_tags(tmp_path / f"a.{suffix}", ["O"], SCHEMES[scheme]))
    assert labels == [("O",), tuple(IOB2)]
    assert found == (scheme if scheme in ("IOB2", "IOB1") else "BIOES")


def test_appended_rows_have_the_scheme_of_the_file(tmp_path: Path) -> None:
    source = open_file(write_tags(tmp_path / "a.conll", SCHEMES["IOB1"]), "ner", DataConfig())
    read_all(source)
    append(source, "\na I-z\n\n")
    [row] = source.read()
    assert row.labels == ("B-z",)


@pytest.mark.parametrize(
    ("tags", "message"),
    [
        (["B-x", "E-x", "I-x"], ":3: .*'I-x' .*'E-x'.* BIOES"),
        (["S-x", "E-x"], ":2: .*'E-x' .*'S-x'"),
        (["S-x", "Q-x"], ":2: .*'Q-x' .* BIOES"),
        (["B-x", "O", "I-x"], ":3: .*'I-x' .*'O'.* IOB2"),
    ],
)
def test_tag_that_fits_no_scheme_is_named(tmp_path: Path, tags: list[str], message: str) -> None:
    with pytest.raises(InvalidInputError, match=message):
        read_tags(write_tags(tmp_path / "a.conll", tags))


def test_cluster_tells_what_was_converted(tmp_path: Path) -> None:
    data = {
        "train": write_tags(tmp_path / "train.conll", SCHEMES["IOB1"]),
        "held_out": write_tags(tmp_path / "held-out.conll", SCHEMES["IOB2"]),
    }
    job = JobConfig.from_dict({"task": {"kind": "ner"}, "data": data}, "job")
    rows = ClusterRows(job, 0)
    rows.read()
    [note] = [each for each in rows.findings if " IOB1," in each.what]
    assert note.place == data["train"]


# --- values and lines that mislead


def test_texts_to_answer_come_with_what_was_found_in_their_file(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    path.write_text('Utterance\none\n"two\nthree"\n', encoding="utf-8")
    texts, found = read_texts(path, "text")
    assert texts == ["one", "two\nthree"]
    spanning, columns = found
    assert f"{path}:3: " in spanning and "4 lines, 2 rows" in spanning
    assert "--column=Utterance" in columns


@pytest.mark.parametrize("suffix", ["csv", "tsv"])
def test_value_over_several_lines_is_refused_in_tsv_and_named_in_csv(
    tmp_path: Path, suffix: str
) -> None:
    separator = "\t" if suffix == "tsv" else ","
    lines = ["text\tlabel", "zero\tneg", '"one\tpos', 'two"\tneg', "three\tpos"]
    source = open_text(tmp_path, f"a.{suffix}", "\n".join(lines).replace("\t", separator) + "\n")
    if suffix == "tsv":
        with pytest.raises(InvalidInputError, match=r"a\.tsv:3: .* 2 lines, up to line 4"):
            source.read()
        return
    rows = source.read()
    facts = source.facts
    assert [row.labels for row in rows] == [("neg",), ("neg",), ("pos",)]
    assert (facts.num_lines, facts.num_rows) == (5, 3)
    assert (facts.spanning, facts.spanning_rows) == (Counted(1, f"{source.name}:3"),) * 2


def test_text_of_several_lines_looks_like_no_rows(tmp_path: Path) -> None:
    source = open_text(tmp_path, "a.csv", 'id,text,label\n1,"good\nday, he said",pos\n')
    assert len(source.read()) == 1
    assert (source.facts.spanning.number, source.facts.spanning_rows.number) == (1, 0)


def test_open_quote_in_an_appended_line_of_tsv_is_refused_at_once(tmp_path: Path) -> None:
    source = open_text(tmp_path, "a.tsv", "text\tlabel\none\ta\n")
    read_all(source)
    append(source, '"two\tb\n')
    with pytest.raises(InvalidInputError, match=r"a\.tsv:3: .*CSV"):
        source.read()


@pytest.mark.parametrize(
    "label",
    ["caf\u00e9", " caf\u00e9", "caf\u00e9 ", "caf\u00e9\u00a0", "cafe\u0301", "\tcaf\u00e9"],
)
@pytest.mark.parametrize("suffix", ["csv", "jsonl"])
def test_blanks_around_a_label_and_ways_to_write_an_accent_make_no_class(
    tmp_path: Path, suffix: str, label: str
) -> None:
    content = (
        f"text, label\nx,{label}\n"
        if suffix == "csv"
        else json.dumps({"text": "x", "label": label}) + "\n"
    )
    [row] = open_text(tmp_path, f"a.{suffix}", content).read()
    assert row.labels == ("caf\u00e9",)


def test_tag_with_another_way_to_write_an_accent_is_the_same_type(tmp_path: Path) -> None:
    source = open_text(tmp_path, "a.conll", "a\tB-caf\u00e9\nb\tI-cafe\u0301\u00a0\n", "ner")
    [row] = source.read()
    assert row.labels == ("B-caf\u00e9", "I-caf\u00e9")


@pytest.mark.parametrize(
    ("value", "label"), [("3", "3"), ("true", "true"), ("1.0", "1.0"), ("-2", "-2")]
)
def test_number_or_truth_value_is_a_label_as_json_writes_it(
    tmp_path: Path, value: str, label: str
) -> None:
    [row] = open_text(tmp_path, "a.jsonl", f'{{"text": "x", "label": {value}}}\n').read()
    assert row.labels == (label,)


@pytest.mark.parametrize("end", ["\n\n", "\n"])
def test_starts_of_documents_are_no_sentences(tmp_path: Path, end: str) -> None:
    start = f"-DOCSTART- -X- -X- O{end}"
    source = open_text(
        tmp_path,
        "a.conll",
        f"{start}Ada NNP B-NP B-x\nruns V B-VP O\n{start}Bob NNP B-NP B-x\n",
        "ner",
    )
    rows = source.read()
    assert [row.key for row in rows] == ["Ada runs", "Bob"]
    assert source.facts.document_starts == Counted(2, f"{source.name}:1")


def test_start_of_a_document_as_a_row_of_its_own_is_left_out(tmp_path: Path) -> None:
    rows = [{"tokens": [word], "tags": ["O"]} for word in ("-DOCSTART-", "Ada")]
    source = open_text(tmp_path, "a.jsonl", "".join(json.dumps(row) + "\n" for row in rows), "ner")
    assert [(row.key, row.line) for row in source.read()] == [("Ada", 2)]
    assert source.facts.document_starts == Counted(1, f"{source.name}:1")


@pytest.mark.parametrize(
    ("name", "kind", "content"),
    [
        ("a.txt", "causal_lm", "one\rtwo\rthree"),
        ("a.txt", "causal_lm", "one\ntwo\rthree\n"),
        ("a.csv", "classification", "text,label\ra,b\r"),
        ("a.jsonl", "classification", GOOD.replace("\n", "\r") * 2),
        ("a.conll", "ner", "a O\rb O\r"),
    ],
)
def test_carriage_return_alone_as_a_line_end_is_refused(
    tmp_path: Path, name: str, kind: str, content: str
) -> None:
    with pytest.raises(InvalidInputError, match=r"carriage return.*tr '"):
        open_text(tmp_path, name, content, kind).read()


def test_carriage_return_in_a_value_of_csv_stays(tmp_path: Path) -> None:
    [row] = open_text(tmp_path, "a.csv", 'text,label\n"a\rb",c\n').read()
    assert row.key == "a\rb"


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.ndjson", GOOD + NOW),
        ("a.json", GOOD + NOW),
        ("a.json", f"\ufeff [{GOOD.strip()},\n{NOW}]"),
    ],
)
def test_json_has_several_names_and_may_be_an_array(
    tmp_path: Path, name: str, content: str
) -> None:
    source = open_text(tmp_path, name, content)
    assert [(row.key, row.line) for row in source.read()] == [("it is warm", 1), ("now warm", 2)]


@pytest.mark.parametrize(
    ("content", "message"),
    [("[1]", r":1: is 1\b"), ("[{}", "JSON array"), ("{\n}", ":1: is not JSON")],
)
def test_wrong_json_is_refused(tmp_path: Path, content: str, message: str) -> None:
    with pytest.raises(InvalidInputError, match=rf"a\.json.*{message}"):
        open_text(tmp_path, "a.json", content).read()


@pytest.mark.parametrize(("suffix", "remedy"), [("jsonl.gz", "gunzip"), ("csv.zip", "unzip")])
def test_compressed_file_is_refused_with_what_unpacks_it(
    tmp_path: Path, suffix: str, remedy: str
) -> None:
    with pytest.raises(InvalidInputError, match=f"compressed.*{remedy}"):
        open_text(tmp_path, f"a.{suffix}", b"\x1f\x8b")


# --- guesses


def csv_of(columns: dict[str, list[str]]) -> str:
    rows = [",".join(columns), *(",".join(row) for row in zip(*columns.values(), strict=True))]
    return "\n".join(rows) + "\n"


TEXTS = [f"where is my card number {number}" for number in range(8)]
CLASSES = ["lost", "found"] * 4


@pytest.mark.parametrize(
    "names", [("utterance", "intent"), ("Review", "Sentiment"), ("tweet", "CATEGORY")]
)
@pytest.mark.parametrize("text_first", [True, False])
def test_usual_names_are_taken_and_told(
    tmp_path: Path, names: tuple[str, str], text_first: bool
) -> None:
    columns = dict(zip(names, (TEXTS, CLASSES), strict=True))
    given = columns if text_first else dict(reversed(columns.items()))
    source = open_text(tmp_path, "a.csv", csv_of(given))
    rows = source.read()
    assert [(row.key, row.labels[0]) for row in rows] == list(zip(TEXTS, CLASSES, strict=True))
    assert source.facts.columns == f"data.text_column={names[0]} and data.label_column={names[1]}"


@pytest.mark.parametrize("suffix", ["csv", "jsonl"])
@pytest.mark.parametrize("names", [("a", "b"), ("b", "a"), ("what", "txt")])
def test_column_of_few_values_is_never_offered_as_text(
    tmp_path: Path, names: tuple[str, str], suffix: str
) -> None:
    columns = {names[0]: TEXTS, names[1]: CLASSES}
    rows = [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
    as_json = "".join(json.dumps(row) + "\n" for row in rows)
    content = csv_of(columns) if suffix == "csv" else as_json
    source = open_text(tmp_path, f"a.{suffix}", content)
    hint = f"text_column={names[0]} and .*label_column={names[1]},"
    with pytest.raises(InvalidInputError, match=hint):
        source.read()


def test_file_without_a_line_of_names_gets_an_option_that_a_shell_reads_and_the_other_remedy(
    tmp_path: Path,
) -> None:
    content = "".join(f"{text},{name}\n" for text, name in zip(TEXTS, CLASSES, strict=True))
    with pytest.raises(InvalidInputError) as refused:
        open_text(tmp_path, "a.csv", content).read()
    assert f"data.text_column='{TEXTS[0]}' and" in str(refused.value)
    assert "first line" in str(refused.value)


def test_line_that_is_no_csv_does_not_hide_the_columns_that_are_missing(tmp_path: Path) -> None:
    content = csv_of({"what": TEXTS, "which": CLASSES}) + "a\rb,lost\n"
    with pytest.raises(InvalidInputError, match=r"text_column=what .*label_column=which"):
        open_text(tmp_path, "a.csv", content).read()


def test_column_of_few_values_is_not_taken_as_text_for_its_usual_name(tmp_path: Path) -> None:
    content = csv_of({"title": CLASSES, "remark": TEXTS, "class": CLASSES})
    with pytest.raises(InvalidInputError, match="text_column=remark,"):
        open_text(tmp_path, "a.csv", content).read()


@pytest.mark.parametrize("is_array", [False, True])
def test_column_that_the_first_record_lacks_is_not_dropped(tmp_path: Path, is_array: bool) -> None:
    """An Alpaca row whose `input` is empty may lack it."""
    records = [{"instruction": "name a river", "output": "Elbe"}] * 2
    records.append({"instruction": "translate", "input": "a river", "output": "ein Fluss"})
    lines = "\n".join(map(json.dumps, records))
    text = json.dumps(records) if is_array else f"\n{lines}\n"
    with pytest.raises(InvalidInputError, match=r"found: 'instruction', 'output', 'input'\)"):
        open_text(tmp_path, "a.json", text, "instruction").read()


def test_two_columns_with_usual_names_are_not_guessed(tmp_path: Path) -> None:
    content = csv_of({"title": TEXTS, "body": TEXTS, "class": CLASSES})
    with pytest.raises(InvalidInputError, match="has no column 'text'"):
        open_text(tmp_path, "a.csv", content).read()


@pytest.mark.parametrize(
    ("kind", "columns"),
    [
        ("instruction", ("Question", "Answer")),
        ("instruction", ("Prompt", "Completion")),
        ("translation", ("EN", "DE")),
        ("translation", ("Source", "tgt")),
        ("causal_lm", ("Text",)),
    ],
)
def test_names_in_another_case_are_the_same(
    tmp_path: Path, kind: str, columns: tuple[str, ...]
) -> None:
    record = dict(zip(columns, ("one", "two"), strict=False))
    assert list(read_record(tmp_path, kind, record)) == list(record.values())


def test_prompt_is_not_guessed_beside_what_may_belong_to_it(tmp_path: Path) -> None:
    row = {"instruction": "sum", "output": "3"}
    assert read_record(tmp_path, "instruction", row) == ("sum", "3")
    with pytest.raises(InvalidInputError, match="'prompt'"):
        read_record(tmp_path, "instruction", {"instruction": "sum", "input": "1 2", "output": "3"})


def test_bars_separate_values_if_the_header_has_no_other_separator(tmp_path: Path) -> None:
    [row] = open_text(tmp_path, "a.csv", "text|label\na, b; c|d\n").read()
    assert (row.texts, row.labels) == (("a, b; c",), ("d",))
