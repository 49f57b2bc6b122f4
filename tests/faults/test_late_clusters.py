"""Tests that rounds that were committed without a late cluster are repeated with the same bits after a kill."""

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from integration.running import FinishedJob
from killed_processes import kill
from reference.comparison import first_difference
from reference.federated_job import train_job
from reference.tiny_jobs import make_job
from stored_jobs import StoredRow

from collapipe.emulation.device_profiles import DEVICE_PROFILES
from collapipe.emulation.emulation_file import EmulatedDevice, Emulation
from collapipe.v1.scheduler_pb2 import JOB_STATE_SUCCEEDED
from collapipe_client import LocalTestbed
from faults.interrupted import (
    MomentMissedError,
    Run,
    check_unfinished,
    run_interrupted,
    tried_again,
)

PROFILE = "raspberry-pi-4"
SLOWDOWN = 1 / DEVICE_PROFILES[PROFILE].seconds_per_micro_batch
SLOW = Emulation(devices={"device-1-0": EmulatedDevice(profile=PROFILE, slowdown=SLOWDOWN)})
"""A second for each micro-batch of cluster 1."""


@pytest.fixture
def emulated(tmp_path: Path) -> Iterator[LocalTestbed]:
    with LocalTestbed([2, 1], tmp_path / "testbed", emulation=Emulation()) as testbed:
        testbed.wait_until_registered()
        yield testbed


def test_rounds_without_a_late_cluster_are_repeated_bit_for_bit_after_a_kill(
    emulated: LocalTestbed, tmp_path: Path
) -> None:
    job = make_job(
        tmp_path,
        num_rows=(21, 33),
        devices_per_cluster=[2, 1],
        training={"rounds": 5, "local_steps": 4, "replicate_every": 10},
        schedule={"round_deadline_seconds": 4, "min_clusters": 1, "silence_seconds": 30},
    )
    committed_before: dict[int, list[int]] = {}

    def kill_after_a_late_round(run: Run) -> None:
        emulated.emulate(SLOW)
        deadline = time.monotonic() + 60
        try:
            while [1] not in (found := late_clusters(run, run.num_rounds_committed())).values():
                if run.final_state == JOB_STATE_SUCCEEDED:
                    raise MomentMissedError("the job ended before cluster 1 was slow")
                assert time.monotonic() < deadline, (
                    "no round was committed without the slow cluster"
                )
                time.sleep(0.05)
        finally:
            emulated.emulate(Emulation())
        committed_before.clear()
        committed_before.update(found)
        kill(emulated, "device-0-1")
        check_unfinished(run)

    run = run_interrupted(
        emulated,
        job,
        lambda run: run.round_index == 1,
        kill_after_a_late_round,
        hit=tried_again,
        limit_seconds=180,
    )
    assert run.final_state == JOB_STATE_SUCCEEDED, run.message
    late = late_clusters(run, job.training.rounds)
    assert committed_before.items() <= late.items()
    finished = FinishedJob(job, run.job_id, run.state)
    assert first_difference(train_job(job, late).weights, finished.weights()) is None


def late_clusters(run: Run, num_rounds: int) -> dict[int, list[int]]:
    """Returns the late clusters that the scheduler has recorded, by the index of the round."""
    state = run.state / "scheduler"
    return {
        index: StoredRow(state, "round", run.job_id, index).read()["late_clusters"]
        for index in range(num_rounds)
    }
