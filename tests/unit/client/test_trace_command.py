"""`collapipe trace` says what it wrote, how well the clocks agree, and which hosts are missing."""

from pathlib import Path

import pytest
from click.testing import Result
from typer.testing import CliRunner

from collapipe.v1.scheduler_pb2 import GetTraceRequest, GetTraceResponse, JobStatus
from collapipe.v1.trace_pb2 import Span
from collapipe_client.cli import app

from .conftest import FakeServices
from .traces import read_trace

MISSING = GetTraceResponse(host_id="device-0-1", missing="device-0-1 sends no heartbeats")


def spans(host_id: str, uncertainty: float = 0.0) -> GetTraceResponse:
    span = Span(track="round", name="run", started_seconds=1, ended_seconds=2)
    return GetTraceResponse(
        host_id=host_id, clock_uncertainty_seconds=uncertainty, spans=[span, span]
    )


@pytest.fixture
def one_job(fake: FakeServices, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeServices:
    monkeypatch.chdir(tmp_path)
    fake.jobs = [JobStatus(job_id="job-1", name="demo", num_rounds_committed=2)]
    return fake


def run(fake: FakeServices, *arguments: str) -> Result:
    return CliRunner().invoke(app, ["trace", *arguments, "--scheduler", fake.address, "--insecure"])


def test_last_round_of_the_newest_job_is_traced_and_missing_hosts_are_named(
    one_job: FakeServices, tmp_path: Path
) -> None:
    one_job.trace = [spans("scheduler"), spans("device-0-0", 0.0042), MISSING]
    result = run(one_job)
    assert result.exit_code == 0, result.output
    assert one_job.traced == [GetTraceRequest(job_id="job-1", round_index=1)]
    assert result.stdout.splitlines() == [
        ".collapipe/traces/job-1-round-2.pftrace has 4 spans of 2 hosts",
        "the clock of each host agrees with that of the scheduler within 4.2 ms",
    ]
    assert result.stderr == "not in the file: device-0-1 sends no heartbeats\n"
    assert (tmp_path / ".collapipe" / ".gitignore").read_text() == "*\n"
    read = read_trace(tmp_path / ".collapipe" / "traces" / "job-1-round-2.pftrace")
    assert len(read.slices) == 4
    assert read.attributes["missing device-0-1"] == "device-0-1 sends no heartbeats"


def test_round_without_any_spans_writes_no_file(one_job: FakeServices, tmp_path: Path) -> None:
    one_job.trace = [MISSING]
    result = run(one_job, "1")
    assert result.exit_code == 2
    assert "no host has spans of job job-1, round 1" in result.stderr
    assert "device-0-1 sends no heartbeats" in result.stderr
    assert not list(tmp_path.iterdir())
