"""Tests that interrupt or kill the client: no process remains, and no committed round is lost."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from reference.tiny_jobs import make_job
from stored_jobs import stored_commit, stored_ids

from collapipe.job import JobConfig
from collapipe.v1.scheduler_pb2 import JOB_STATE_CANCELLED, JOB_STATE_SUCCEEDED
from collapipe_client import LocalTestbed
from collapipe_client.workspace import Workspace
from faults.interrupted import (
    PATIENT_SECONDS,
    MomentMissedError,
    Run,
    final_digests,
    intact_commit,
    make_interruptible_job,
    resume,
    run_interrupted,
    try_until_hit,
)

pytestmark = pytest.mark.timeout(900)

_LIMIT_SECONDS = 240.0
"""Ten times what a command takes that starts a testbed and trains."""

_RUN_WITH_CTRL_C = """
import runpy, signal
signal.signal(signal.SIGINT, signal.default_int_handler)
runpy.run_module("collapipe_client", run_name="__main__", alter_sys=True)
"""
"""Runs the command with the usual handling of Ctrl-C.

Tests may run as a background job of a shell, whose processes ignore SIGINT unless they set a handler.
"""


def test_train_leaves_no_process_when_interrupted_or_killed_and_resumes(
    testbed: LocalTestbed, tmp_path: Path
) -> None:
    job = make_job(
        tmp_path,
        devices_per_cluster=1,
        # So many rounds that the job has not ended when it is disturbed.
        training={"rounds": 12, "local_steps": 2},
        schedule={"silence_seconds": PATIENT_SECONDS},
    )
    expected = run_interrupted(testbed, job)
    assert expected.final_state == JOB_STATE_SUCCEEDED, expected.message
    job_file = write_job(tmp_path, job)
    workspace = Workspace(tmp_path / "workspace")
    arguments = [str(job_file), "--workspace", str(workspace.root), "--output", str(tmp_path / "m")]

    interrupted = Command(tmp_path / "1.log", "train", *arguments)
    interrupted.wait_for("round 2/12 starts")
    started = workspace.read_record()
    assert started is not None and len(started.alive) == 4
    interrupted.popen.send_signal(signal.SIGINT)
    assert interrupted.popen.wait(_LIMIT_SECONDS) == 130
    assert not started.alive
    assert workspace.read_record() is None
    assert "of 12 rounds are committed; continue with:" in interrupted.output()
    assert "--resume" in interrupted.output()

    killed = Command(tmp_path / "2.log", "train", *arguments, "--resume")
    killed.wait_for("/12 committed")
    started = workspace.read_record()
    assert started is not None and len(started.alive) == 4
    killed.popen.kill()
    killed.popen.wait()
    wait_until_ended(started)

    last = Command(tmp_path / "3.log", "train", *arguments, "--resume")
    assert last.popen.wait(_LIMIT_SECONDS) == 0, last.output()
    edge_server = workspace.state / "edge-server"
    [job_id] = stored_ids(edge_server)
    commit = stored_commit(edge_server, job_id)
    assert final_digests(commit) == final_digests(intact_commit(expected))


@pytest.mark.parametrize("signal_number", [signal.SIGINT, signal.SIGKILL])
def test_services_outlive_a_client_that_is_interrupted_or_killed(
    testbed: LocalTestbed, undisturbed: list[str], tmp_path: Path, signal_number: signal.Signals
) -> None:
    job = make_interruptible_job(tmp_path, PATIENT_SECONDS, name=f"of-{signal_number.name}")
    job_file = write_job(tmp_path, job)
    options = [*testbed.endpoint_options, "--overwrite", "--output", str(tmp_path / "model")]

    def attempt() -> Run:
        command = Command(tmp_path / "log", "train", str(job_file), *options)
        command.wait_for("round 1/3 committed")
        with testbed.client() as client:
            job_id = client.find_job(job.name).job_id
            run = Run(job, testbed.workspace.state, job_id)
            command.popen.send_signal(signal_number)
            command.popen.wait(_LIMIT_SECONDS)
            if run.num_rounds_committed() == job.training.rounds:
                raise MomentMissedError("the job had ended before the signal")
            for _ in client.watch(job_id):
                pass
            run.final_state = client.find_job(job_id).state
        intact_commit(run)
        return run

    run = try_until_hit(attempt)
    if signal_number == signal.SIGINT:
        assert run.final_state == JOB_STATE_CANCELLED
        run = resume(testbed, run)
    else:
        assert run.final_state == JOB_STATE_SUCCEEDED
    assert final_digests(intact_commit(run)) == undisturbed
    assert testbed.lost() == []


class Command:
    """A running `collapipe` command."""

    def __init__(self, log: Path, *arguments: str) -> None:
        self._log = log
        with open(log, "wb") as file:
            self.popen = subprocess.Popen(
                [sys.executable, "-c", _RUN_WITH_CTRL_C, *arguments],
                stdout=file,
                stderr=subprocess.STDOUT,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
            )

    def output(self) -> str:
        """Returns the output of the command so far."""
        return self._log.read_text()

    def wait_for(self, words: str) -> None:
        """Waits until the output contains `words`."""
        deadline = time.monotonic() + _LIMIT_SECONDS
        while words not in self.output():
            assert self.popen.poll() is None, self.output()
            assert time.monotonic() < deadline, self.output()
            time.sleep(0.02)


def wait_until_ended(record: Any) -> None:
    """Waits for processes that end by themselves when their parent has ended."""
    deadline = time.monotonic() + _LIMIT_SECONDS
    while record.alive:
        assert time.monotonic() < deadline, record.alive
        time.sleep(0.1)


def write_job(folder: Path, job: JobConfig) -> Path:
    """Writes a job as TOML."""
    path = folder / "job.toml"
    path.write_text(_to_toml(job.model_dump(exclude_unset=True)))
    return path


def _to_toml(document: dict[str, Any], prefix: str = "") -> str:
    lines = [f"{k} = {json.dumps(v)}\n" for k, v in document.items() if not isinstance(v, dict)]
    for key, value in document.items():
        if isinstance(value, dict):
            lines.append(f"[{prefix}{key}]\n{_to_toml(value, f'{prefix}{key}.')}")
    return "".join(lines)
