"""Tests of jobs whose micro-batches are cut along their rows into slices."""

from pathlib import Path
from typing import Any

import pytest
import torch
from reference.comparison import first_difference
from reference.federated_job import train_job
from reference.tiny_jobs import make_job

from collapipe_client import LocalTestbed
from integration.running import run_job


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_slices_train_what_whole_rows_train_in_one_process(
    testbed: LocalTestbed, tmp_path: Path, family: str
) -> None:
    drops = dict.fromkeys(["attn_pdrop", "embd_pdrop", "resid_pdrop"], 0.0)
    job = make_job(
        tmp_path,
        family,
        "causal_lm",
        num_rows=(41,),
        devices_per_cluster=3,
        model_config=drops if family == "gpt2" else {"attention_dropout": 0.0},
        # Adam divides by the size of a gradient, and would make rounding errors of small ones large.
        training={"optimizer": "sgd", "learning_rate": 0.5},
        schedule={"sequence_slices": [4], "num_micro_batches": 2},
    )
    finished = run_job(testbed, job)
    assert [plan.num_slices for plan in finished.plans(0)] == [4, 4]
    expected = train_job(job)
    assert finished.losses(0) == pytest.approx(expected.losses[0], rel=1e-5)
    assert len(set(finished.losses(0))) == 4
    weights = finished.weights()
    assert weights.keys() == expected.weights.keys()
    for name, tensor in expected.weights.items():
        torch.testing.assert_close(weights[name], tensor, rtol=1e-4, atol=1e-6)


def test_slices_train_the_same_bits_in_any_placement(testbed: LocalTestbed, tmp_path: Path) -> None:
    placements: list[dict[str, Any]] = [
        {"devices_per_cluster": 1},
        {"devices_per_cluster": 3, "training": {"split_backward": True}},
        {"devices_per_cluster": 2, "training": {"recompute": True}},
        {"devices_per_cluster": 1, "schedule": {"strategy": "centralized"}},
    ]
    found = []
    for placement in placements:
        schedule = {"sequence_slices": [3], "num_micro_batches": 2, **placement.get("schedule", {})}
        job = make_job(
            tmp_path,
            "gpt2",
            "causal_lm",
            num_rows=(41,),
            **{**placement, "schedule": schedule},  # with dropout and Adam
        )
        found.append(run_job(testbed, job))
    first, *others = found
    for other in others:
        difference = first_difference(first.weights(), other.weights())
        assert difference is None, f"weights: {difference}"
        assert first.losses(0) == other.losses(0)
        difference = first_difference(first.optimizer_state(0), other.optimizer_state(0))
        assert difference is None, f"optimizer: {difference}"
