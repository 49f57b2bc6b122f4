"""A damaged row of a job, or a damaged database, is named or made again. Other jobs go on."""

from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest
from damaged_files import damage_values
from planned_jobs import hosts, job, knowledge
from stored_jobs import StoredRow

from collapipe.database import FILE_NAME
from collapipe.errors import CollapipeError, CorruptDataError
from collapipe.planning.planner_state import PlannerState
from collapipe.scheduler.events import EventLog
from collapipe.scheduler.job_documents import RoundResult
from collapipe.scheduler.job_progress import JobProgress
from collapipe.scheduler.job_store import JobStore
from collapipe.v1.job_pb2 import Evaluation
from collapipe.v1.scheduler_pb2 import (
    JOB_STATE_SUCCEEDED,
    JOB_STATE_UNREADABLE,
    RoundCommitted,
)

from .test_job_store import attempt_of


@pytest.fixture
def other(store: JobStore) -> str:
    """Another job than the one whose files are damaged."""
    return store.create(job()).job_id


@pytest.fixture
def stored(store: JobStore, other: str) -> str:
    """A job with every kind of document."""
    document = store.create(job())
    document.state, document.ended_at, document.num_rounds_committed = JOB_STATE_SUCCEEDED, 1e9, 1
    document.labels, document.num_first_rows, document.last_commit = ["a"], [7, 8], (0, 1)
    document.evaluation = Evaluation(num_rounds=1, metric="accuracy", value=0.5, num_rows=4)
    store.save(document)
    job_id = document.job_id
    store.save_round(job_id, 0, attempt_of(0, "device-0", 8))
    store.save_result(job_id, 0, RoundResult(committed=RoundCommitted(num_rounds=1)))
    store.save_events(job_id, [{"number": 1, "at": 1.0, "kind": "STATUS", "text": "began"}])
    state = PlannerState(strategy="dssra", knowledge=knowledge(hosts()), current_plans=())
    store.save_planner_state(job_id, state)
    return job_id


def damage(row: StoredRow) -> Iterator[str]:
    """Damages a row in one way after the other, and yields how. At the end, the row is as it was."""
    text = row.read_text()
    half = len(text) // 2
    for how, damaged in (
        ("another letter", f"{text[:half]}?{text[half + 1 :]}"),
        ("cut to half", text[:half]),
        ("cut to nothing", ""),
        ("zeros", "\0" * len(text)),
    ):
        row.write_text(damaged)
        yield how
    row.write_text(text)


def damages(row: StoredRow) -> Iterator[str]:
    yield from damage(row)
    yield from damage_values(row)


def test_job_whose_document_is_damaged_is_left_out_and_the_others_are_not(
    tmp_path: Path, stored: str, other: str
) -> None:
    num_left_out = 0
    for how in damages(StoredRow(tmp_path, "job", stored)):
        restarted = JobStore(tmp_path)
        statuses = {status.job_id: status for status in restarted.statuses()}
        assert statuses.keys() == {stored, other}, how
        if statuses[stored].state == JOB_STATE_UNREADABLE:
            num_left_out += 1
            with pytest.raises(CorruptDataError, match=stored):
                restarted.get(stored)
            assert {row.table for row in restarted.dump(stored)} > {"job", "round"}, how
        else:  # What the scheduler does with a job must be possible with these values.
            progress = JobProgress(restarted.get(stored), restarted, EventLog())
            assert progress.attempt(0).job_id == stored, how
    assert num_left_out > 100


def test_document_of_another_job_is_left_out(tmp_path: Path, stored: str, other: str) -> None:
    StoredRow(tmp_path, "job", stored).write(StoredRow(tmp_path, "job", other).read())
    restarted = JobStore(tmp_path)
    assert restarted.get(other).job_id == other
    with pytest.raises(CorruptDataError, match=rf"{stored} is that of job {other}"):
        restarted.get(stored)


def test_damaged_account_of_privacy_does_not_count_as_less(tmp_path: Path) -> None:
    store = JobStore(tmp_path)
    document = store.create(job())
    row = StoredRow(tmp_path, "job", document.job_id)
    for cost in ("-1.0", "NaN", "Infinity"):
        row.write_text(row.read_text().replace('"of_averages":0.0', f'"of_averages":{cost}'))
        with pytest.raises(CorruptDataError, match=f"{document.job_id}.*of_averages"):
            JobStore(tmp_path).get(document.job_id)
        row.write_text(row.read_text().replace(f'"of_averages":{cost}', '"of_averages":0.0'))


@pytest.mark.parametrize(
    ("table", "read"), [("round", JobStore.find_round), ("result", JobStore.find_result)]
)
def test_damaged_document_of_a_round_is_named(
    tmp_path: Path,
    stored: str,
    store: JobStore,
    table: str,
    read: Callable[[JobStore, str, int], object],
) -> None:
    num_refused = 0
    for how in damages(StoredRow(tmp_path, table, stored, 0)):
        try:
            read(store, stored, 0)
        except CollapipeError as error:
            num_refused += 1
            assert f"round 1 of job {stored} in table {table}" in str(error), how
    assert num_refused > 10
    assert read(store, stored, 0) is not None


def test_damaged_events_are_named(tmp_path: Path, stored: str, store: JobStore) -> None:
    for how in damages(StoredRow(tmp_path, "events", stored)):
        try:
            store.find_events(stored)
        except CorruptDataError as error:
            assert "table events" in str(error), how


def test_state_of_a_planner_that_is_damaged_is_made_again(
    tmp_path: Path, stored: str, store: JobStore
) -> None:
    for how in damage(StoredRow(tmp_path, "planner", stored)):
        if how != "another letter":  # It may be one of a name.
            assert store.planner_state(stored) is None
    assert store.planner_state(stored) is not None


def test_damaged_database_is_named_with_the_remedy(
    tmp_path: Path, stored: str, store: JobStore
) -> None:
    store.close()
    path = tmp_path / FILE_NAME
    data = path.read_bytes()
    num_refused = 0
    damaged = [data[: len(data) // 2], data[:100], bytes(len(data)), b"x" * len(data)]
    for place in range(0, len(data), 512):
        damaged.append(data[:place] + b"\xff" * 16 + data[place + 16 :])
    for content in damaged:
        path.write_bytes(content)
        try:
            with closing(JobStore(tmp_path)) as restarted:
                for status in restarted.statuses():
                    list(restarted.dump(status.job_id))
        except (CorruptDataError, OSError) as error:
            num_refused += 1
            assert str(path) in str(error)
            assert isinstance(error, OSError) or ".recover" in str(error)
        for left in tmp_path.glob(f"{FILE_NAME}-*"):
            left.unlink(missing_ok=True)
    assert num_refused > 10
    path.write_bytes(data)
    with closing(JobStore(tmp_path)) as restarted:
        assert len(restarted.all()) == 2


@pytest.mark.parametrize("version", [2, 99])
def test_database_of_another_version_is_refused(tmp_path: Path, version: int) -> None:
    with closing(JobStore(tmp_path)) as store:
        store._database.execute(f"PRAGMA user_version = {version}")
    with pytest.raises(CorruptDataError, match=f"version {version}.* version 1"):
        JobStore(tmp_path)
