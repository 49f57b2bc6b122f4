"""Each cluster gets its rows of the job's data, also when rows are appended."""

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from collapipe.data.cluster_rows import check_data
from collapipe.errors import InvalidInputError, WrongStateError
from collapipe.job import JobConfig
from collapipe.tasks import Task, load_task, loading

JobMaker = Callable[..., JobConfig]
TextWriter = Callable[..., str]


def append(path: str, text: str, label: str) -> None:
    with Path(path).open("a", encoding="utf-8") as file:
        file.write(json.dumps({"text": text, "label": label}) + "\n")


def inputs(task: Task) -> list[tuple[int, ...]]:
    """Returns the token ids of each training row."""
    return [
        tuple(task.micro_batches([row], 1)[0].tensors["input_ids"][0].tolist())
        for row in range(task.num_rows)
    ]


def load(job: JobConfig, cluster_index: int = 0, vocabulary: bytes | None = None) -> Task:
    task = load_task(job, cluster_index, vocabulary)
    task.set_labels(["cold", "warm"])
    return task


@pytest.fixture
def data(texts: TextWriter) -> dict[str, Any]:
    return {"train": texts("a.jsonl", 8), "held_out": texts("b.jsonl", 3)}


@pytest.mark.parametrize("sharding", ["iid", "dirichlet"])
def test_sharded_file_gives_each_row_to_one_cluster(
    texts: TextWriter, make_job: JobMaker, sharding: str
) -> None:
    data = {
        "train": texts("a.jsonl", 60),
        "held_out": texts("b.jsonl", 5),
        "sharding": sharding,
        "dirichlet_alpha": 5.0,
    }
    whole = load(make_job("classification", data))
    job = make_job("classification", data, clusters=3)
    parts = [load(job, cluster, whole.vocabulary) for cluster in range(3)]
    assert sorted(row for part in parts for row in inputs(part)) == sorted(inputs(whole))
    assert [part.num_held_out_rows for part in parts] == [2, 2, 1]


def test_one_file_a_cluster_is_not_sharded(texts: TextWriter, make_job: JobMaker) -> None:
    files = [texts("a.jsonl", 6), texts("b.jsonl", 9, ("hot",))]
    job = make_job("classification", {"train": files, "held_out": texts("c.jsonl", 3)}, clusters=2)
    check_data(job)
    first = load_task(job, 0, None)
    second = load_task(job, 1, first.vocabulary)
    assert (first.num_rows, first.labels) == (6, ["cold", "warm"])
    assert (second.num_rows, second.labels) == (9, ["hot"])
    assert second.vocabulary == first.vocabulary


def test_without_held_out_file_no_text_is_on_both_sides(
    texts: TextWriter, make_job: JobMaker
) -> None:
    path = texts("a.jsonl", 200)
    Path(path).write_text(2 * Path(path).read_text(encoding="utf-8"), encoding="utf-8")
    task = load(make_job("classification", {"train": path}, task={"max_length": 100}))
    held_out = {
        tuple(int(token) for token in row if token != 0)
        for batch in task.held_out_micro_batches(16)
        for row in batch.tensors["input_ids"]
    }
    train = set(inputs(task))
    assert task.num_rows + task.num_held_out_rows == 400
    assert len(train) + len(held_out) == 200
    assert not train & held_out
    assert 30 <= task.num_held_out_rows <= 90  # 15 % of 400 is 60


def test_row_limits(texts: TextWriter, make_job: JobMaker) -> None:
    data = {"train": texts("a.jsonl", 30), "held_out": texts("b.jsonl", 9)}
    whole = load(make_job("classification", data))
    job = make_job("classification", {**data, "max_rows": 12, "max_held_out_rows": 4})
    limited = load(job, 0, whole.vocabulary)
    assert inputs(limited) == inputs(whole)[:12]
    assert limited.num_held_out_rows == 4
    append(data["train"], "one more", "warm")
    assert limited.refresh() == 12


def test_rows_above_the_limit_of_held_out_rows_train_and_a_restart_finds_the_same(
    texts: TextWriter, make_job: JobMaker
) -> None:
    data = {"train": texts("a.jsonl", 200), "max_held_out_rows": 5}
    job = make_job("classification", data, task={"max_length": 60})
    task = load(job)
    assert (task.num_rows, task.num_held_out_rows, task.num_first) == (195, 5, 200)
    for number in range(100):
        append(data["train"], f"new {number}", "warm")
    assert (task.refresh(), task.num_held_out_rows) == (295, 5)
    again = load_task(job, 0, task.vocabulary, task.num_first)
    again.set_labels(["cold", "warm"])
    assert inputs(again) == inputs(task)
    assert (again.num_held_out_rows, again.num_first) == (5, 200)


