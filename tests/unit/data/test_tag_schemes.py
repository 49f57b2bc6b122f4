"""Files of other schemes than IOB2 are read as IOB2, and a person is told."""

import json
from pathlib import Path

import pytest

from collapipe.data.cluster_rows import ClusterRows
from collapipe.data.sources import open_file
from collapipe.errors import InvalidInputError
from collapipe.job import DataConfig, JobConfig

IOB2 = ["B-x", "I-x", "B-x", "O", "B-y", "B-x"]
SCHEMES = {
    "IOB2": IOB2,
    "IOB1": ["I-x", "I-x", "B-x", "O", "I-y", "I-x"],
    "BIOES": ["B-x", "E-x", "S-x", "O", "S-y", "S-x"],
    "BILOU": ["B-x", "L-x", "U-x", "O", "U-y", "U-x"],
    "BMEWO": ["B-x", "E-x", "W-x", "O", "W-y", "W-x"],
}


def write(path: Path, *sentences: list[str]) -> str:
    if path.suffix == ".jsonl":
        rows = [{"tokens": ["a"] * len(tags), "tags": tags} for tags in sentences]
        path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    else:
        blocks = ["".join(f"a {tag}\n" for tag in tags) for tags in sentences]
        path.write_text("\n".join(blocks), encoding="utf-8")
    return str(path)


def read(path: str) -> tuple[list[tuple[str, ...]], str]:
    source = open_file(path, "ner", DataConfig())
    return [row.labels for row in source.read()], source.note


@pytest.mark.parametrize("suffix", ["conll", "jsonl"])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_every_scheme_is_read_as_iob2(tmp_path: Path, scheme: str, suffix: str) -> None:
    labels, note = read(write(tmp_path / f"a.{suffix}", ["O"], SCHEMES[scheme]))
    assert labels == [("O",), tuple(IOB2)]
    name = scheme if scheme in ("IOB2", "IOB1") else "BIOES"
    assert (f"its tags are {name}, and are read as IOB2" in note) == (scheme != "IOB2")


def test_parquet_is_converted_too(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    import pyarrow as pa  # type: ignore[import-untyped]
    import pyarrow.parquet as pq  # type: ignore[import-untyped]

    table = pa.table({"tokens": [["a"] * 6], "tags": [SCHEMES["BIOES"]]})
    pq.write_table(table, tmp_path / "a.parquet")
    labels, note = read(str(tmp_path / "a.parquet"))
    assert labels == [tuple(IOB2)]
    assert "BIOES" in note


def test_middle_of_an_entity_continues_it(tmp_path: Path) -> None:
    labels, _ = read(write(tmp_path / "a.conll", ["B-x", "M-x", "E-x", "S-x"]))
    assert labels == [("B-x", "I-x", "I-x", "B-x")]


def test_appended_rows_have_the_scheme_of_the_file(tmp_path: Path) -> None:
    path = write(tmp_path / "a.conll", SCHEMES["IOB1"])
    source = open_file(path, "ner", DataConfig())
    source.read()
    source.accept()
    with open(path, "a", encoding="utf-8") as file:
        file.write("\na I-z\n\n")
    [row] = source.read()
    assert row.labels == ("B-z",)


@pytest.mark.parametrize(
    ("tags", "message"),
    [
        (["B-x", "E-x", "I-x"], r":3: tag 'I-x' follows 'E-x'.*as BIOES does"),
        (["S-x", "E-x"], r":2: tag 'E-x' follows 'S-x'"),
        (["S-x", "Q-x"], r":2: tag 'Q-x' is not BIOES.*such as B-x"),
        (["B-x", "O", "I-x"], r":3: tag 'I-x' follows 'O'.*as IOB2 does"),
    ],
)
def test_tag_that_fits_no_scheme_is_named(tmp_path: Path, tags: list[str], message: str) -> None:
    with pytest.raises(InvalidInputError, match=message):
        read(write(tmp_path / "a.conll", tags))


def test_cluster_tells_what_was_converted(tmp_path: Path) -> None:
    data = {
        "train": write(tmp_path / "train.conll", SCHEMES["IOB1"]),
        "held_out": write(tmp_path / "held-out.conll", SCHEMES["IOB2"]),
    }
    job = JobConfig.from_dict({"task": {"kind": "ner"}, "data": data}, "job")
    rows = ClusterRows(job, 0)
    rows.read()
    [note] = rows.notes
    assert "train.conll: its tags are IOB1" in note
