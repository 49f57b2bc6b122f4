"""Files of values that are separated by commas or tabs, also while they grow."""

from pathlib import Path

import pytest

from collapipe.data.rows import Row, TaggedRow
from collapipe.data.sources import RowSource, open_file
from collapipe.errors import InvalidInputError
from collapipe.job import DataConfig

HEADER = "text,label\n"


def open_text(
    tmp_path: Path, content: str, name: str = "a.csv", kind: str = "classification"
) -> RowSource:
    path = tmp_path / name
    path.write_text(content, encoding="utf-8", newline="")
    return open_file(str(path), kind, DataConfig())


def append(source: RowSource, content: str) -> None:
    with Path(source.name).open("a", encoding="utf-8", newline="") as file:
        file.write(content)


def texts(source: RowSource) -> list[str]:
    """Reads and accepts rows; returns their input texts."""
    rows = source.read()
    source.accept()
    return [row.key for row in rows]


def test_quoted_values_may_have_separators_quotes_and_line_breaks(tmp_path: Path) -> None:
    content = '\ufefflabel,text\r\nwarm,"hot, he said\r\n""very"" hot"\r\n\r\n3,plain\r\n'
    source = open_text(tmp_path, content)
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
    [row] = open_text(tmp_path, content, name).read()
    assert (row.texts, row.labels) == (("a, b",), ("c",))


def test_words_and_tags_are_separated_by_spaces(tmp_path: Path) -> None:
    source = open_text(tmp_path, "tokens,tags\nAda runs,B-person O\n", kind="ner")
    words = ("Ada", "runs")
    assert source.read() == [TaggedRow(source.name, 2, ("Ada runs",), ("B-person", "O"), words)]


def test_long_text_is_read(tmp_path: Path) -> None:
    [row] = open_text(tmp_path, f"text\n{'a' * 200_000}\n", kind="causal_lm").read()
    assert len(row.key) == 200_000


@pytest.mark.parametrize(
    ("content", "kind", "message"),
    [
        (
            "text,lable\na,b\n",
            "classification",
            r"a\.csv:1: has no column 'label' \(columns found: 'text', 'lable'\): set data\.label_column=lable "
            r"\(did you mean 'lable'\?\), or rename the column in the file; the first line must name the columns$",
        ),
        ("Ada\tB-person\n", "ner", r"a\.csv:1: has no column 'text'.* name the file \.conll$"),
        ("text,text,label\n", "classification", r"a\.csv:1: names the column 'text' twice"),
        (
            "text,label\na,b\nhi, there,warm\nc,d\n",
            "classification",
            r"a\.csv:3: is not CSV \(3 values for 2 columns\): 'hi, there,warm'; put each value with ','.*double quotes",
        ),
        ('text,label\na,b\n"c,d\ne,f\n', "classification", r"a\.csv:3: is not CSV .*'\"c,d'"),
        ('text,label\n"a" b,c\nd,e\n', "classification", r"a\.csv:2: is not CSV"),
        ("text,label\na,\n", "classification", r"a\.csv:2: column 'label' is empty"),
        ("text,label\na b,O\n", "ner", r"a\.csv:2: 2 words in 'text' but 1 tags in 'label'"),
        ("text,label\na b,O B\n", "ner", r"a\.csv:2: tag 'B' is not IOB2"),
    ],
)
def test_malformed_file_is_refused_with_its_line(
    tmp_path: Path, content: str, kind: str, message: str
) -> None:
    with pytest.raises(InvalidInputError, match=message):
        open_text(tmp_path, content, kind=kind).read()


def test_appended_rows_are_read_alone_with_their_lines(tmp_path: Path) -> None:
    source = open_text(tmp_path, HEADER + "one,a\n")
    assert texts(source) == ["one"]
    append(source, "two,b\n")
    [row] = source.read()
    assert (row.key, row.line) == ("two", 3)
    source.accept()
    assert texts(source) == []


def test_row_waits_until_its_quote_is_closed(tmp_path: Path) -> None:
    source = open_text(tmp_path, HEADER + "one,a\n")
    texts(source)
    append(source, 'two,b\n"three\n')
    assert texts(source) == ["two"]
    append(source, 'lines",c\n')
    [row] = source.read()
    assert (row.key, row.line) == ("three\nlines", 4)


def test_half_written_last_line_is_left_for_the_next_reading(tmp_path: Path) -> None:
    source = open_text(tmp_path, HEADER + "one,a\ntw")
    assert texts(source) == ["one"]
    append(source, "o,b\n")
    assert texts(source) == ["two"]


def test_bad_appended_row_loses_nothing(tmp_path: Path) -> None:
    source = open_text(tmp_path, HEADER + "one,a\n")
    texts(source)
    before = Path(source.name).read_bytes()
    for wrong in ("two,b\nx\n", 'two,b\n"x" y,z\n'):
        append(source, wrong)
        for _ in range(2):
            with pytest.raises(InvalidInputError, match=r"a\.csv:4: is not CSV"):
                source.read()
        Path(source.name).write_bytes(before)
    append(source, "two,b\n")
    assert texts(source) == ["two"]
