"""Data sets that a job names: of the hub and of the standard library."""

import sys
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from collapipe.data.hub import load_hub_rows
from collapipe.data.rows import Row, TaggedRow
from collapipe.data.stdlib_docstrings import load_docstrings
from collapipe.errors import InvalidInputError
from collapipe.job import DataConfig, JobConfig
from collapipe.tasks import load_task

datasets = pytest.importorskip("datasets")
HUB = DataConfig(source="hub", hub_name="some/set", train="train")


def offer(monkeypatch: pytest.MonkeyPatch, records: list[dict[str, Any]], features: Any) -> None:
    """Replaces the hub by a data set in memory."""
    table = datasets.Dataset.from_list(records, features=datasets.Features(features))
    monkeypatch.setattr(
        datasets, "load_dataset", lambda name, split: {"some/set/train": table}[f"{name}/{split}"]
    )


def test_hub_classes_get_their_names(monkeypatch: pytest.MonkeyPatch) -> None:
    features = {
        "text": datasets.Value("string"),
        "label": datasets.ClassLabel(names=["cold", "warm"]),
    }
    offer(monkeypatch, [{"text": "it is warm", "label": 1}], features)
    [row] = load_hub_rows("train", "classification", HUB)
    assert row == Row("some/set[train]", 1, ("it is warm",), ("warm",))


def test_hub_tags_get_their_names(monkeypatch: pytest.MonkeyPatch) -> None:
    features = {
        "tokens": datasets.List(datasets.Value("string")),
        "ner_tags": datasets.List(datasets.ClassLabel(names=["O", "B-x"])),
    }
    offer(monkeypatch, [{"tokens": ["a", "b"], "ner_tags": [0, 1]}], features)
    columns = {"text_column": "tokens", "label_column": "ner_tags"}
    [row] = load_hub_rows("train", "ner", HUB.model_copy(update=columns))
    assert isinstance(row, TaggedRow)
    assert (row.words, row.labels) == (("a", "b"), ("O", "B-x"))


def test_hub_translation_may_be_nested(monkeypatch: pytest.MonkeyPatch) -> None:
    nested = {"en": datasets.Value("string"), "de": datasets.Value("string")}
    offer(monkeypatch, [{"translation": {"en": "one", "de": "eins"}}], {"translation": nested})
    [row] = load_hub_rows("train", "translation", HUB)
    assert row.texts == ("one", "eins")


def test_hub_row_without_the_column_names_those_found(monkeypatch: pytest.MonkeyPatch) -> None:
    offer(monkeypatch, [{"body": "x"}], {"body": datasets.Value("string")})
    with pytest.raises(InvalidInputError, match=r"some/set\[train\]:1: .*columns found: 'body'"):
        load_hub_rows("train", "classification", HUB)


def test_unreachable_hub_is_refused_with_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise ConnectionError("Couldn't reach 'some/set' on the Hub")

    monkeypatch.setattr(datasets, "load_dataset", fail)
    with pytest.raises(InvalidInputError, match=r"'some/set', split 'train'.*Couldn't.*as files"):
        load_hub_rows("train", "classification", HUB)


def test_hub_without_its_package_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(InvalidInputError, match="pip install datasets"):
        load_hub_rows("train", "classification", HUB)


def test_docstrings_are_of_sixteen_packages_in_an_order_that_mixes_them() -> None:
    rows = load_docstrings()
    packages = Counter(row.group for row in rows)
    assert len(packages) == 16
    assert len(rows) > 2000
    assert min(packages.values()) > 50
    assert all(len(row.key.split()) >= 4 for row in rows)
    assert len({row.group for row in rows[:100]}) > 8
    if sys.version_info[:2] == (3, 11) and "tkinter" in packages:
        assert len(rows) == 3824


def test_docstrings_load_as_a_task(
    make_job: Callable[..., JobConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The test replaces the rows, because parsing the library is slow and another test does it."""
    rows = [Row("x.py", i, (f"docstring number {i} of ours",), (f"p{i % 3}",)) for i in range(100)]
    monkeypatch.setattr("collapipe.data.cluster_rows.load_docstrings", lambda: rows)
    data = {"source": "stdlib_docstrings"}
    task = load_task(make_job("classification", data), 0, None)
    assert task.num_rows + task.num_held_out_rows == 100
    assert task.labels == ["p0", "p1", "p2"]
    assert task.refresh() == task.num_rows
    with pytest.raises(InvalidInputError, match=r"task\.kind is 'ner'"):
        load_task(make_job("ner", data), 0, None)
