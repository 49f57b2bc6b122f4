"""A damaged file of a job or of the scheduler is named, or made again. Other jobs go on."""

import shutil
from collections.abc import Callable, Iterator
from itertools import chain
from pathlib import Path

import pytest
from damaged_files import damage, damage_values

from collapipe.errors import CollapipeError, CorruptDataError
from collapipe.scheduler.deleted_jobs import DeletedJobs
from collapipe.scheduler.events import EventLog
from collapipe.scheduler.grant_numbers import GrantNumbers
from collapipe.scheduler.job_progress import JobProgress
from collapipe.scheduler.job_store import JobStore, RoundResult
from collapipe.scheduler.planner_state import PlannerState
from collapipe.v1.job_pb2 import Evaluation
from collapipe.v1.scheduler_pb2 import (
    JOB_STATE_SUCCEEDED,
    JOB_STATE_UNREADABLE,
    HeartbeatResponse,
    RoundCommitted,
)

from .jobs import hosts, job, knowledge
from .test_job_store import attempt_of


@pytest.fixture
def other(store: JobStore) -> str:
    """Another job than the one whose files are damaged."""
    return store.create(job()).job_id


@pytest.fixture
def stored(store: JobStore, other: str, tmp_path: Path) -> Path:
    """The directory of a job with every kind of document."""
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
    return tmp_path / "jobs" / job_id


def damages(path: Path) -> Iterator[str]:
    return chain(damage(path), damage_values(path))


def test_job_whose_document_is_damaged_is_left_out_and_the_others_are_not(
    tmp_path: Path, stored: Path, other: str
) -> None:
    num_left_out = 0
    for how in damages(stored / "job.json"):
        restarted = JobStore(tmp_path)
        statuses = {status.job_id: status for status in restarted.statuses()}
        assert statuses.keys() == {stored.name, other}, how
        if statuses[stored.name].state == JOB_STATE_UNREADABLE:
            num_left_out += 1
            assert "job.json" in statuses[stored.name].message, how
            with pytest.raises(CorruptDataError, match=stored.name):
                restarted.get(stored.name)
        else:  # What the scheduler does with a job must be possible with these values.
            progress = JobProgress(restarted.get(stored.name), restarted, EventLog())
            assert progress.attempt(0).job_id == stored.name, how
    assert num_left_out > 100


def test_document_of_another_job_is_left_out(tmp_path: Path, stored: Path, other: str) -> None:
    shutil.copy(stored.with_name(other) / "job.json", stored / "job.json")
    restarted = JobStore(tmp_path)
    assert restarted.get(other).job_id == other
    with pytest.raises(CorruptDataError, match=rf"{stored.name}/job\.json .*{other}"):
        restarted.get(stored.name)


def test_damaged_account_of_privacy_does_not_count_as_less(tmp_path: Path) -> None:
    store = JobStore(tmp_path)
    document = store.create(job())
    path = tmp_path / "jobs" / document.job_id / "job.json"
    for cost in ("-1.0", "NaN", "Infinity"):
        path.write_text(path.read_text().replace('"of_averages": 0.0', f'"of_averages": {cost}'))
        with pytest.raises(CorruptDataError, match="job.json.*of_averages"):
            JobStore(tmp_path).get(document.job_id)
        path.write_text(path.read_text().replace(f'"of_averages": {cost}', '"of_averages": 0.0'))


@pytest.mark.parametrize(
    ("name", "read"),
    [
        ("rounds/000000.json", JobStore.find_round),
        ("results/000000.json", JobStore.find_result),
    ],
)
def test_damaged_document_of_a_round_is_named(
    stored: Path, store: JobStore, name: str, read: Callable[[JobStore, str, int], object]
) -> None:
    num_refused = 0
    for how in damages(stored / name):
        try:
            read(store, stored.name, 0)
        except CollapipeError as error:
            num_refused += 1
            assert name in str(error), how
    assert num_refused > 10
    assert read(store, stored.name, 0) is not None


def test_damaged_events_are_named(stored: Path, store: JobStore) -> None:
    for how in damages(stored / "events.json"):
        try:
            store.find_events(stored.name)
        except CorruptDataError as error:
            assert "events.json" in str(error), how


def test_state_of_a_planner_that_is_damaged_is_made_again(stored: Path, store: JobStore) -> None:
    for _ in damage(stored / "planner.json"):
        assert store.planner_state(stored.name) is None
    assert store.planner_state(stored.name) is not None


@pytest.mark.parametrize("name", ["grants.json", "deleted.json"])
def test_damaged_document_of_the_scheduler_is_named(tmp_path: Path, name: str) -> None:
    GrantNumbers(tmp_path).next()
    deleted = DeletedJobs(tmp_path)
    for job_id in ("a", "b"):
        (tmp_path / "deleted" / job_id).mkdir()
    deleted.finish()
    num_refused = 0
    for how in damages(tmp_path / name):
        try:
            grants, deleted = GrantNumbers(tmp_path), DeletedJobs(tmp_path)
        except CorruptDataError as error:
            num_refused += 1
            assert name in str(error), how
        else:  # Whatever is read fits into the answer to a heartbeat.
            job_ids, total = deleted.after(0)
            HeartbeatResponse(
                least_grant=grants.next(), deleted_job_ids=job_ids, num_deletions=total
            )
    assert num_refused > 10
