"""What a report of a job has, from the records of the job store."""

from pathlib import Path

import pytest

from collapipe.errors import NotFoundError
from collapipe.rpc import ChannelPool, Security
from collapipe.scheduler.events import Event, EventLog
from collapipe.scheduler.host_registry import HostRegistry
from collapipe.scheduler.job_store import JobDocument, JobStore
from collapipe.scheduler.web.records import Records
from collapipe.scheduler.web.report import report

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
    document: JobDocument, records: Records
) -> None:
    log = EventLog()
    log.publish(Event(status=document.status()))
    first, *rounds = report(document, records, log, [])
    assert first["id"] == document.job_id and first["committed"] == 3
    assert first["settings"] == document.job.model_dump(mode="json")
    assert [event["text"] for event in first["events"]] == ["queued"]  # type: ignore[attr-defined]
    assert [each["round"] for each in rounds] == [1, 2, 3]
    assert [each["losses"] for each in rounds] == [[3.0, 2.0], [2.0, 1.0], [1.0, 0.0]]
    assert [bool(each["why"]) for each in rounds] == [True, False, True]
    [cluster] = rounds[0]["clusters"]  # type: ignore[misc]
    assert cluster["phases"]["training"] == 4.0 and cluster["needs_bytes"]["device-0"] > 0
    assert cluster["computing_seconds"] == {"device-0": 0.0}


def test_report_of_a_job_from_before_a_restart_has_no_events(
    document: JobDocument, records: Records
) -> None:
    first, *rounds = report(document, records, None, [])
    assert first["events"] is None and len(rounds) == 3


def test_round_without_a_record_is_in_the_report_as_far_as_possible(
    document: JobDocument, records: Records, monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing(*arguments: object, **options: object) -> None:
        raise NotFoundError("there is no record")

    monkeypatch.setattr(records, "round", missing)
    _, *rounds = report(document, records, None, [])
    assert [each["seconds"] for each in rounds] == [6.0, 6.0, 6.0]
