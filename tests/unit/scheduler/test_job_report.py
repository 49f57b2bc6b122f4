"""What a report of a job has, from the records of the job store."""

import json
from pathlib import Path

import pytest

from collapipe.errors import CorruptDataError, NotFoundError
from collapipe.rpc import ChannelPool, Security
from collapipe.scheduler.events import Event, EventLog
from collapipe.scheduler.host_registry import HostRegistry
from collapipe.scheduler.job_store import JobDocument, JobStore
from collapipe.scheduler.web import report as report_parts
from collapipe.scheduler.web.records import Records
from collapipe.scheduler.web.report import events_of, report
from collapipe.v1.scheduler_pb2 import JOB_STATE_CANCELLED

from .jobs import job
from .test_page_records import commit


@pytest.fixture
def store(tmp_path: Path) -> JobStore:
    return JobStore(tmp_path)


@pytest.fixture
def records(store: JobStore) -> Records:
    return Records(HostRegistry(), store, ChannelPool(Security.insecure()))


@pytest.fixture
def document(store: JobStore) -> JobDocument:
    document = store.create(job())
    for index in range(3):
        commit(store, document, index, 3.0 - index, 2.0 - index)
    return document


def test_report_has_the_job_then_its_rounds_with_reasons_where_plans_are_new(
    document: JobDocument, records: Records, store: JobStore
) -> None:
    log = EventLog()
    log.publish(Event(status=document.status()))
    first, *rounds = report(document, records, events_of(document, store, log), [])
    assert first["id"] == document.job_id and first["committed"] == 3
    assert first["settings"] == document.job.model_dump(mode="json")
    assert [event["text"] for event in first["events"]] == ["queued"]  # type: ignore[attr-defined]
    assert [each["round"] for each in rounds] == [1, 2, 3]
    assert [each["losses"] for each in rounds] == [[3.0, 2.0], [2.0, 1.0], [1.0, 0.0]]
    assert [bool(each["why"]) for each in rounds] == [True, False, True]
    [cluster] = rounds[0]["clusters"]  # type: ignore[misc]
    assert cluster["phases"]["training"] == 4.0 and cluster["needs_bytes"]["device-0"] > 0
    assert cluster["computing_seconds"] == {"device-0": 3.0}


def test_report_explains_the_last_round_and_not_too_many_new_plans(
    document: JobDocument, records: Records, store: JobStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(report_parts, "_MOST_EXPLAINED", 2)
    for index in range(3, 6):
        commit(store, document, index, 1.0)
    for index in range(6):
        round_ = store.round(document.job_id, index)
        round_.plans[0].stages[0].host_id = f"control-unit-{index}"
        store.save_round(document.job_id, index, round_)
    _, *rounds = report(document, records, None, [])
    assert [bool(each["why"]) for each in rounds] == [True, True, False, False, False, True]


@pytest.mark.parametrize(
    "change", [{"at": None}, {"at": "soon"}, {"at": float("nan")}, {"text": 1}], ids=str
)
def test_damaged_events_are_told_as_such(
    document: JobDocument, store: JobStore, tmp_path: Path, change: dict[str, object]
) -> None:
    log = EventLog()
    log.publish(Event(status=document.status()))
    store.save_events(document.job_id, events_of(document, store, log) or [])
    path = tmp_path / "jobs" / document.job_id / "events.json"
    stored = json.loads(path.read_text(encoding="utf-8"))
    stored["events"][0] |= change
    path.write_text(json.dumps(stored), encoding="utf-8")
    for source in (None, log):
        with pytest.raises(CorruptDataError, match="damaged"):
            events_of(document, store, source)


def test_events_outlive_the_scheduler_and_those_of_a_resumed_job_follow(
    document: JobDocument, records: Records, store: JobStore, tmp_path: Path
) -> None:
    assert events_of(document, store, None) is None
    first = EventLog()
    first.publish(Event(status=document.status()))
    store.save_events(document.job_id, events_of(document, store, first) or [])
    restarted = JobStore(tmp_path)
    [event] = events_of(document, restarted, None) or []
    assert event["text"] == "queued"
    again = EventLog()
    again.began = first.began + 1.0
    again.publish(Event(status=document.status()))
    assert [each["text"] for each in events_of(document, restarted, again) or []] == ["queued"] * 2
    assert len(events_of(document, restarted, first) or []) == 1
    (tmp_path / "jobs" / document.job_id / "events.json").write_text("[]", encoding="utf-8")
    with pytest.raises(CorruptDataError, match="damaged"):
        events_of(document, restarted, None)


def test_events_of_a_deleted_job_are_not_stored(store: JobStore, tmp_path: Path) -> None:
    document = store.create(job())
    document.state = JOB_STATE_CANCELLED
    store.delete(document.job_id, "a test")
    store.save_events(document.job_id, [])
    assert not (tmp_path / "jobs" / document.job_id).exists()


def test_round_without_a_record_is_in_the_report_as_far_as_possible(
    document: JobDocument, records: Records, monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing(*arguments: object, **options: object) -> None:
        raise NotFoundError("there is no record")

    monkeypatch.setattr(records, "round", missing)
    _, *rounds = report(document, records, None, [])
    assert [each["seconds"] for each in rounds] == [6.0, 6.0, 6.0]
