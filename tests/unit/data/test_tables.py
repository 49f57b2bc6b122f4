"""Parquet files, folders that the library `datasets` has written, and data sets of the hub."""

import datetime
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
pyarrow = pytest.importorskip("pyarrow")
parquet = pytest.importorskip("pyarrow.parquet")

RECORDS = [{"text": "it is warm", "label": "warm"}, {"text": "it is cold", "label": "cold"}]
CLASSES = {"text": datasets.Value("string"), "label": datasets.ClassLabel(names=["cold", "warm"])}
HUB = DataConfig(source="hub", hub_name="some/set", train="train")


def table_of(records: list[dict[str, Any]], features: dict[str, Any] | None = None) -> Any:
    return datasets.Dataset.from_list(records, features=features and datasets.Features(features))


def read(path: Path, kind: str = "classification", **data: Any) -> list[Row]:
    return open_file(str(path), kind, DataConfig(**data)).read()


def rows_of(name: object) -> list[Row]:
    return [
        Row(str(name), 1, ("it is warm",), ("warm",)),
        Row(str(name), 2, ("it is cold",), ("cold",)),
    ]


def test_parquet_is_rows_with_their_numbers(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    table_of(2 * RECORDS).to_parquet(path)
    rows = read(path)
    assert rows[:2] == rows_of(path)
    assert [row.line for row in rows] == [1, 2, 3, 4]


def test_parquet_without_metadata_of_datasets_is_converted_to_iob2(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    table = pyarrow.table({"words": [["Ada", "runs"]], "ner_tags": [["S-person", "O"]]})
    parquet.write_table(table, path)
    source = open_file(str(path), "ner", DataConfig())
    [row] = source.read()
    assert isinstance(row, TaggedRow)
    assert (row.words, row.labels) == (("Ada", "runs"), ("B-person", "O"))
    assert source.facts.scheme == "BIOES"


def test_parquet_classes_get_their_names_and_a_file_that_is_stored_elsewhere_keeps_its_own(
    tmp_path: Path,
) -> None:
    numbers = [{"text": "it is warm", "label": 1}, {"text": "it is cold", "label": 0}]
    table_of(numbers, CLASSES).to_parquet(tmp_path / "0")
    source = open_file("mine.parquet", "classification", DataConfig(), [tmp_path / "0"])
    assert source.read() == rows_of("mine.parquet")


def test_texts_of_parquet_are_utf8_and_what_json_does_not_have_is_no_text(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    parquet.write_table(pyarrow.table({"text": ["\u96e8 \u2028 \U0001f600"], "label": [1]}), path)
    [row] = read(path)
    assert (row.texts, row.labels) == (("\u96e8 \u2028 \U0001f600",), ("1",))
    for value in (b"bytes", datetime.date(2026, 1, 31)):
        parquet.write_table(pyarrow.table({"text": [value], "label": [1]}), path)
        with pytest.raises(
            InvalidInputError, match=f"a.parquet:1: .*'text'.*{type(value).__name__}"
        ):
            read(path)


def test_saved_folder_is_rows_and_one_with_splits_names_them(tmp_path: Path) -> None:
    table = table_of(RECORDS)
    datasets.DatasetDict({"train": table, "test": table}).save_to_disk(tmp_path / "saved")
    with pytest.raises(InvalidInputError, match=r" train, test: .*saved/train$"):
        read(tmp_path / "saved")
    assert read(tmp_path / "saved/test") == rows_of(tmp_path / "saved/test")


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({"text": "x", "label": -1}, ":1: .*'label' .* -1, .* 0 to 1"),
        ({"text": "x", "label": None}, ":1: .*'label' .* None"),
        ({"text": None, "label": 1}, ":1: .*'text' is empty"),
    ],
)
def test_wrong_row_is_refused_with_its_number(
    tmp_path: Path, record: dict[str, Any], message: str
) -> None:
    table_of([record], CLASSES).to_parquet(tmp_path / "a.parquet")
    with pytest.raises(InvalidInputError, match=message):
        read(tmp_path / "a.parquet")


def test_missing_or_damaged_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidInputError, match=r"none\.parquet"):
        read(tmp_path / "none.parquet")
    (tmp_path / "a.parquet").write_bytes(b"PAR1 and no more")
    with pytest.raises(InvalidInputError, match=r"a\.parquet.* Parquet"):
        read(tmp_path / "a.parquet")
    with pytest.raises(InvalidInputError, match="save_to_disk.*hub_name"):
        read(tmp_path)


