"""Labels and metrics of each task, on small data with known labels."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer

from collapipe.errors import InvalidInputError, WrongStateError
from collapipe.evaluation import make_evaluation
from collapipe.job import JobConfig
from collapipe.models import adapter_class
from collapipe.tasks import Task, load_task

JobMaker = Callable[..., JobConfig]

SENTENCES = [
    "Ada B-person\nLovelace I-person\nlives O\nin O\nLondon B-place\n",
    "Nobody O\nis O\nhere O\n",
    "Paris B-place\n",
]
PAIRS = [
    ("a dog runs in the green grass", "ein Hund läuft im grünen Gras"),
    ("two men", "zwei Männer"),
    ("the woman is reading a book", "die Frau liest gerade ein Buch"),
]


@pytest.fixture
def make_ner(tmp_path: Path, make_job: JobMaker) -> Callable[..., Task]:
    def make(max_length: int = 128) -> Task:
        for name in ("train.conll", "held_out.conll"):
            (tmp_path / name).write_text("\n".join(SENTENCES * 2), encoding="utf-8")
        data = {"train": f"{tmp_path}/train.conll", "held_out": f"{tmp_path}/held_out.conll"}
        task = load_task(make_job("ner", data, task={"max_length": max_length}), 0, None)
        task.set_labels(task.labels)
        return task

    return make


@pytest.fixture(params=["marian", "bart"])
def translation(request: pytest.FixtureRequest, tmp_path: Path, make_job: JobMaker) -> Task:
    for index, suffix in enumerate(("en", "de")):
        for name in ("train", "held_out"):
            lines = [pair[index] + "\n" for pair in PAIRS * 2]
            (tmp_path / f"{name}.{suffix}").write_text("".join(lines), encoding="utf-8")
    data = {name: f"{tmp_path}/{name}.en,{tmp_path}/{name}.de" for name in ("train", "held_out")}
    task = load_task(make_job("translation", data, model={"family": request.param}), 0, None)
    task.set_labels([])
    return task


def special_token_ids(vocabulary: bytes) -> dict[str, int]:
    return adapter_class("marian").special_token_ids(Tokenizer.from_str(vocabulary.decode()))


def score(task: Task, predictions: list[torch.Tensor]) -> float:
    """Returns the main metric."""
    return task.score(predictions)[task.metric]


def labels(task: Task) -> list[torch.Tensor]:
    return [batch.tensors["labels"].clone() for batch in task.held_out_micro_batches(2)]


def test_accuracy_counts_right_classes_whatever_the_order_of_lengths(
    texts: Callable[..., str], make_job: JobMaker, tmp_path: Path
) -> None:
    held_out = tmp_path / "held_out.jsonl"
    words = [("long " * 9, "warm"), ("x", "cold"), ("in between", "warm"), ("y", "cold")]
    held_out.write_text(
        "".join(f'{{"text": "{text}", "label": "{label}"}}\n' for text, label in words),
        encoding="utf-8",
    )
    job = make_job("classification", {"train": texts("a.jsonl", 8), "held_out": str(held_out)})
    task = load_task(job, 0, None)
    task.set_labels(task.labels)
    assert task.metric == "accuracy"
    predictions = labels(task)
    assert [p.tolist() for p in predictions] == [[0, 0], [1, 1]]  # Short rows come first.
    assert score(task, predictions) == 1.0
    predictions[1][1] = 0
    assert score(task, predictions) == 0.75


def test_score_with_missing_predictions_is_refused(make_ner: Callable[..., Task]) -> None:
    task = make_ner()
    with pytest.raises(WrongStateError, match="predictions for 4 of 6 held-out rows"):
        score(task, labels(task)[:2])


def test_ner_labels_are_the_whole_tag_set_with_o_first(make_ner: Callable[..., Task]) -> None:
    assert make_ner().labels == ["O", "B-person", "I-person", "B-place", "I-place"]


def test_ner_targets_are_the_first_tokens_of_words(make_ner: Callable[..., Task]) -> None:
    task = make_ner()
    [batch] = task.micro_batches([0, 1], 1)
    assert batch.num_targets == 8
    row = batch.tensors["labels"][0]
    assert [int(label) for label in row if label != -100] == [1, 2, 0, 0, 3]
    assert row[0] == -100  # [CLS]


def test_entity_f1_needs_exact_span_and_type(make_ner: Callable[..., Task]) -> None:
    task = make_ner()
    assert task.metric == "entity_f1"
    truth = [torch.where(label < 0, 4, label) for label in labels(task)]
    assert score(task, truth) == 1.0
    shortened = [torch.where(label == 2, 0, label) for label in truth]  # Only "Ada" remains.
    assert score(task, shortened) == pytest.approx(2 / 3)  # 4 of 6 entities are right.
    assert score(task, [torch.zeros_like(label) for label in truth]) == 0.0
    other_type = [torch.where(label == 3, 1, label) for label in truth]
    assert score(task, other_type) == pytest.approx(1 / 3)


def test_entities_beyond_the_length_limit_are_misses(make_ner: Callable[..., Task]) -> None:
    task = make_ner(max_length=6)  # [CLS], four of the five words, [SEP]
    truth = [torch.where(label < 0, 0, label) for label in labels(task)]
    assert max(batch.shape[1] for batch in truth) == 6
    assert score(task, truth) == pytest.approx(
        2 * 4 / (4 + 6)
    )  # "London" is cut off in 2 of 6 rows.


def test_entities_of_a_type_that_only_held_out_rows_have_are_misses(
    tmp_path: Path, make_job: JobMaker
) -> None:
    for name, stop in (("train", 2), ("held_out", 3)):
        text = "\n".join(SENTENCES[:stop]).replace("London B-place", "London O")
        (tmp_path / f"{name}.conll").write_text(text, encoding="utf-8")
    data = {name: f"{tmp_path}/{name}.conll" for name in ("train", "held_out")}
    job = make_job("ner", data, training={"mini_batch": 2}, schedule={"num_micro_batches": 1})
    task = load_task(job, 0, None)
    task.set_labels(task.labels)
    assert task.labels == ["O", "B-person", "I-person"]
    truth = [torch.where(label < 0, 0, label) for label in labels(task)]
    assert score(task, truth) == pytest.approx(2 * 1 / (1 + 2))


def test_tag_of_unknown_type_is_refused_with_its_place(make_ner: Callable[..., Task]) -> None:
    with pytest.raises(InvalidInputError, match=r"train\.conll:1: label 'B-place' is not one of"):
        make_ner().set_labels(["O", "B-person", "I-person"])


def test_translation_targets_end_with_the_end_token(translation: Task) -> None:
    [batch] = translation.micro_batches([0, 1], 1)
    targets = batch.tensors["labels"]
    eos = special_token_ids(translation.vocabulary)["eos_token"]
    assert targets[0, -1] == eos
    kept = targets[1][targets[1] != -100]
    assert kept[-1] == eos
    assert len(kept) < targets.shape[1]
    assert batch.num_targets == int((targets != -100).sum())


def test_bleu_of_the_truth_is_100_and_padding_does_not_count(translation: Task) -> None:
    assert translation.metric == "bleu"
    special = special_token_ids(translation.vocabulary)
    truth = [torch.where(label < 0, special["pad_token"], label) for label in labels(translation)]
    assert score(translation, truth) == pytest.approx(100.0)
    tail = [
        torch.cat([label, label], dim=1) for label in truth
    ]  # The copy comes after the end token.
    assert score(translation, tail) == pytest.approx(100.0)
    assert (
        score(translation, [torch.full_like(label, special["eos_token"]) for label in truth]) == 0.0
    )
    assert score(translation, truth[::-1]) < 50.0  # Each translation belongs to another sentence.


def test_translations_that_are_all_alike_are_found(translation: Task) -> None:
    truth = [label.clamp(min=0) for label in labels(translation)]
    alike = [truth[0][:1].expand(len(label), -1) for label in truth]
    for predictions, is_one in ((truth, False), (alike, True)):
        sums = translation.sums(predictions)
        assert make_evaluation("translation", sums, 1).one_answer == is_one
