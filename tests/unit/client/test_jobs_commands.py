import time

import pytest

from collapipe.v1.job_pb2 import Evaluation
from collapipe.v1.scheduler_pb2 import (
    JOB_STATE_CANCELLED,
    JOB_STATE_RUNNING,
    JOB_STATE_UNREADABLE,
    DumpJobResponse,
    JobStatus,
)

from .commands import run, run_json, run_lines
from .fake_services import FakeServices


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
    return fake.options


def test_list_shows_state_rounds_age_disk_and_message(remote: list[str]) -> None:
    *lines, total = run("jobs", "list", *remote).stdout.splitlines()
    assert "4,210.0 MB" in total and "collapipe jobs prune" in total
    assert [line.split() for line in lines] == [
        ["job", "name", "state", "rounds", "age", "disk", "message"],
        ["a-1", "a", "running", "0/5", "3", "h", "4,210.0", "MB"],
        ["b-1", "b", "cancelled", "0/0", "by", "request"],
        ["b-2", "b", "cancelled", "0/0", "by", "request"],
    ]


def test_list_shows_messages_that_look_like_markup(fake: FakeServices, remote: list[str]) -> None:
    fake.jobs[1].message = "collapipe[scheduler] [/x] :key:"
    printed = run("jobs", "list", *remote).stdout
    assert "collapipe[scheduler] [/x] :key:" in " ".join(printed.split())


def test_list_as_json_has_the_times(remote: list[str]) -> None:
    jobs = run_json("jobs", "list", *remote)["jobs"]
    assert [job["job_id"] for job in jobs] == ["a-1", "b-1", "b-2"]
    assert jobs[1]["ended_at"] == "2001-09-09T01:46:40Z"
    assert "ended_at" not in jobs[0]


def test_cancel_stops_several_jobs(fake: FakeServices, remote: list[str]) -> None:
    assert "a (a-1)" in run("jobs", "cancel", "a", "b-1", *remote).stdout
    assert fake.cancelled == ["a-1", "b-1"]


def test_delete_asks_unless_told_yes_and_deletes_each_job_once(
    fake: FakeServices, remote: list[str]
) -> None:
    for answer in ("n\n", ""):
        asked = run("jobs", "delete", "b", "b-1", *remote, typed=answer, code=1)
        assert "b-2, b-1" in asked.stderr
    assert fake.deleted == []
    run("jobs", "delete", "b", "b-1", *remote, typed="y\n")
    assert fake.deleted == ["b-2", "b-1"]
    fake.deleted.clear()
    told = run_lines("jobs", "delete", "--yes", "b", "b-2", *remote)
    assert told == [{"job_id": "b-2", "deleted": True}]
    assert fake.deleted == ["b-2"]


def test_show_tells_what_is_known_of_a_job(fake: FakeServices, remote: list[str]) -> None:
    fake.jobs[0].evaluation.CopyFrom(
        Evaluation(
            metric="accuracy",
            value=0.5,
            other_metrics={"macro_f1": 0.25},
            definitions={"accuracy": "a share"},
            one_answer=True,
        )
    )
    shown = run("jobs", "show", "a", *remote).stdout
    for words in ("a-1 (a)", "running", "0 of 5", "accuracy 0.5000, macro_f1 0.2500", "4,210.0 MB"):
        assert words in shown
    assert "accuracy: a share" in shown and "  warning: " in shown


def test_nothing_is_cut_where_the_output_is_no_terminal(
    fake: FakeServices, remote: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    long = JobStatus(job_id=f"{'long-' * 20}1", name="n" * 90, state=JOB_STATE_RUNNING)
    fake.jobs[:] = [long]
    _, line, *_ = run("jobs", "list", *remote).stdout.splitlines()
    assert line.split()[:3] == [long.job_id, long.name, "running"]


def test_job_that_cannot_be_read_is_listed_and_never_the_default(
    fake: FakeServices, remote: list[str]
) -> None:
    damaged = JobStatus(job_id="z-1", state=JOB_STATE_UNREADABLE, message="job.json is damaged")
    fake.jobs[:] = [damaged]
    listed = run("jobs", "list", *remote).stdout
    assert "z-1" in listed and "unreadable" in listed
    assert "job.json is damaged" in run("jobs", "show", "z-1", *remote).stdout
    [document] = run_json("jobs", "list", *remote)["jobs"]
    assert document["state"] == "unreadable"
    run("watch", *remote, code=2)
    assert run_lines("jobs", "prune", "--keep", "0", "--yes", *remote) == []


def test_prune_deletes_the_oldest_jobs_that_have_ended_and_no_others(
    fake: FakeServices, remote: list[str]
) -> None:
    fake.jobs += [JobStatus(job_id="c-1", state=JOB_STATE_CANCELLED, owner="client:other")]
    asked = run("jobs", "prune", "--keep", "1", *remote, typed="n\n", code=1)
    assert "b-1" in asked.stderr and fake.deleted == []
    for keep in ("1", "2"):
        result = run("jobs", "prune", "--keep", keep, "--yes", *remote)
        assert fake.deleted == ["b-1"]
    assert "nothing" in result.stdout


@pytest.mark.parametrize("command", [["delete", "--yes"], ["cancel"]])
def test_unknown_job_among_others_is_refused_before_anything_is_done(
    fake: FakeServices, remote: list[str], command: list[str]
) -> None:
    assert "'nobody'" in run("jobs", *command, "b-1", "nobody", *remote, code=2).stderr
    assert fake.deleted == fake.cancelled == []


def test_dump_joins_the_parts_of_rows_and_shows_damaged_ones_as_text(
    fake: FakeServices, remote: list[str]
) -> None:
    fake.stored["a-1"] = [
        DumpJobResponse(table="job", document_json='{"job_id": '),
        DumpJobResponse(table="job", document_json='"a-1"}'),
        DumpJobResponse(table="round", round_index=0, document_json='{"limit": Infinity}'),
        DumpJobResponse(table="round", round_index=1, document_json="[" * 100_000),
        DumpJobResponse(table="result", round_index=0, document_json="{damaged"),
        DumpJobResponse(host_id="edge", table="last_commit", document_json='{"num_rounds": 3}'),
        DumpJobResponse(host_id="cu-0", table="round", round_index=1, document_json="{}"),
        DumpJobResponse(host_id="cu-1", missing="cu-1 sends no heartbeats"),
        DumpJobResponse(host_id="cu-2"),
    ]
    stored = run_json("jobs", "dump", "a", *remote)
    assert (stored["job"], stored["planner"], stored["events"]) == ({"job_id": "a-1"}, None, None)
    assert stored["round"][0] == {"round": 1, "document": {"limit": None}}
    assert stored["round"][1]["document"] == "[" * 100_000
    assert stored["result"] == [{"round": 1, "document": "{damaged"}]
    assert stored["hosts"] == {
        "edge": {"last_commit": {"num_rounds": 3}},
        "cu-0": {"round": [{"round": 2, "document": {}}]},
        "cu-1": {"missing": "cu-1 sends no heartbeats"},
        "cu-2": {},
    }