def test_without_the_package_the_remedy_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    (tmp_path / "state.json").write_text('{"_data_files": []}', encoding="utf-8")
    for path in (tmp_path / "a.parquet", tmp_path):
        with pytest.raises(InvalidInputError, match="pip install"):
            read(path)
    with pytest.raises(InvalidInputError, match="pip install datasets"):
        load_hub_rows("train", "classification", HUB)


# --- the hub


@pytest.mark.parametrize(
    ("kind", "record", "features", "columns", "texts", "labels"),
    [
        ("classification", {"text": "hot", "label": 1}, CLASSES, {}, ("hot",), ("warm",)),
        (
            "ner",
            {"tokens": ["a", "b"], "ner_tags": [0, 1]},
            {
                "tokens": datasets.List(datasets.Value("string")),
                "ner_tags": datasets.List(datasets.ClassLabel(names=["O", "B-x"])),
            },
            {"text_column": "tokens", "label_column": "ner_tags"},
            ("a b",),
            ("O", "B-x"),
        ),
        ("translation", {"translation": {"en": "a", "de": "b"}}, None, {}, ("a", "b"), ()),
    ],
    ids=["classification", "ner", "translation"],
)
def test_hub_classes_get_their_names_and_translations_may_be_nested(
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
    record: dict[str, Any],
    features: dict[str, Any] | None,
    columns: dict[str, str],
    texts: tuple[str, ...],
    labels: tuple[str, ...],
) -> None:
    offered = {("some/set", "train"): table_of([record], features)}
    monkeypatch.setattr(datasets, "load_dataset", lambda name, split: offered[name, split])
    [row] = load_hub_rows("train", kind, HUB.model_copy(update=columns)).rows
    assert (row.file, row.line) == ("some/set[train]", 1)
    assert (row.texts, row.labels) == (texts, labels)
    offered["some/set", "train"] = table_of([{"id": "x"}])
    with pytest.raises(InvalidInputError, match=r"some/set\[train\]:1: .*'id'"):
        load_hub_rows("train", kind, HUB)


def test_data_set_that_cannot_be_loaded_is_named_with_the_reason(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for error in (ConnectionError("no network"), ValueError("no such split")):

        def fail(*_: object, error: Exception = error, **__: object) -> None:
            raise error

        monkeypatch.setattr(datasets, "load_dataset", fail)
        with pytest.raises(InvalidInputError, match=f"'some/set', .*'train'.*{error}"):
            load_hub_rows("train", "classification", HUB)


def test_folder_and_cached_name_work_without_network_and_another_name_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("socket.socket.connect", lambda *_: pytest.fail("the network was used"))
    with pytest.raises(InvalidInputError, match=f"{tmp_path}/cache"):
        load_hub_rows("train", "classification", HUB)
    folder = tmp_path / "set"
    folder.mkdir()
    table_of(RECORDS).to_parquet(folder / "train-00000-of-00001.parquet")
    local = HUB.model_copy(update={"hub_name": str(folder)})
    assert load_hub_rows("train", "classification", local).rows == rows_of(f"{folder}[train]")
    cached = tmp_path / "cache/some___set/default/0.0.0"
    cached.mkdir(parents=True)
    Path(datasets.load_dataset_builder(str(folder)).cache_dir).rename(cached / "abc")
    assert load_hub_rows("train", "classification", HUB).rows == rows_of("some/set[train]")
