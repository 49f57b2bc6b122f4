"""Tests that a deleted job disappears from the disks of all services, and that other jobs stay usable."""

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from killed_processes import kill, restart
from reference.tiny_jobs import make_job
from stored_jobs import stored_ids

from collapipe.errors import NotFoundError, WrongStateError
from collapipe.v1.scheduler_pb2 import JOB_STATE_CANCELLED
from collapipe_client import LocalTestbed
from integration.running import run_job

KEEPERS = ("scheduler", "edge-server", "control-unit-0")
_LIMIT_SECONDS = 30.0
LONG = {"n_positions": 2000}


@pytest.fixture
def own_testbed(tmp_path: Path) -> Iterator[LocalTestbed]:
    options = ["--keep-jobs", "2"]
    with LocalTestbed([1], tmp_path / "testbed", scheduler_options=options) as testbed:
        testbed.wait_until_registered()
        yield testbed


def directories(testbed: LocalTestbed, job_id: str) -> list[str]:
    """Names the services that have a directory of a job."""
    state = testbed.workspace.state
    return [
        name
        for name in KEEPERS
        if (state / name / "jobs" / job_id).exists()
        or (name == "scheduler" and job_id in stored_ids(state / name))
    ]


def wait_until_gone(testbed: LocalTestbed, job_id: str, *, but_at: tuple[str, ...] = ()) -> None:
    deadline = time.monotonic() + _LIMIT_SECONDS
    while (kept := directories(testbed, job_id)) != list(but_at):
        assert time.monotonic() < deadline, f"{job_id} is still at {kept}"
        time.sleep(0.1)


def test_deleted_jobs_disappear_from_all_hosts_and_the_others_stay(
    own_testbed: LocalTestbed, tmp_path: Path
) -> None:
    testbed = own_testbed
    job = make_job(tmp_path / "data", "gpt2", "causal_lm", model_config=LONG)
    doomed, kept = run_job(testbed, job), run_job(testbed, job)
    for finished in (doomed, kept):
        assert directories(testbed, finished.job_id) == list(KEEPERS)
    with testbed.client() as client:
        pieces = client.predict(doomed.job_id, ["road river"] * 8, max_new_tokens=1900)
        next(pieces)
        with pytest.raises(WrongStateError, match="is used at the moment"):
            client.delete(doomed.job_id)
        assert directories(testbed, doomed.job_id) == list(KEEPERS)
        pieces.close()
        client.delete(doomed.job_id)
        assert [status.job_id for status in client.jobs()] == [kept.job_id]
        wait_until_gone(testbed, doomed.job_id)
        with pytest.raises(NotFoundError):
            client.delete(doomed.job_id)
        with pytest.raises(NotFoundError):
            client.export(doomed.job_id, tmp_path / "model")
        assert client.export(kept.job_id, tmp_path / "model")
        assert list(client.predict(kept.job_id, ["road"], max_new_tokens=2))

        running = client.submit(job)
        for event in client.watch(running):
            if event.HasField("round_started"):
                with pytest.raises(WrongStateError, match="cancel it first"):
                    client.delete(running)
                client.cancel(running)
        assert client.find_job(running).state == JOB_STATE_CANCELLED
        client.delete(running)
        wait_until_gone(testbed, running)
        assert directories(testbed, kept.job_id) == list(KEEPERS)


def test_host_that_was_down_deletes_when_it_registers_again(
    own_testbed: LocalTestbed, tmp_path: Path
) -> None:
    testbed = own_testbed
    job = make_job(tmp_path / "data")
    doomed, kept = run_job(testbed, job), run_job(testbed, job)
    kill(testbed, "control-unit-0")
    with testbed.client() as client:
        client.delete(doomed.job_id)
    wait_until_gone(testbed, doomed.job_id, but_at=("control-unit-0",))
    kill(testbed, "scheduler")
    for name in ("scheduler", "control-unit-0"):
        restart(testbed, name)
    wait_until_gone(testbed, doomed.job_id)
    assert directories(testbed, kept.job_id) == list(KEEPERS)
    testbed.wait_until_registered()

    # Two jobs are kept, so the third one to end pushes out the first.
    later = [run_job(testbed, job) for _ in range(2)]
    wait_until_gone(testbed, kept.job_id)
    for finished in later:
        assert directories(testbed, finished.job_id) == list(KEEPERS)
    with testbed.client() as client:
        assert client.export(later[0].job_id, tmp_path / "model")
