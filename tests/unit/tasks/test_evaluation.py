"""The counts of clusters add up to those of one cluster that evaluates all held-out rows, for every task."""

import itertools
import math
import random
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from reference.tiny_jobs import make_job as make_tiny_job
from reference.tiny_jobs import write_rows
from sklearn.metrics import accuracy_score, f1_score  # type: ignore[import-untyped]
from torch import Tensor

from collapipe.data.cluster_rows import labels_in_order
from collapipe.data.findings import long_rows
from collapipe.evaluation import (
    PREDICTED,
    RIGHT,
    ROWS,
    TRUE,
    add_sums,
    compute_metrics,
    first_places,
    of_class,
)
from collapipe.job import JobConfig
from collapipe.scheduler.evaluations import Evaluations
from collapipe.tasks import MicroBatch, Task, load_task
from collapipe.v1.job_pb2 import Evaluation, EvaluationSums

KINDS = {
    "classification": "bert",
    "ner": "bert",
    "translation": "marian",
    "causal_lm": "llama",
    "instruction": "llama",
}
NUM_ROWS = 23


def job_of(folder: Path, kind: str, num_clusters: int, max_length: int | None = None) -> JobConfig:
    """Makes a job whose clusters divide one training file and one held-out file."""
    job = make_tiny_job(folder, KINDS[kind], kind)
    data = {
        "train": write_rows(folder, kind, "train", 200),
        "held_out": write_rows(folder, kind, "held-out", NUM_ROWS),
    }
    changes: dict[str, Any] = {"data": job.data.model_copy(update=data), "clusters": num_clusters}
    if max_length is not None:
        changes["task"] = job.task.model_copy(update={"max_length": max_length})
    return job.model_copy(update=changes)


def load_all(job: JobConfig) -> list[Task]:
    first = load_task(job, 0, None)
    tasks = [first, *(load_task(job, i, first.vocabulary) for i in range(1, job.clusters))]
    labels = sorted(
        {label for task in tasks for label in task.labels}, key=lambda name: (name != "O", name)
    )
    for task in tasks:
        task.set_labels(labels)
    return tasks


def predict(kind: str, batch: MicroBatch) -> Tensor:
    """Predicts what a model might, by the rows alone: mostly the truth, and otherwise something else."""
    labels = batch.tensors["labels"]
    rows = batch.tensors["input_ids"] * batch.tensors["attention_mask"]
    draws = [random.Random(int(row.sum())) for row in rows]
    if kind in ("causal_lm", "instruction"):
        counts = (labels != -100).sum(dim=1).tolist()
        return torch.tensor(
            [
                [draw.uniform(0, 3) * n, n - draw.choice([0, 1])]
                for draw, n in zip(draws, counts, strict=True)
            ]
        )
    if kind == "classification":
        return torch.tensor(
            [draw.choice([0, int(label)]) for draw, label in zip(draws, labels, strict=True)]
        )
    truth = labels.clamp(min=0 if kind == "ner" else 1)
    for row, draw in zip(truth, draws, strict=True):
        if draw.random() < 0.5:
            row[: len(row) if kind == "ner" else 2] = 0 if kind == "ner" else 7
    return truth


def count(kind: str, task: Task, size: int) -> dict[str, float]:
    return task.sums([predict(kind, batch) for batch in task.held_out_micro_batches(size)])


@pytest.mark.parametrize("kind", KINDS)
def test_counts_of_clusters_add_up_to_the_whole(tmp_path: Path, kind: str) -> None:
    max_length = 24 if kind == "instruction" else None  # Some rows of this task are too long.
    [alone] = load_all(job_of(tmp_path, kind, 1, max_length))
    parts = load_all(job_of(tmp_path, kind, 3, max_length))
    # With the vocabulary of the first cluster, which has read other training rows than a single one.
    whole = load_task(alone._rows._job, 0, parts[0].vocabulary)
    whole.set_labels(list(alone._label_ids or ()))
    expected = count(kind, whole, 5)
    counted = [count(kind, task, 4) for task in parts]
    assert sum(task.num_held_out_rows for task in parts) == whole.num_held_out_rows
    assert all(0 < sums[ROWS] < expected[ROWS] for sums in counted)
    total = add_sums(counted)
    assert total.keys() == expected.keys()
    for name, value in expected.items():
        assert total[name] == (pytest.approx(value, rel=1e-6) if name == "loss" else value), name
    metrics, wanted = compute_metrics(kind, total), compute_metrics(kind, expected)
    assert metrics == pytest.approx(wanted, rel=1e-6)
    assert next(iter(wanted)) == whole.metric
    assert 0 < wanted[whole.metric] != 1
    if kind == "instruction":
        assert expected["tokens"] > expected["measured_tokens"]


