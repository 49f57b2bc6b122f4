import json
import time

import pytest
from typer.testing import CliRunner

from collapipe.v1.scheduler_pb2 import JOB_STATE_CANCELLED, JOB_STATE_RUNNING, JobStatus
from collapipe_client.cli import app
from collapipe_client.quantities import say_age

from .conftest import FakeServices

_RUNNER = CliRunner()


@pytest.fixture
def remote(fake: FakeServices) -> list[str]:
    """The options that choose a scheduler with three jobs, two of one name."""
    running = JobStatus(
        job_id="a-1", name="a", state=JOB_STATE_RUNNING, num_rounds=5, stored_bytes=4_210_000_000
    )
    running.submitted_at.FromSeconds(int(time.time() - 3 * 3600 - 60))
    ended = [
        JobStatus(job_id=job_id, name="b", state=JOB_STATE_CANCELLED, message="by request")
        for job_id in ("b-1", "b-2")
    ]
    ended[0].ended_at.FromSeconds(1_000_000_000)
    fake.jobs = [running, *ended]
    return ["--scheduler", fake.address, "--insecure"]


def test_list_shows_state_rounds_age_disk_and_message(remote: list[str]) -> None:
    *lines, total = _RUNNER.invoke(app, ["jobs", "list", *remote]).stdout.splitlines()
    assert total.startswith("4,210.0 MB on the edge server in all; `collapipe jobs prune --keep 5`")
    assert [line.split() for line in lines] == [
        ["job", "name", "state", "rounds", "age", "disk", "message"],
        ["a-1", "a", "running", "0/5", "3", "h", "4,210.0", "MB"],
        ["b-1", "b", "cancelled", "0/0", "by", "request"],
        ["b-2", "b", "cancelled", "0/0", "by", "request"],
    ]


def test_list_shows_messages_that_look_like_markup(fake: FakeServices, remote: list[str]) -> None:
    fake.jobs[1].message = "collapipe[scheduler] [/x] :key:"
    result = _RUNNER.invoke(app, ["jobs", "list", *remote])
    assert result.exit_code == 0, result.output
    assert "collapipe[scheduler] [/x] :key:" in " ".join(result.stdout.split())


def test_list_as_json_has_the_times(remote: list[str]) -> None:
    jobs = json.loads(_RUNNER.invoke(app, ["jobs", "list", "--json", *remote]).stdout)["jobs"]
    assert [job["job_id"] for job in jobs] == ["a-1", "b-1", "b-2"]
    assert jobs[1]["ended_at"] == "2001-09-09T01:46:40Z"
    assert "ended_at" not in jobs[0]


def test_cancel_stops_several_jobs(fake: FakeServices, remote: list[str]) -> None:
    result = _RUNNER.invoke(app, ["jobs", "cancel", "a", "b-1", *remote])
    assert result.exit_code == 0
    assert fake.cancelled == ["a-1", "b-1"]
    assert "job a (a-1) will stop" in result.stdout


def test_delete_asks_and_deletes_nothing_without_a_yes(
    fake: FakeServices, remote: list[str]
) -> None:
    for answer in ("n\n", ""):
        result = _RUNNER.invoke(app, ["jobs", "delete", "b", "b-1", *remote], input=answer)
        assert result.exit_code == 1
        assert "Delete b-2, b-1 with all models?" in result.stderr
    assert fake.deleted == []
    result = _RUNNER.invoke(app, ["jobs", "delete", "b", "b-1", *remote], input="y\n")
    assert result.exit_code == 0
    assert fake.deleted == ["b-2", "b-1"]


def test_delete_with_yes_does_not_ask_and_deletes_each_job_once(
    fake: FakeServices, remote: list[str]
) -> None:
    result = _RUNNER.invoke(app, ["jobs", "delete", "--yes", "--json", "b", "b-2", *remote])
    assert [json.loads(line) for line in result.stdout.splitlines()] == [
        {"job_id": "b-2", "deleted": True}
    ]
    assert fake.deleted == ["b-2"]


def test_show_tells_what_is_known_of_a_job(fake: FakeServices, remote: list[str]) -> None:
    fake.jobs[0].evaluation.metric, fake.jobs[0].evaluation.value = "accuracy", 0.5
    shown = _RUNNER.invoke(app, ["jobs", "show", "a", *remote])
    assert shown.exit_code == 0, shown.output
    assert shown.stdout.splitlines()[:4] == [
        "job a-1 (a)",
        "  state: running",
        "  rounds: 0 of 5 are committed",
        "  evaluation: accuracy 0.5000 after 0 rounds (0 rows)",
    ]
    assert "  disk: 4,210.0 MB on the edge server" in shown.stdout


def test_prune_deletes_the_oldest_jobs_that_have_ended_and_no_others(
    fake: FakeServices, remote: list[str]
) -> None:
    fake.jobs += [JobStatus(job_id="c-1", state=JOB_STATE_CANCELLED, owner="client:other")]
    asked = _RUNNER.invoke(app, ["jobs", "prune", "--keep", "1", *remote], input="n\n")
    assert (asked.exit_code, fake.deleted) == (1, [])
    assert "Delete b-1 with all models?" in asked.stderr
    for keep in ("1", "2"):
        result = _RUNNER.invoke(app, ["jobs", "prune", "--keep", keep, "--yes", *remote])
        assert result.exit_code == 0, result.output
        assert fake.deleted == ["b-1"]
    assert "there is nothing to delete" in result.stdout


@pytest.mark.parametrize("command", [["delete", "--yes"], ["cancel"]])
def test_unknown_job_among_others_is_refused_before_anything_is_done(
    fake: FakeServices, remote: list[str], command: list[str]
) -> None:
    result = _RUNNER.invoke(app, ["jobs", *command, "b-1", "nobody", *remote])
    assert result.exit_code == 2
    assert "knows no job 'nobody'" in result.stderr
    assert fake.deleted == fake.cancelled == []


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(-2, "0 s"), (59.9, "59 s"), (61, "1 min"), (7199, "1 h"), (86_400 * 12.9, "12 d")],
)
def test_age_is_written_in_its_largest_unit(seconds: float, text: str) -> None:
    assert say_age(seconds) == text
