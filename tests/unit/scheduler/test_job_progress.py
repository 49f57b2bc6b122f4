"""What clients and the log get when a job lacks a host."""

import logging
from pathlib import Path

import pytest

from collapipe.scheduler.events import Event, EventLog
from collapipe.scheduler.job_progress import JobProgress
from collapipe.scheduler.job_store import JobStore
from collapipe.v1.job_pb2 import Evaluation
from collapipe.v1.scheduler_pb2 import (
    INCIDENT_CODE_HOST_LOST,
    JOB_STATE_FAILED,
    JobTrouble,
    RoundCommitted,
)

from .jobs import job


@pytest.fixture
def store(tmp_path: Path) -> JobStore:
    return JobStore(tmp_path)


@pytest.fixture
def events() -> EventLog:
    return EventLog()


@pytest.fixture
def progress(store: JobStore, events: EventLog) -> JobProgress:
    return JobProgress(store.create(job()), store, events)


def published(events: EventLog) -> list[Event]:
    events.close()
    return [event for event in events.watch(20.0) if event is not None]


def trouble(seconds: int, num_failures: int = 1) -> JobTrouble:
    found = JobTrouble(num_failures=num_failures)
    found.gives_up_at.FromSeconds(seconds)
    found.missing.add(host_id="device-0").last_seen.FromSeconds(seconds)
    return found


def test_incident_is_published_and_logged_with_its_code(
    progress: JobProgress, events: EventLog, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        progress.tell(INCIDENT_CODE_HOST_LOST, "device-0 is lost", "device-0")
    (event,) = published(events)
    assert event.incident.code == INCIDENT_CODE_HOST_LOST
    assert (event.incident.message, event.incident.host_ids) == ("device-0 is lost", ["device-0"])
    (record,) = caplog.records
    assert record.getMessage() == f"HOST_LOST job {progress.job_id}: device-0 is lost"
    assert (record.__dict__["code"], record.__dict__["job_id"]) == ("HOST_LOST", progress.job_id)


def test_trouble_is_published_only_if_more_than_its_times_has_changed(
    progress: JobProgress, events: EventLog
) -> None:
    for one in (trouble(1), trouble(2), trouble(3, num_failures=2), JobTrouble()):
        progress.set_trouble(one)
    first, second, last = (event.status for event in published(events))
    assert first.trouble == trouble(1)
    assert second.trouble == trouble(3, num_failures=2)
    assert not last.HasField("trouble")


def test_listed_job_has_the_newest_times_which_its_file_and_its_end_do_not_have(
    progress: JobProgress, store: JobStore, tmp_path: Path
) -> None:
    progress.set_trouble(trouble(1))
    progress.set_trouble(trouble(2))
    progress.save()
    assert store.get(progress.job_id).status().trouble == trouble(2)
    assert not JobStore(tmp_path).get(progress.job_id).status().HasField("trouble")
    progress.end(JOB_STATE_FAILED, "given up")
    assert not store.get(progress.job_id).status().HasField("trouble")


def test_result_of_a_round_is_stored_with_its_evaluation(
    progress: JobProgress, store: JobStore, events: EventLog
) -> None:
    progress.round_committed(RoundCommitted(num_rounds=1, round_seconds=2.0))
    progress.evaluated(Evaluation(num_rounds=0, metric="accuracy", value=0.25))
    progress.evaluated(Evaluation(num_rounds=1, metric="accuracy", value=0.5))
    result = store.find_result(progress.job_id, 0)
    assert result is not None and result.evaluation is not None
    assert (result.committed.round_seconds, result.evaluation.value) == (2.0, 0.5)
    assert store.find_result(progress.job_id, 1) is None
    kinds = [event.WhichOneof("event") for event in published(events)]
    assert kinds == ["round_committed", "evaluation", "evaluation"]


def test_full_disk_takes_the_result_of_a_round_but_not_the_job(
    progress: JobProgress,
    store: JobStore,
    events: EventLog,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    (tmp_path / "jobs" / progress.job_id / "results").write_text("in the way")
    progress.round_committed(RoundCommitted(num_rounds=1, round_seconds=2.0))
    assert "round 1 has no stored result" in caplog.text
    assert published(events)[0].round_committed.round_seconds == 2.0


def test_damaged_result_of_a_round_costs_its_evaluation_but_not_the_job(
    progress: JobProgress, events: EventLog, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    progress.round_committed(RoundCommitted(num_rounds=1, round_seconds=2.0))
    [file] = (tmp_path / "jobs" / progress.job_id / "results").iterdir()
    file.write_text("{", encoding="utf-8")
    progress.evaluated(Evaluation(num_rounds=1, metric="accuracy", value=0.5))
    assert "the result of round 1 is lost" in caplog.text
    assert published(events)[-1].evaluation.value == 0.5
