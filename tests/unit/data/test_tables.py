"""Parquet files, and folders and caches that the library `datasets` has written."""

import sys
from pathlib import Path
from typing import Any

import pytest

from collapipe.data.hub import load_hub_rows
from collapipe.data.rows import Row, TaggedRow
from collapipe.data.sources import open_file
from collapipe.errors import InvalidInputError
from collapipe.job import DataConfig

datasets = pytest.importorskip("datasets")

RECORDS = [{"text": "it is warm", "label": "warm"}, {"text": "it is cold", "label": "cold"}]
CLASSES = {"text": datasets.Value("string"), "label": datasets.ClassLabel(names=["cold", "warm"])}


def read(path: Path, kind: str = "classification", **data: Any) -> list[Row]:
    return open_file(str(path), kind, DataConfig(**data)).read()


def rows_of(name: object) -> list[Row]:
    return [
        Row(str(name), 1, ("it is warm",), ("warm",)),
        Row(str(name), 2, ("it is cold",), ("cold",)),
    ]


def test_parquet_is_rows_with_their_numbers(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    datasets.Dataset.from_list(2 * RECORDS).to_parquet(path)
    rows = read(path)
    assert rows[:2] == rows_of(path)
    assert [row.line for row in rows] == [1, 2, 3, 4]


def test_parquet_without_metadata_of_datasets(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    path = tmp_path / "a.parquet"
    table = pyarrow.table({"words": [["Ada", "runs"]], "ner_tags": [["B-person", "O"]]})
    pytest.importorskip("pyarrow.parquet").write_table(table, path)
    [row] = read(path, "ner")
    assert isinstance(row, TaggedRow)
    assert (row.words, row.labels) == (("Ada", "runs"), ("B-person", "O"))


def test_parquet_classes_get_their_names(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    numbers = [{"text": "it is warm", "label": 1}, {"text": "it is cold", "label": 0}]
    table = datasets.Dataset.from_list(numbers, features=datasets.Features(CLASSES))
    table.to_parquet(path)
    assert read(path) == rows_of(path)


def test_file_that_is_stored_elsewhere_keeps_its_name(tmp_path: Path) -> None:
    datasets.Dataset.from_list(RECORDS).to_parquet(tmp_path / "0")
    source = open_file("mine.parquet", "classification", DataConfig(), [tmp_path / "0"])
    assert source.read() == rows_of("mine.parquet")


def test_saved_folder_is_rows(tmp_path: Path) -> None:
    folder = tmp_path / "saved"
    datasets.Dataset.from_list(RECORDS).save_to_disk(folder)
    assert read(folder) == rows_of(folder)


def test_saved_folder_with_splits_names_them(tmp_path: Path) -> None:
    folder = tmp_path / "saved"
    table = datasets.Dataset.from_list(RECORDS)
    datasets.DatasetDict({"train": table, "test": table}).save_to_disk(folder)
    with pytest.raises(InvalidInputError, match=r"splits train, test: .* such as .*saved/train$"):
        read(folder)
    assert read(folder / "test") == rows_of(folder / "test")


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({"text": "x", "label": -1}, r":1: column 'label' has -1, .* classes 0 to 1: remove"),
        ({"text": "x", "label": None}, r":1: column 'label' has None"),
        ({"text": None, "label": 1}, r":1: column 'text' is empty: remove the row"),
    ],
)
def test_wrong_row_is_refused_with_its_number(
    tmp_path: Path, record: dict[str, Any], message: str
) -> None:
    table = datasets.Dataset.from_list([record], features=datasets.Features(CLASSES))
    table.to_parquet(tmp_path / "a.parquet")
    with pytest.raises(InvalidInputError, match=message):
        read(tmp_path / "a.parquet")


def test_missing_or_damaged_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidInputError, match=r"none\.parquet: cannot be read: there is no"):
        read(tmp_path / "none.parquet")
    (tmp_path / "a.parquet").write_bytes(b"PAR1 and no more")
    with pytest.raises(InvalidInputError, match=r"a\.parquet: cannot be read as Parquet"):
        read(tmp_path / "a.parquet")
    with pytest.raises(InvalidInputError, match=r"is a folder that `save_to_disk`.*hub_name"):
        read(tmp_path)


def test_without_the_package_the_remedy_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    for path in (tmp_path / "a.parquet", tmp_path):
        with pytest.raises(InvalidInputError, match="needs the package datasets: pip install"):
            read(path)


def hub(name: object) -> DataConfig:
    return DataConfig(source="hub", hub_name=str(name), train="train")


def test_folder_with_files_of_a_data_set_has_splits(tmp_path: Path) -> None:
    folder = tmp_path / "set"
    folder.mkdir()
    datasets.Dataset.from_list(RECORDS).to_parquet(folder / "train-00000-of-00001.parquet")
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
        assert load_hub_rows("train", "classification", hub(folder)) == rows_of(f"{folder}[train]")