def test_evaluation_is_made_when_the_last_cluster_has_counted() -> None:
    evaluations = Evaluations("instruction", 3)
    # All held-out rows of the second cluster are too long, and the third one has none.
    clusters = [
        {"rows": 2, "right": 1, "loss": 6.0, "right_tokens": 4, "measured_tokens": 6, "tokens": 6},
        {"rows": 2, "right": 0, "loss": 0.0, "right_tokens": 0, "measured_tokens": 0, "tokens": 10},
        {},
    ]
    for round_index in (1, 2):
        made = [
            evaluations.add(index, EvaluationSums(sums=sums), round_index)
            for index, sums in reversed(list(enumerate(clusters)))
        ]
        assert made[:2] == [None, None]
        evaluation = made[2]
        assert evaluation is not None
        assert (evaluation.num_rounds, evaluation.num_rows) == (round_index, 4)
        assert (evaluation.metric, evaluation.value) == ("exact_match", 0.25)
        assert evaluation.other_metrics == {
            "perplexity": pytest.approx(math.e),
            "token_accuracy": 0.25,
        }
    assert math.isnan(compute_metrics("instruction", clusters[1])["perplexity"])


def class_counts(truth: Sequence[int], predicted: Sequence[int]) -> dict[str, float]:
    """Counts rows of classes as a cluster does."""
    right = [each for each, other in zip(truth, predicted, strict=True) if each == other]
    sums: dict[str, float] = {ROWS: len(truth)}
    for name, ids in ((TRUE, truth), (PREDICTED, predicted), (RIGHT, right)):
        sums |= {of_class(name, each): number for each, number in Counter(ids).items()}
    return sums


def evaluated(kind: str, *clusters: dict[str, float]) -> Evaluation:
    evaluations = Evaluations(kind, len(clusters))
    made = [
        evaluations.add(index, EvaluationSums(sums=sums), 1) for index, sums in enumerate(clusters)
    ]
    assert made[-1] is not None
    return made[-1]


@pytest.mark.parametrize(
    ("truth", "predicted", "is_one"),
    [
        ([0, 1, 1, 1], [1, 1, 1, 1], True),
        ([1, 1, 1, 1], [1, 1, 1, 1], False),  # All rows are of this class.
        ([0, 1, 1, 1], [0, 1, 1, 2], False),
        # The clusters differ, although each of them has only one class.
        ([0, 1, 1, 1], [0, 0, 1, 1], False),
        ([-100, 2, 0, 2], [2, 2, 2, 2], True),  # A label that no training row has.
        ([0] + [1] * 99, [1] * 100, True),
    ],
)
def test_accuracy_comes_with_macro_f1_and_the_largest_class(
    truth: list[int], predicted: list[int], is_one: bool
) -> None:
    half = len(truth) // 2
    parts = [
        class_counts(truth[part], predicted[part]) for part in (slice(half), slice(half, None))
    ]
    evaluation = evaluated("classification", *parts)
    assert evaluation.metric == "accuracy"
    assert evaluation.value == pytest.approx(accuracy_score(truth, predicted))
    assert evaluation.other_metrics == {
        "macro_f1": pytest.approx(f1_score(truth, predicted, average="macro")),
        "largest_class": max(Counter(truth).values()) / len(truth),
    }
    assert evaluation.one_answer == is_one


@pytest.mark.parametrize(("num_predicted", "is_one"), [(0, True), (1, False)])
def test_model_without_any_entity_is_found(num_predicted: int, is_one: bool) -> None:
    counts = {RIGHT: 0.0, PREDICTED: num_predicted, TRUE: 1.0}
    sums = {ROWS: 2.0, **counts, **{f"strict_{name}": each for name, each in counts.items()}}
    assert evaluated("ner", sums, sums).one_answer == is_one


