"""Commands in another terminal use the testbed that a single command has started for its job."""

import json
from pathlib import Path

from reference.tiny_jobs import make_job
from typer.testing import CliRunner

from collapipe_client import LocalTestbed
from collapipe_client.cli import app
from integration.running import run_job


def test_commands_attach_to_the_testbed_of_a_command_that_trains(
    testbed: LocalTestbed, tmp_path: Path
) -> None:
    finished = run_job(testbed, make_job(tmp_path, devices_per_cluster=2))
    workspace = ["--workspace", str(testbed.workspace.root)]

    def run(*arguments: str) -> str:
        result = CliRunner().invoke(app, [*arguments, *workspace])
        assert result.exit_code == 0, result.output
        return result.stdout

    status = json.loads(run("status", "--json"))
    assert status["scheduler"] == testbed.scheduler_address
    assert len(status["hosts"]) == len(testbed.processes) - 1
    job = ["--job", finished.job_id]
    assert json.loads(run("plan", "show", "--json", *job))["plans"]
    assert finished.job_id in run("jobs", "list")
    trace = tmp_path / "trace.pftrace"
    run("trace", *job, "--output", str(trace))
    assert trace.exists()
    last = json.loads(run("watch", finished.job_id, "--json").splitlines()[-1])
    assert last["state"] == "succeeded"

    result = CliRunner().invoke(app, ["train", "--preset", "demo", *workspace])
    assert result.exit_code == 2
    assert "follow it with `collapipe watch`" in result.stderr
