"""Tests that kill one process at a given moment: the last commit stays intact, and the job resumes."""

import itertools
from collections.abc import Callable
from pathlib import Path

import pytest
from killed_processes import kill, restart

from collapipe.v1.scheduler_pb2 import JOB_STATE_FAILED
from collapipe_client import LocalTestbed
from faults.interrupted import (
    MOMENTS,
    Run,
    final_digests,
    intact_commit,
    make_interruptible_job,
    resume,
    run_interrupted,
)

pytestmark = pytest.mark.heavy

VICTIMS: dict[str, Callable[[Run], str]] = {
    "scheduler": lambda run: "scheduler",
    "edge server": lambda run: "edge-server",
    "control unit": lambda run: "control-unit-0",
    "middle device": lambda run: run.plans[0].stages[2].host_id,
    "last device": lambda run: run.plans[0].stages[-2].host_id,
}


CASES = [
    *itertools.product(("scheduler", "edge server", "control unit"), MOMENTS),
    *itertools.product(["middle device"], ("configure", "step", "committed")),
    *itertools.product(["last device"], ("configure", "gather", "commit")),
]


@pytest.mark.parametrize(("victim", "moment"), CASES)
def test_job_resumes_bit_for_bit_after_a_kill(
    testbed: LocalTestbed, undisturbed: list[str], tmp_path: Path, victim: str, moment: str
) -> None:
    job = make_interruptible_job(tmp_path)
    killed: list[str] = []

    def kill_victim(run: Run) -> None:
        killed.append(VICTIMS[victim](run))
        kill(testbed, killed[0])

    broken = run_interrupted(testbed, job, MOMENTS[moment], kill_victim)
    assert killed, f"the job ended before the moment of the kill: {broken}"
    assert testbed.lost() == killed
    assert intact_commit(broken).num_rounds in (1, 2)
    restart(testbed, killed[0])
    with testbed.client() as client:
        status = client.find_job(broken.job_id)
    assert status.state == JOB_STATE_FAILED
    assert killed[0] in status.message
    assert final_digests(intact_commit(resume(testbed, broken))) == undisturbed
