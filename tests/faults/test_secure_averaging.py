"""Tests that rounds with masked uploads are repeated with new masks, and give the same bits, after a kill."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from integration.running import FinishedJob
from killed_processes import kill, restart
from reference.comparison import first_difference
from reference.federated_job import train_job
from reference.tiny_jobs import make_job

from collapipe.v1.scheduler_pb2 import JOB_STATE_SUCCEEDED
from collapipe_client import LocalTestbed
from faults.interrupted import MOMENTS, Run, check_unfinished, run_interrupted, tried_again


@pytest.fixture
def testbed(tmp_path: Path) -> Iterator[LocalTestbed]:
    with LocalTestbed([2, 1, 1], tmp_path / "testbed") as testbed:
        testbed.wait_until_registered()
        yield testbed


@pytest.mark.parametrize(("killed", "moment"), [("device-0-1", "step"), ("edge-server", "commit")])
def test_rounds_are_repeated_bit_for_bit_with_new_masks_after_a_kill(
    testbed: LocalTestbed, tmp_path: Path, killed: str, moment: str
) -> None:
    job = make_job(
        tmp_path,
        num_rows=(21, 33, 14),
        devices_per_cluster=[2, 1, 1],
        averaging={"secure": True},
        training={"rounds": 3, "local_steps": 4, "replicate_every": 10},
        schedule={"silence_seconds": 30},
    )

    def inject(run: Run) -> None:
        kill(testbed, killed)
        check_unfinished(run)
        if killed == "edge-server":  # A cluster goes on with its other device.
            restart(testbed, killed)

    run = run_interrupted(testbed, job, MOMENTS[moment], inject, hit=tried_again, limit_seconds=180)
    assert run.final_state == JOB_STATE_SUCCEEDED, run.message
    finished = FinishedJob(job, run.job_id, run.state)
    assert first_difference(train_job(job).weights, finished.weights()) is None
