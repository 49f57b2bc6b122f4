"""Services train a job on several hosts. The reference trains it in one process. These functions compare both results."""

from pathlib import Path
from typing import Any

import pytest
import torch
from reference.comparison import first_difference
from reference.federated_job import Trained, train_job
from reference.job_matrix import Case, arguments
from reference.tiny_jobs import make_job

from collapipe.job import JobConfig
from collapipe_client import LocalTestbed
from integration.running import FinishedJob, run_job


def check_case(testbed: LocalTestbed, folder: Path, case: Case) -> None:
    """Runs the job of a case. Without slices, its result must equal the reference bit for bit.

    The reference cannot cut rows into slices. So a job with slices must nearly equal the same job on the control unit alone.
    """
    job = make_job(folder, **arguments(case))
    finished = run_job(testbed, job)
    check_placement(job, finished)
    if case["slices"] == 1:
        check_equals_reference(job, finished)
    else:
        plans = finished.plans(0)
        assert [plan.num_slices for plan in plans] == [case["slices"]] * len(plans)
        schedule = job.schedule.model_copy(update={"strategy": "centralized", "segments": []})
        alone = job.model_copy(update={"schedule": schedule, "devices_per_cluster": 1})
        check_close(finished, run_job(testbed, alone))


def check_close(finished: FinishedJob, other: FinishedJob) -> None:
    """Checks that two jobs have almost equal losses and weights. With slices, the placement can change the rounding."""
    tensors, expected = finished.weights(), other.weights()
    for cluster_index in range(finished.job.clusters):
        losses = finished.losses(cluster_index)
        assert losses == pytest.approx(other.losses(cluster_index), rel=1e-6)
        for found, job in ((tensors, finished), (expected, other)):
            for name, tensor in job.optimizer_state(cluster_index).items():
                found[f"{cluster_index}/{name}"] = tensor
    torch.testing.assert_close(tensors, expected, rtol=1e-4, atol=1e-6)


def check_placement(job: JobConfig, finished: FinishedJob) -> None:
    """Checks that each round ran on the control unit, the edge server and the job's number of devices."""
    for cluster_index in range(job.clusters):
        devices = job.num_devices(cluster_index)
        assert devices is not None
        plans = finished.plans(cluster_index)
        assert [len(plan.stages) for plan in plans] == [devices + 2] * job.training.rounds
        if job.schedule.strategy == "manual":
            for plan, segments in zip(plans, job.schedule.segments * len(plans), strict=False):
                blocks = segments if len(segments) > devices else [0, *segments, 0]
                expected = [blocks[0] + 1, *blocks[1:-1], blocks[-1] + 1]
                assert [s.stop_unit - s.start_unit for s in plan.stages] == expected


def check_equals_reference(job: JobConfig, finished: FinishedJob) -> None:
    """Checks that weights, optimizer states and losses equal the reference."""
    check_equal(train_job(job, finished.late_clusters, finished.ended_early), finished)


def check_equal(expected: Trained, finished: FinishedJob) -> None:
    """Checks that weights, optimizer states and losses equal those of a job in one process."""
    job, weights = finished.job, finished.weights()
    if job.model.base_quantisation is not None:
        # The hosts keep the files of the layers that they quantise, but the model in one process has no such weights.
        weights = {name: weights[name] for name in expected.weights}
    difference = first_difference(expected.weights, weights)
    assert difference is None, f"weights: {difference}"
    for cluster_index in range(job.clusters):
        difference = first_difference(
            expected.optimizer_states[cluster_index], finished.optimizer_state(cluster_index)
        )
        assert difference is None, f"optimizer of cluster {cluster_index}: {difference}"
        assert finished.losses(cluster_index) == expected.losses[cluster_index]


def identities(testbed: LocalTestbed) -> dict[str, str]:
    """Returns the incarnation of each host, which changes when its process is restarted."""
    assert testbed.lost() == []
    with testbed.client() as client:
        return {status.host.host_id: status.host.incarnation for status in client.hosts()}


def owner_of_units(plan: Any) -> dict[int, str]:
    """Returns the host that runs each unit."""
    return {
        unit: stage.host_id
        for stage in plan.stages
        for unit in range(stage.start_unit, stage.stop_unit)
    }
