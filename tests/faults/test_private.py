"""Tests that private jobs keep their commits and their account after a kill."""

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from integration.running import FinishedJob
from killed_processes import kill, restart
from reference.comparison import first_difference
from reference.federated_job import train_job
from reference.tiny_jobs import make_job

from collapipe.scheduler.privacy_account import PrivacyAccount
from collapipe.v1.scheduler_pb2 import JOB_STATE_SUCCEEDED
from collapipe_client import LocalTestbed
from faults.interrupted import (
    MOMENTS,
    MomentMissedError,
    Run,
    check_unfinished,
    intact_commit,
    run_interrupted,
    tried_again,
)


@pytest.fixture
def testbed(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[LocalTestbed]:
    """Provides a testbed with the numbers of devices that a test asks for."""
    with LocalTestbed(request.param, tmp_path / "testbed") as testbed:
        testbed.wait_until_registered()
        yield testbed


@pytest.mark.parametrize("testbed", [[1]], indirect=True)
def test_job_without_budget_for_repeated_rounds_keeps_the_commit_that_it_had(
    testbed: LocalTestbed, tmp_path: Path
) -> None:
    privacy = {"noise_multiplier": 4.0, "clip_norm": 0.1}
    # With fewer steps, five rounds may end before their events have arrived.
    training = {"rounds": 5, "local_steps": 16, "replicate_every": 10}
    schedule = {"silence_seconds": 30}
    job = make_job(
        tmp_path, devices_per_cluster=1, privacy=privacy, training=training, schedule=schedule
    )
    epsilons = [PrivacyAccount().after_rounds(job, n).loss(job).epsilon for n in (6, 7)]
    limit = job.privacy.model_copy(update={"max_epsilon": sum(epsilons) / 2})
    job = job.model_copy(update={"privacy": limit})
    announced: list[str] = []

    def inject(run: Run) -> None:
        announced[:] = _weights(run)
        kill(testbed, "device-0-0")
        check_unfinished(run)
        restart(testbed, "device-0-0")
        # Rounds 1 and 2 are repeated, because no optimizer state was copied. Round 2 is lost again.
        while not (len(run.commits) == 3 and run.round_index == 1 and run.steps_done):
            if run.final_state == JOB_STATE_SUCCEEDED:
                raise MomentMissedError(f"the second round was not seen again: {run.messages}")
            assert not run.ended, run.messages
            time.sleep(0.002)
        kill(testbed, "device-0-0")
        if run.num_rounds_committed() > 2:
            raise MomentMissedError("round 3 was committed before the second kill")
        restart(testbed, "device-0-0")

    run = run_interrupted(
        testbed,
        job,
        lambda run: run.round_index == 2 and run.steps_done >= 1,
        inject,
        # The second kill may come when the repeated round 2 is committed, and round 3 has begun again.
        hit=lambda run: run.num_rounds_started == 5,
        limit_seconds=300,
    )
    assert run.final_state == JOB_STATE_SUCCEEDED, run.message
    assert "ended after 2 of 5 rounds" in run.message
    assert "privacy.max_epsilon" in run.message
    assert intact_commit(run).num_rounds == 2
    assert _weights(run) == announced
    with testbed.client() as client:
        status = client.find_job(run.job_id)
    assert status.num_rounds_committed == 2
    assert status.privacy_loss.epsilon == PrivacyAccount().after_rounds(job, 5).loss(job).epsilon


@pytest.mark.parametrize("testbed", [[2, 2, 2]], indirect=True)
@pytest.mark.parametrize(
    ("segments", "killed", "moment"),
    [
        ([[1, 2]], "", ""),
        ([[2, 1], [1, 2]], "", ""),
        (None, "device-0-1", "step"),
        (None, "edge-server", "commit"),
    ],
)
def test_masked_private_average_equals_the_reference_for_any_placement_and_after_a_kill(
    testbed: LocalTestbed,
    tmp_path: Path,
    segments: list[list[int]] | None,
    killed: str,
    moment: str,
) -> None:
    schedule = {"strategy": "manual", "segments": segments} if segments else {}
    job = make_job(
        tmp_path,
        num_rows=(21, 33, 14),
        devices_per_cluster=2,
        averaging={"secure": True},
        privacy={"noise_multiplier": 1.0, "clip_norm": 0.1},
        training={"rounds": 3, "local_steps": 4, "replicate_every": 10},
        schedule={"silence_seconds": 30, **schedule},
    )

    def inject(run: Run) -> None:
        kill(testbed, killed)
        check_unfinished(run)
        if killed == "edge-server":  # A cluster goes on with its other device.
            restart(testbed, killed)

    run = run_interrupted(
        testbed,
        job,
        MOMENTS[moment] if killed else None,
        inject,
        hit=tried_again,
        limit_seconds=300,
    )
    assert run.final_state == JOB_STATE_SUCCEEDED, run.message
    assert tried_again(run) == bool(killed)
    finished = FinishedJob(job, run.job_id, run.state)
    secrets = [
        (run.directory(f"control-unit-{index}") / "noise-secret").read_bytes() for index in range(3)
    ]
    expected = train_job(job, noise_secrets=secrets).weights
    assert first_difference(expected, finished.weights()) is None
    with testbed.client() as client:
        epsilon = client.find_job(run.job_id).privacy_loss.epsilon
    account = PrivacyAccount().after_rounds(job, run.num_rounds_started)
    assert epsilon == account.loss(job).epsilon


def _weights(run: Run) -> list[str]:
    return [unit.weights_digest for unit in intact_commit(run).global_units]
