"""Tests that freeze a process: the job fails as if it were dead, and it does no harm when it wakes up."""

import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from collapipe.v1.scheduler_pb2 import JOB_STATE_FAILED
from collapipe_client import LocalTestbed
from faults.interrupted import (
    MOMENTS,
    SILENCE_SECONDS,
    Run,
    final_digests,
    intact_commit,
    make_interruptible_job,
    resume,
    run_interrupted,
)

pytestmark = pytest.mark.heavy

VICTIMS: dict[str, Callable[[Run], str]] = {
    "edge server": lambda run: "edge-server",
    "control unit": lambda run: "control-unit-0",
    "middle device": lambda run: run.plans[0].stages[2].host_id,
}


@pytest.mark.parametrize("victim", VICTIMS)
def test_error_names_frozen_process_which_disturbs_nothing_when_it_wakes_up(
    testbed: LocalTestbed, undisturbed: list[str], tmp_path: Path, victim: str
) -> None:
    frozen: list[str] = []

    def freeze(run: Run) -> None:
        frozen.append(VICTIMS[victim](run))
        os.kill(pid_of(testbed, frozen[0]), signal.SIGSTOP)

    try:
        broken = run_interrupted(testbed, make_interruptible_job(tmp_path), MOMENTS["step"], freeze)
        assert broken.final_state == JOB_STATE_FAILED
        # On a busy machine the round may be past its steps when the edge server stops: "finish the round", not "run".
        silence = f"{frozen[0]} has sent no sign of life for {SILENCE_SECONDS:g} s while it should"
        assert broken.message.startswith(silence)
        assert intact_commit(broken).num_rounds == 1
    finally:
        for name in frozen:
            os.kill(pid_of(testbed, name), signal.SIGCONT)
    # The process still has the session and links of the failed attempt, which must not disturb the next one.
    assert final_digests(intact_commit(resume(testbed, broken))) == undisturbed
    assert testbed.lost() == []


def pid_of(testbed: LocalTestbed, name: str) -> int:
    return next(process.pid for process in testbed.processes if process.name == name)
