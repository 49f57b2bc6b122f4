"""What the page and the report of a job have of past rounds and events, from the records of the job store."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from planned_jobs import NO_STATE, Rounds, hosts, knowledge
from stored_jobs import StoredRow, stored_ids

from collapipe.errors import CorruptDataError, NotFoundError
from collapipe.rpc import ChannelPool
from collapipe.scheduler.events import Event, EventLog
from collapipe.scheduler.host_registry import HostRegistry
from collapipe.scheduler.job_documents import JobDocument, RoundDocument
from collapipe.scheduler.job_progress import JobProgress
from collapipe.scheduler.job_store import JobStore
from collapipe.scheduler.web import records
from collapipe.scheduler.web import report as report_parts
from collapipe.scheduler.web.records import Records
from collapipe.scheduler.web.report import events_of, report
from collapipe.v1.job_pb2 import Evaluation, RoundSummary
from collapipe.v1.plan_pb2 import Commit
from collapipe.v1.scheduler_pb2 import JOB_STATE_CANCELLED, RoundCommitted


@pytest.fixture(scope="module")
def record() -> RoundDocument:
    """The record of a round whose first device is beyond its budget."""
    of = hosts(budget_joules=5.0)
    known = knowledge(of)
    known.backlogs = {"device-0": 2.5}
    plans, decision = Rounds(of, known).decide()
    return RoundDocument(attempt=0, plans=plans, decision=decision.to_json(), total_steps=1)


@dataclass
class Job:
    """A job, its records, and rounds that a test commits."""

    document: JobDocument
    store: JobStore
    channels: ChannelPool
    record: RoundDocument

    def __post_init__(self) -> None:
        self.job_id = self.document.job_id
        self.records = self.read(self.store)

    def read(self, store: JobStore) -> Records:
        return Records(HostRegistry(), store, self.channels)

    def rounds(self, after: int = 0) -> Any:
        return self.records.rounds(self.job_id, after)

    def report(self, events: list[dict[str, object]] | None = None) -> Any:
        return report(self.document, self.records, events, [])

    def commit(self, index: int, *losses: float) -> None:
        """Commits a round with two clusters, of which the second is late."""
        self.store.save_round(self.job_id, index, self.record.model_copy(deep=True))
        trained = RoundSummary(
            losses=losses,
            evaluation_seconds=1.25,
            training_seconds=4.0,
            local_steps=len(losses),
            gather_seconds=0.5,
        )
        # The last step was busier than the others.
        times = {"forward_seconds": 1.0, "backward_seconds": 2.0, "total_seconds": 4.0}
        trained.stages.add(host_id="device-0", busy_ratio=0.9, times=times)
        number = self.document.num_rounds_committed = index + 1
        progress = JobProgress(self.document, self.store, EventLog())
        summaries = [trained, RoundSummary(evaluation_seconds=9.0)]
        committed = RoundCommitted(num_rounds=number, round_seconds=6.0, summaries=summaries)
        committed.late_clusters.append(1)
        progress.round_committed(committed, Commit(num_rounds=number), NO_STATE)
        evaluation = Evaluation(num_rounds=number, metric="accuracy", value=0.5)
        evaluation.other_metrics["loss"] = 1.0
        evaluation.definitions["accuracy"] = "a share"
        progress.evaluated(evaluation)


@pytest.fixture
def job(
    document: JobDocument, store: JobStore, channels: ChannelPool, record: RoundDocument
) -> Job:
    return Job(document, store, channels, record)


@pytest.fixture
def trained(job: Job) -> Job:
    """The job after three rounds."""
    for index in range(3):
        job.commit(index, 3.0 - index, 2.0 - index)
    return job


def queued(job: Job) -> EventLog:
    """A log with one event."""
    log = EventLog()
    log.publish(Event(status=job.document.status()))
    return log


def test_round_has_prediction_and_result_after_a_restart(job: Job, tmp_path: Path) -> None:
    job.commit(0, 3.0, 1.0)
    job.store.save(job.document)
    page = job.rounds()
    assert page == job.read(JobStore(tmp_path)).rounds(job.job_id, 0) and page["done"]
    [round_] = page["rounds"]
    assert round_["seconds"] == 6.0 and round_["predicted_seconds"] > 0
    # The evaluation of the late cluster is longer.
    assert round_["seconds_without_evaluation"] == pytest.approx(round_["seconds"] - 1.25)
    assert round_["losses"] == [3.0, 1.0] and round_["samples_per_second"] == 16 * 2 / 4
    assert round_["metrics"] == {"accuracy": 0.5, "loss": 1.0} and round_["late"] == [1]
    assert round_["queues"] == {"device-0": 2.5}
    assert ["edge-server", "head"] in round_["holders"][0]


def test_round_tells_who_held_what_and_why(job: Job) -> None:
    job.commit(0, 2.0)
    told: Any = job.records.round(job.job_id, 0)
    [cluster] = told["clusters"]
    assert cluster["pipeline"][0]["id"] == "control-unit"
    assert cluster["busy"] == {"device-0": 0.75} and cluster["phases"]["gather"] == 0.5
    assert cluster["bottleneck"] and cluster["devices"] == ["device-0", "device-1", "device-2"]
    assert any("bottleneck" in line for line in told["why"])
    with pytest.raises(NotFoundError, match="round 8"):
        job.records.round(job.job_id, 7)


def test_long_job_shows_few_rounds_and_losses(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(records, "MOST_ROUNDS", 2)
    monkeypatch.setattr(records, "_MOST_LOSSES", 4)
    for index in range(4):
        job.commit(index, 4.0, 2.0, 3.0, 1.0)
    page = job.rounds()
    assert page["every"] == 2 and [each["round"] for each in page["rounds"]] == [1, 3]
    assert [each["losses"] for each in page["rounds"]] == [[3.0, 2.0], [3.0, 2.0]]
    assert job.rounds(1)["rounds"] == page["rounds"][1:]


def test_reading_large_records_pauses(trained: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([0.0, 0.0, 1.0])
    monkeypatch.setattr(records.time, "monotonic", lambda: next(clock))
    page = trained.rounds()
    assert len(page["rounds"]) == 1 and page["next"] == 1 and not page["done"]


def test_damaged_decision_is_shown_as_far_as_possible(job: Job) -> None:
    older = RoundDocument(attempt=0, plans=[], decision={}, total_steps=1)
    job.store.save_round(job.job_id, 0, older)
    job.document.num_rounds_committed = 1
    [round_] = job.rounds()["rounds"]
    assert "seconds" not in round_ and round_["predicted_seconds"] is None
    told: Any = job.records.round(job.job_id, 0)
    assert len(told["why"]) == 1 and "decision" in told["why"][0]


def test_report_has_the_job_then_its_rounds_with_reasons_where_plans_are_new(trained: Job) -> None:
    events = events_of(trained.document, trained.store, queued(trained))
    first, *rounds = trained.report(events)
    assert first["id"] == trained.job_id and first["committed"] == 3
    assert first["settings"] == trained.document.job.model_dump(mode="json")
    assert [event["text"] for event in first["events"]] == ["queued"]
    assert [each["round"] for each in rounds] == [1, 2, 3]
    assert [each["losses"] for each in rounds] == [[3.0, 2.0], [2.0, 1.0], [1.0, 0.0]]
    assert [bool(each["why"]) for each in rounds] == [True, False, True]
    [cluster] = rounds[0]["clusters"]
    assert cluster["phases"]["training"] == 4.0 and cluster["needs_bytes"]["device-0"] > 0
    assert cluster["computing_seconds"] == {"device-0": 3.0}


def test_report_explains_only_some_new_plans(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report_parts, "_MOST_EXPLAINED", 2)
    for index in range(5):
        job.commit(index, 1.0)
        round_ = job.store.round(job.job_id, index)
        round_.plans[0].stages[0].host_id = f"control-unit-{index}"
        job.store.save_round(job.job_id, index, round_)
    _, *rounds = job.report()
    assert [bool(each["why"]) for each in rounds] == [True, True, False, False, True]


def test_round_without_a_record_is_reported(trained: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(*arguments: object, **options: object) -> None:
        raise NotFoundError("there is no record")

    monkeypatch.setattr(trained.records, "round", missing)
    _, *rounds = trained.report()
    assert [each["seconds"] for each in rounds] == [6.0, 6.0, 6.0]


@pytest.mark.parametrize(
    "change", [None, {"at": None}, {"at": "soon"}, {"at": float("nan")}, {"text": 1}], ids=str
)
def test_damaged_events_are_refused(
    job: Job, tmp_path: Path, change: dict[str, object] | None
) -> None:
    log = queued(job)
    job.store.save_events(job.job_id, events_of(job.document, job.store, log) or [])
    row = StoredRow(tmp_path, "events", job.job_id)
    stored = row.read()
    stored["events"][0] |= change or {}
    row.write(stored if change else [])
    for source in (None, log):
        with pytest.raises(CorruptDataError, match="events"):
            events_of(job.document, job.store, source)


def test_events_outlive_the_scheduler_and_are_continued(job: Job, tmp_path: Path) -> None:
    assert events_of(job.document, job.store, None) is None
    first, again = queued(job), queued(job)
    job.store.save_events(job.job_id, events_of(job.document, job.store, first) or [])
    again.began = first.began + 1.0
    restarted = JobStore(tmp_path)
    for log, num_events in ((None, 1), (first, 1), (again, 2)):
        told = events_of(job.document, restarted, log) or []
        assert [event["text"] for event in told] == ["queued"] * num_events


def test_events_of_a_deleted_job_are_not_stored(job: Job, tmp_path: Path) -> None:
    job.document.state = JOB_STATE_CANCELLED
    job.store.delete(job.job_id, "a test")
    job.store.save_events(job.job_id, [])
    assert stored_ids(tmp_path, "events") == stored_ids(tmp_path) == []