def test_refresh_adds_appended_rows_behind_the_others(
    texts: TextWriter, make_job: JobMaker
) -> None:
    data = {"train": texts("a.jsonl", 20), "held_out": texts("b.jsonl", 3)}
    job = make_job("classification", data, clusters=2)
    first = load(job)
    tasks = [first, load(job, 1, first.vocabulary)]
    before = [inputs(task) for task in tasks]
    assert [task.refresh() for task in tasks] == [10, 10]
    for number in range(8):
        append(data["train"], f"new {number}", "warm")
    assert [task.refresh() for task in tasks] == [14, 14]
    for cluster, task in enumerate(tasks):
        assert inputs(task)[:10] == before[cluster]
        assert inputs(load(job, cluster, first.vocabulary)) == inputs(task)


def test_refresh_with_an_unknown_label_loses_nothing(
    data: dict[str, Any], make_job: JobMaker
) -> None:
    path = Path(data["train"])
    good = path.read_text(encoding="utf-8")
    task = load(make_job("classification", data))
    before = inputs(task)
    append(str(path), "new", "tepid")
    for _ in range(2):
        with pytest.raises(InvalidInputError, match=r"a\.jsonl:9: .*'tepid'"):
            task.refresh()
    assert inputs(task) == before
    path.write_text(good, encoding="utf-8")
    append(str(path), "new", "warm")
    assert task.refresh() == 9


def test_held_out_label_that_no_training_row_has_counts_as_an_error(
    texts: TextWriter, make_job: JobMaker
) -> None:
    held_out = texts("b.jsonl", 4, ("cold", "tepid"))
    task = load_task(
        make_job("classification", {"train": texts("a.jsonl", 8), "held_out": held_out}), 0, None
    )
    task.set_labels(task.labels)
    assert task.held_out_labels == {"cold": f"{held_out}:1", "tepid": f"{held_out}:2"}
    [batch] = task.held_out_micro_batches(4)
    assert sorted(batch.tensors["labels"].tolist()) == [-100, -100, 0, 0]
    for prediction in (0, 1):
        expected = 0.5 if prediction == 0 else 0.0
        assert task.score([torch.full((4,), prediction)])["accuracy"] == expected


def test_without_held_out_file_no_label_loses_its_only_row(
    tmp_path: Path, make_job: JobMaker
) -> None:
    path = tmp_path / "a.jsonl"
    for number in range(80):
        append(str(path), f"text {number}", f"label {number % 2 if number < 60 else number}")
    task = load_task(make_job("classification", {"train": str(path)}), 0, None)
    assert len(task.labels) == 22
    assert task.held_out_labels.keys() == {"label 0", "label 1"}
    before = task.num_rows, task.num_held_out_rows
    task.set_labels(task.labels)
    for number in range(60, 80):
        append(str(path), f"again {number}", f"label {number}")
    task.refresh()
    again = load_task(make_job("classification", {"train": str(path)}), 0, task.vocabulary)
    assert (task.num_rows, task.num_held_out_rows) == (again.num_rows, again.num_held_out_rows)
    assert task.num_held_out_rows > before[1]
    again.set_labels(task.labels)
    assert inputs(again) == inputs(task)


def test_micro_batches_are_equal_parts_with_labels_that_another_cluster_may_know(
    data: dict[str, Any], make_job: JobMaker
) -> None:
    task = load_task(make_job("classification", data), 0, None)
    with pytest.raises(WrongStateError, match="set_labels"):
        task.micro_batches([0], 1)
    task.set_labels(["cold", "mild", "warm"])
    [batch] = task.micro_batches([0, 1], 1)
    assert batch.tensors["labels"].tolist() == [0, 2]
    with pytest.raises(InvalidInputError, match="5 rows .* 2 "):
        task.micro_batches([0, 1, 2, 3, 4], 2)


def test_micro_batches_keep_the_order_and_pad_to_their_own_longest_row(
    data: dict[str, Any], make_job: JobMaker
) -> None:
    Path(data["train"]).unlink()
    for length in (1, 9, 2, 3):
        append(data["train"], " ".join(["x"] * length), "warm")
    task = load(make_job("classification", data))
    first, second = task.micro_batches([3, 0, 1, 2], 2)
    assert first.tensors["attention_mask"].tolist() == [[1, 1, 1, 1, 1], [1, 1, 1, 0, 0]]
    assert first.tensors["input_ids"][1, 3:].tolist() == [0, 0]
    assert second.tensors["input_ids"].shape == (2, 11)
    assert {tensor.dtype for tensor in first.tensors.values()} == {torch.int64}
    assert (first.num_rows, first.num_targets) == (2, 2)


