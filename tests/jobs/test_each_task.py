"""Trains one job of each task through real processes, which must equal training in one process bit for bit."""

from pathlib import Path
from typing import Any

import pytest
from integration.exactness import check_equals_reference
from integration.running import run_job
from reference.tiny_jobs import make_job

from collapipe_client import LocalTestbed

JOBS: dict[str, dict[str, Any]] = {
    "classification": {"family": "bert"},
    "ner": {"family": "distilbert", "half_blocks": True},
    "translation": {"family": "marian", "training": {"label_smoothing": 0.1}},
    "causal_lm": {"family": "gpt2", "training": {"split_backward": True}},
    "instruction": {
        "family": "llama",
        "lora": {"target_modules": "all-linear", "lora_dropout": 0.1},
        "schedule": {"strategy": "manual", "segments": [[1, 2], [2, 1]]},
    },
}


@pytest.mark.parametrize("kind", JOBS)
def test_job_of_each_task_equals_one_process(
    testbed: LocalTestbed, tmp_path: Path, kind: str
) -> None:
    training = {"evaluate_every": 1, **JOBS[kind].get("training", {})}
    options = {**JOBS[kind], "training": training}
    job = make_job(tmp_path, kind=kind, devices_per_cluster=2, **options)
    finished = run_job(testbed, job)
    check_equals_reference(job, finished)
    assert [evaluation.num_rounds for evaluation in finished.evaluations] == [1, 2]
