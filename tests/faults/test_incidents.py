"""Tests of what a person sees when a device dies that the job cannot do without, until it is back."""

import json
import time
from datetime import datetime
from pathlib import Path
from typing import Any

from killed_processes import kill, restart
from typer.testing import CliRunner

from collapipe.scheduler.host_registry import HEARTBEAT_SECONDS, SILENCE_SECONDS
from collapipe.v1.scheduler_pb2 import JOB_STATE_SUCCEEDED, IncidentCode
from collapipe_client import LocalTestbed
from collapipe_client.cli import app
from faults.interrupted import (
    MOMENTS,
    PATIENT_SECONDS,
    Run,
    check_unfinished,
    final_digests,
    intact_commit,
    make_interruptible_job,
    run_interrupted,
)

_VICTIM = "device-1-0"
"""The only device of its cluster."""
_LIMIT_SECONDS = 60.0


def status_of(testbed: LocalTestbed, *options: str) -> str:
    """The output of `collapipe status`."""
    result = CliRunner().invoke(app, ["status", *testbed.endpoint_options, *options])
    assert result.exit_code == 0, result.output
    return result.stdout


def seconds(time_of_day: str) -> float:
    """The Unix time of a time in a document."""
    return datetime.fromisoformat(time_of_day.replace("Z", "+00:00")).timestamp()


def test_status_and_incidents_name_a_lost_device_until_the_job_has_recovered(
    testbed: LocalTestbed, undisturbed: list[str], tmp_path: Path
) -> None:
    seen: dict[str, Any] = {}

    def kill_look_and_restart(run: Run) -> None:
        # The job may have waited for a host that an earlier test has restarted.
        seen["before"] = len(run.incidents)
        kill(testbed, _VICTIM)
        check_unfinished(run)
        seen["killed_at"] = time.time()
        while "WAITING_FOR_HOSTS" not in run.codes(after=seen["before"]):
            assert time.time() - seen["killed_at"] < _LIMIT_SECONDS, run
            time.sleep(0.1)
        seen["text"] = status_of(testbed)
        seen["document"] = json.loads(status_of(testbed, "--json"))
        restart(testbed, _VICTIM)

    job = make_interruptible_job(tmp_path, PATIENT_SECONDS)
    run = run_interrupted(testbed, job, MOMENTS["step"], kill_look_and_restart)
    assert run.final_state == JOB_STATE_SUCCEEDED, run.message
    assert final_digests(intact_commit(run)) == undisturbed

    (status,) = (job for job in seen["document"]["jobs"] if job["job_id"] == run.job_id)
    trouble = status["trouble"]
    (missing,) = trouble["missing"]
    assert (missing["host_id"], missing["left_out"]) == (_VICTIM, "")
    age = seen["killed_at"] - seconds(missing["last_seen"])
    assert -HEARTBEAT_SECONDS < age < SILENCE_SECONDS
    assert trouble["waiting"] and trouble["num_failures"] >= 1 and _VICTIM in trouble["failure"]
    left = seconds(trouble["gives_up_at"]) - seen["killed_at"]
    assert _LIMIT_SECONDS < left < job.schedule.retry_seconds + _LIMIT_SECONDS
    assert f"job {run.job_id}: waits for {_VICTIM} (last heartbeat " in seen["text"]
    (host,) = (h for h in seen["document"]["hosts"] if h["host"]["host_id"] == _VICTIM)
    assert not host["alive"] and host["last_seen"] == missing["last_seen"]

    before = seen["before"]
    told_of_victim = run.codes(_VICTIM, before)
    assert told_of_victim == ["HOST_LOST", "WAITING_FOR_HOSTS", "HOST_BACK"], run.incidents
    codes = run.codes(after=before)
    order = ["HOST_LOST", "ATTEMPT_FAILED", "WAITING_FOR_HOSTS", "HOST_BACK", "RECOVERED"]
    assert sorted(order, key=codes.index) == order, codes
    log = (testbed.workspace.logs / "scheduler.log").read_text()
    logged = [line for line in log.splitlines() if f" job {run.job_id}: " in line]
    told = [line.split(f" job {run.job_id}: ")[0].split()[-1] for line in logged]
    names = IncidentCode.DESCRIPTOR.values_by_name
    known = {name.removeprefix("INCIDENT_CODE_") for name in names}
    assert [code for code in told if code in known] == run.codes()  # Others are those of warnings.

    after = json.loads(status_of(testbed, "--json"))
    assert "trouble" not in next(j for j in after["jobs"] if j["job_id"] == run.job_id)