def test_too_long_rows_are_cut_and_counted_and_the_first_appended_one_is_logged(
    data: dict[str, Any], make_job: JobMaker, caplog: pytest.LogCaptureFixture
) -> None:
    append(data["held_out"], "word " * 50, "warm")
    job = make_job("classification", data, task={"max_length": 40})
    task = load(job)
    assert (task.num_long_rows, task.num_long_held_out_rows) == (0, 1)
    with caplog.at_level(logging.WARNING):
        for num_long in (1, 2):
            append(data["train"], "word " * 50, "warm")
            assert task.refresh() == 8 + num_long
            assert task.num_long_rows == num_long
    [record] = caplog.records
    assert "1 of the rows" in record.getMessage() and "40" in record.getMessage()
    task = load(job)
    assert (task.num_long_rows, task.num_long_held_out_rows) == (2, 1)
    [batch] = task.micro_batches([8], 1)
    row = batch.tensors["input_ids"][0].tolist()
    assert len(row) == 40
    assert (row[0], row[-1]) == (2, 3)  # [CLS] and [SEP] stay


@pytest.mark.parametrize(
    ("data", "sections", "message"),
    [
        ({"train": "a.jsonl"}, {"training": {"mini_batch": 32}}, r"has \d\d .* of 32"),
        ({"train": "a.jsonl"}, {"clusters": 12}, "12 clusters.*fewer clusters"),
        (
            {"train": ["a.jsonl", "one.jsonl"]},
            {"clusters": 2},
            r"one\.jsonl: cluster 1 has 1 .* 4:",
        ),
        ({"train": "bad.jsonl"}, {}, r"bad\.jsonl:9: .*'text'"),
        ({"train": "a.jsonl", "held_out": "bad.jsonl"}, {}, r"bad\.jsonl:9: .*'text'"),
        ({"train": ["a.jsonl", "bad.jsonl"]}, {"clusters": 2}, r"bad\.jsonl:9: .*'text'"),
        (
            {"train": "a.jsonl", "sharding": "dirichlet", "dirichlet_alpha": 0.001},
            {"clusters": 4},
            r"has 0 .*data\.dirichlet_alpha",
        ),
        ({"train": "a.jsonl", "max_rows": 2}, {}, r"has 2 .*raise data\.max_rows"),
        ({"train": "empty.jsonl", "held_out": "a.jsonl"}, {}, r"empty\.jsonl: "),
        ({"train": "empty.jsonl"}, {}, r"empty\.jsonl: "),
        ({"train": "a.jsonl", "held_out": "empty.jsonl"}, {}, r"empty\.jsonl: "),
        ({"train": "one.jsonl"}, {}, r"one\.jsonl: .* 1 rows .*15%"),
        ({"train": "a.jsonl", "held_out": "./a.jsonl"}, {}, r"data\.train and data\.held_out"),
        ({}, {}, r"data\.train is not set: .*file"),
        ({"source": "hub", "train": "train"}, {}, r"data\.hub_name is not set"),
        ({"source": "hub", "hub_name": "x"}, {}, r"data\.train is not set: .*split"),
        ({"source": "stdlib_docstrings", "train": "a.jsonl"}, {}, "stdlib_docstrings.*data.train"),
    ],
)
def test_unusable_data_is_refused_with_the_remedy(
    texts: TextWriter,
    make_job: JobMaker,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    data: dict[str, Any],
    sections: dict[str, Any],
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    texts("a.jsonl", 30)
    texts("one.jsonl", 1)
    with open(texts("bad.jsonl", 8), "a", encoding="utf-8") as file:
        file.write("{}\n")
    (tmp_path / "empty.jsonl").touch()
    job = make_job("classification", data, **sections)
    with pytest.raises(InvalidInputError, match=message):
        for cluster in range(job.clusters):
            load_task(job, cluster, None)
    if job.data.source != "stdlib_docstrings":  # The client does not read these.
        with pytest.raises(InvalidInputError, match=message):
            check_data(job)


def test_vocabulary_that_is_larger_than_other_hosts_take_is_refused_with_the_remedy(
    data: dict[str, Any], make_job: JobMaker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loading, "MAX_VOCABULARY_BYTES", 1000, raising=False)
    job = make_job("classification", data, model={"vocabulary_size": 301})
    with pytest.raises(InvalidInputError, match=r" 1000: .*model\.vocabulary_size.* 301"):
        load_task(job, 0, None)


def test_unknown_cluster_is_refused(data: dict[str, Any], make_job: JobMaker) -> None:
    with pytest.raises(InvalidInputError, match="cluster 1 .* 0 to 0"):
        load_task(make_job("classification", data), 1, None)


def test_dirichlet_without_labels_is_refused(load_rows: Callable[..., Task]) -> None:
    with pytest.raises(InvalidInputError, match='skews labels.*"iid"'):
        load_rows(
            "translation",
            [{"en": "a", "de": "b"}] * 9,
            model={"family": "marian"},
            data={"sharding": "dirichlet"},
        )
