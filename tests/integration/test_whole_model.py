"""Tests that VanillaFL and centralized training, where one host has the whole model, equal the reference."""

from pathlib import Path
from typing import Any

import pytest
from reference.tiny_jobs import make_job

from collapipe_client import LocalTestbed
from integration.exactness import check_equals_reference
from integration.running import run_job

NUM_UNITS = 5
"""Embedding, 3 blocks, head."""

JOBS: dict[str, dict[str, Any]] = {
    "classification": {"devices_per_cluster": 1},
    "translation, evaluated every round": {
        "devices_per_cluster": 1,
        "family": "marian",
        "kind": "translation",
        "training": {"label_smoothing": 0.1, "evaluate_every": 1},
    },
    "3 clusters": {"num_rows": (12, 21, 33), "devices_per_cluster": [1, 1, 1]},
}


@pytest.mark.parametrize("name", JOBS)
def test_vanilla_fl_equals_fedavg_with_one_device_per_client(
    testbed: LocalTestbed, tmp_path: Path, name: str
) -> None:
    job = make_job(tmp_path, schedule={"strategy": "vanilla_fl"}, **JOBS[name])
    finished = run_job(testbed, job)
    for cluster_index in range(job.clusters):
        for plan in finished.plans(cluster_index):
            control_unit, device = plan.stages
            assert control_unit.host_id == f"control-unit-{cluster_index}"
            assert (control_unit.start_unit, control_unit.stop_unit) == (0, 0)
            assert device.host_id.startswith(f"device-{cluster_index}-")
            assert (device.start_unit, device.stop_unit) == (0, NUM_UNITS)
            assert len(plan.links) == 1
    check_equals_reference(job, finished)


@pytest.mark.parametrize("name", JOBS)
def test_centralized_equals_the_reference(testbed: LocalTestbed, tmp_path: Path, name: str) -> None:
    job = make_job(tmp_path, schedule={"strategy": "centralized"}, **JOBS[name])
    finished = run_job(testbed, job)
    for cluster_index in range(job.clusters):
        for plan in finished.plans(cluster_index):
            (stage,) = plan.stages
            assert stage.host_id == f"control-unit-{cluster_index}"
            assert (stage.start_unit, stage.stop_unit) == (0, NUM_UNITS)
            assert len(plan.links) == 0
    check_equals_reference(job, finished)