def test_counts_of_another_model_are_forgotten_and_those_of_a_failed_cluster_stay() -> None:
    evaluations = Evaluations("classification", 2)
    sums = EvaluationSums(sums=class_counts([0, 0, 1, 1], [0, 0, 1, 0]))
    assert evaluations.add(0, sums, 1) is None
    # The other cluster was late before it had evaluated that model.
    assert evaluations.add(1, sums, 2) is None
    assert evaluations.add(1, EvaluationSums(), 2) is None
    evaluation = evaluations.add(0, EvaluationSums(), 2)
    assert evaluation is not None
    assert (evaluation.num_rounds, evaluation.num_rows, evaluation.value) == (2, 4, 0.75)


def test_every_row_is_evaluated_once_also_when_rows_are_appended(
    make_job: Callable[..., JobConfig], texts: Callable[..., str]
) -> None:
    """Without a held-out file, appended rows may be held out, too."""
    path = Path(texts("a.jsonl", 120))
    tasks = load_all(make_job("classification", {"train": str(path)}, clusters=3))
    more = path.with_name("b.jsonl")
    texts("b.jsonl", 90)
    with path.open("a", encoding="utf-8") as file:
        file.write(more.read_text(encoding="utf-8"))
    for task in tasks:
        task.refresh()
    whole = load_task(make_job("classification", {"train": str(path)}), 0, None)
    held_out = [{example.row.key for example in task._held_out} for task in tasks]
    assert set().union(*held_out) == {example.row.key for example in whole._held_out}
    assert all(not first & second for first, second in itertools.combinations(held_out, 2))
    sizes = [len(keys) for keys in held_out]
    assert max(sizes) - min(sizes) <= 1


def test_cluster_with_a_file_of_its_own_evaluates_what_it_holds_out(
    make_job: Callable[..., JobConfig], texts: Callable[..., str], tmp_path: Path
) -> None:
    few = tmp_path / "few.jsonl"
    few.write_text('{"text": "all alike", "label": "cold"}\n' * 20, encoding="utf-8")
    job = make_job("classification", {"train": [texts("a.jsonl", 100), str(few)]}, clusters=2)
    first, second = load_all(job)
    alone = load_task(make_job("classification", {"train": job.data.train[0]}), 0, None)
    assert [example.row for example in first._held_out] == [e.row for e in alone._held_out]
    assert first.num_held_out_rows > 5
    assert second.num_held_out_rows == 0, "choose a text that is not held out"
    assert second.sums([]) == {}
    sums = count("classification", first, 8)
    assert add_sums([sums, second.sums([])]) == sums


def test_first_place_of_a_label_is_that_of_the_smallest_line() -> None:
    places = [("wet", "b.csv:12"), ("dry", "b.csv:3"), ("wet", "b.csv:9")]
    assert first_places(places) == {"dry": "b.csv:3", "wet": "b.csv:9"}
    assert first_places([("wet", "no line"), ("dry", "")]) == {"wet": "no line", "dry": ""}


def test_long_rows_of_a_trained_job_need_another_job() -> None:
    found = long_rows("instruction", 40, (0, 0), (2, 9), is_trained=True)
    assert found is not None
    assert found.what.startswith("2 of 9 held-out rows ") and "task.max_length = 40 " in found.what
    assert "train a job" in found.remedy
    assert long_rows("ner", 40, (0, 0), (0, 9), is_trained=True) is None


@pytest.mark.parametrize(
    ("labels", "expected"),
    [
        ([["10", "2"], ["0", "2"]], ["0", "2", "10"]),
        ([["-1", "3", "03"]], ["-1", "03", "3"]),
        ([["10", "2", "none"]], ["10", "2", "none"]),
        ([["I-x", "O"], ["B-x"]], ["O", "B-x", "I-x"]),
    ],
)
def test_whole_numbers_are_ordered_by_their_values_and_other_labels_as_texts(
    labels: list[list[str]], expected: list[str]
) -> None:
    assert labels_in_order(labels) == expected
