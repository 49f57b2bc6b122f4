"""Tests that freeze a process: the job goes on without the process or waits for it, and the process does no harm later."""

import os
import signal
import time
from pathlib import Path

import pytest

from collapipe.v1.scheduler_pb2 import JOB_STATE_SUCCEEDED
from collapipe_client import LocalTestbed
from faults.interrupted import (
    MOMENTS,
    SERVICES,
    SILENCE_SECONDS,
    Run,
    check_unfinished,
    final_digests,
    intact_commit,
    make_interruptible_job,
    run_interrupted,
)

FROZEN_SECONDS = SILENCE_SECONDS + 3


@pytest.mark.parametrize("victim", SERVICES)
def test_job_goes_on_although_a_process_freezes_and_wakes_up(
    testbed: LocalTestbed, undisturbed: list[str], tmp_path: Path, victim: str
) -> None:
    frozen: list[str] = []

    def freeze(run: Run) -> None:
        frozen[:] = [SERVICES[victim](run)]
        pid = pid_of(testbed, frozen[0])
        os.kill(pid, signal.SIGSTOP)
        try:
            check_unfinished(run)
            deadline = time.monotonic() + FROZEN_SECONDS
            while not run.ended and time.monotonic() < deadline:
                time.sleep(0.05)
        finally:
            # The process still has the session and links of the failed attempt, which must not disturb the next one.
            os.kill(pid, signal.SIGCONT)

    job = make_interruptible_job(tmp_path)
    run = run_interrupted(testbed, job, MOMENTS["step"], freeze)
    assert run.final_state == JOB_STATE_SUCCEEDED, run.message
    if victim != "scheduler":
        # On a busy machine the round may be past its steps when the edge server stops, and the other cluster may not have
        # begun: then the stage before the head notices first that it accepts no stream.
        notices = [
            f"{frozen[0]} has sent no sign of life for {SILENCE_SECONDS:g} s while it should",
            f"{frozen[0]} has not accepted the stream of the stage before it",
        ]
        assert any(notice in message for notice in notices for message in run.messages), (
            run.messages
        )
    assert final_digests(intact_commit(run)) == undisturbed
    testbed.wait_until_registered()
    assert testbed.lost() == []


def pid_of(testbed: LocalTestbed, name: str) -> int:
    return next(process.pid for process in testbed.processes if process.name == name)
