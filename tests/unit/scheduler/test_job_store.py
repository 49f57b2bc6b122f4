"""What the scheduler stores of jobs, rounds, deletions and grants, and what it finds after a restart."""

import os
import shlex
import shutil
import sqlite3
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from planned_jobs import Clock, job
from stored_jobs import StoredRow, refusing_writes, stored_ids

from collapipe.data.rows import READING_VERSION
from collapipe.database import FILE_NAME, Database
from collapipe.errors import CorruptDataError, InvalidInputError, NotFoundError, WrongStateError
from collapipe.job import JobConfig
from collapipe.scheduler import job_store
from collapipe.scheduler.events import EventLog
from collapipe.scheduler.grant_numbers import GrantNumbers
from collapipe.scheduler.job_documents import JobDocument, RoundDocument, RoundResult
from collapipe.scheduler.job_progress import JobProgress
from collapipe.scheduler.job_store import JobStore
from collapipe.scheduler.retention import Retention
from collapipe.v1 import job_pb2, plan_pb2, scheduler_pb2
from collapipe.v1.plan_pb2 import Plan, Stage
from collapipe.v1.scheduler_pb2 import RoundCommitted


def named(name: str) -> JobConfig:
    return job(more={"name": name})


def attempt_of(attempt: int, host_id: str, *micro_batches: int) -> RoundDocument:
    """An attempt that runs on one host, with the micro-batches of each cluster."""
    stage = Stage(host_id=host_id, start_unit=1, stop_unit=3, in_flight=2)
    plans = [
        Plan(plan_id=host_id, cluster_index=index, stages=[stage], num_micro_batches=number)
        for index, number in enumerate(micro_batches)
    ]
    return RoundDocument(
        attempt=attempt, plans=plans, decision={"decided_by": host_id}, total_steps=7
    )


def finish(store: JobStore, job_id: str) -> None:
    document = store.get(job_id)
    document.state = scheduler_pb2.JOB_STATE_SUCCEEDED
    store.save(document)


def finished(store: JobStore, *configs: JobConfig) -> list[str]:
    """Creates jobs that have succeeded after a round, and returns their ids."""
    job_ids = [store.create(config).job_id for config in configs]
    for job_id in job_ids:
        finish(store, job_id)
        store.save_round(job_id, 0, attempt_of(0, "device-0", 8))
    return job_ids


def ids_of(store: JobStore) -> list[str]:
    return [document.job_id for document in store.all()]


def test_job_survives_a_restart(tmp_path: Path, store: JobStore, document: JobDocument) -> None:
    document.state, document.message = scheduler_pb2.JOB_STATE_CANCELLED, "by request"
    document.num_rounds_committed, document.ended_at = 2, 1e9
    document.labels, document.vocabulary_digest = ["O", "B-person"], "ab" * 32
    document.num_first_rows = [200, 300]
    document.evaluation = job_pb2.Evaluation(
        num_rounds=2, metric="accuracy", value=0.75, num_rows=500
    )
    store.save(document)
    restarted = JobStore(tmp_path).get(document.job_id)
    assert restarted.model_dump() == document.model_dump()
    assert restarted.job == job()
    assert restarted.status().evaluation.value == 0.75


def ended_store(tmp_path: Path) -> tuple[JobStore, str]:
    """A store with a job that had succeeded, and one that ran when the scheduler ended. Returns the id of the latter, too."""
    store = JobStore(tmp_path)
    finished(store, named("finished"))
    document = store.create(job())
    document.state, document.num_rounds_committed = scheduler_pb2.JOB_STATE_RUNNING, 1
    store.save(document)
    return JobStore(tmp_path), document.job_id


def test_job_that_ran_when_the_scheduler_ended_goes_on_as_a_new_attempt(tmp_path: Path) -> None:
    (document,) = ended_store(tmp_path)[0].take_over(abandon=False)
    assert document.state == scheduler_pb2.JOB_STATE_QUEUED
    assert (document.attempt, document.num_rounds_committed) == (1, 1)
    assert JobStore(tmp_path).get(document.job_id) == document


def test_jobs_that_had_begun_go_on_before_queued_ones(tmp_path: Path, store: JobStore) -> None:
    queued, running = store.create(job()), store.create(job())
    running.state = scheduler_pb2.JOB_STATE_PREPARING
    store.save(running)
    taken = JobStore(tmp_path).take_over(abandon=False)
    assert [document.job_id for document in taken] == [running.job_id, queued.job_id]


def test_abandoned_job_is_failed_and_can_be_resumed(tmp_path: Path) -> None:
    store, job_id = ended_store(tmp_path)
    assert store.take_over(abandon=True) == []
    assert store.get(job_id).state == scheduler_pb2.JOB_STATE_FAILED
    assert "resume it" in store.get(job_id).message
    found = store.find_resumable(job(), "", lambda job: True)
    assert (found.job_id, found.state) == (job_id, scheduler_pb2.JOB_STATE_FAILED)
    resumed = store.reopen(job())
    assert (resumed.job_id, resumed.num_rounds_committed) == (job_id, 1)
    assert (resumed.state, resumed.message) == (scheduler_pb2.JOB_STATE_QUEUED, "")


def test_end_that_a_full_disk_did_not_take_is_stored_later(
    tmp_path: Path, store: JobStore, document: JobDocument
) -> None:
    """Otherwise a cancelled job would go on after a restart, and a private one would reveal more."""
    progress = JobProgress(document, store, EventLog())
    with refusing_writes(store):
        progress.end(scheduler_pb2.JOB_STATE_CANCELLED, "by request")
        store.save_ends()
        assert store.has_unsaved_ends
    assert not JobStore(tmp_path).get(document.job_id).has_ended
    store.save_ends()
    assert not store.has_unsaved_ends
    assert JobStore(tmp_path).get(document.job_id).state == scheduler_pb2.JOB_STATE_CANCELLED


def test_account_of_privacy_is_on_the_disk_before_a_round_begins(
    tmp_path: Path, store: JobStore
) -> None:
    settings = {"noise_multiplier": 1.0, "clip_norm": 1.0}
    progress = JobProgress(store.create(job(more={"privacy": settings})), store, EventLog())
    progress.begin_private_round()
    with refusing_writes(store), pytest.raises(OSError, match=FILE_NAME):
        progress.begin_private_round()
    assert JobStore(tmp_path).get(progress.job_id).privacy.of_averages == 1.0
    progress.begin_private_round()
    assert JobStore(tmp_path).get(progress.job_id).privacy.of_averages == 3.0


def test_jobs_go_in_the_order_in_which_they_ended_whatever_the_clock_says(
    tmp_path: Path, store: JobStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    documents = [store.create(job()) for _ in range(3)]
    for document, now in zip(documents, (5000.0, 2000.0, 9000.0), strict=True):
        monkeypatch.setattr(time, "time", lambda now=now: now)
        JobProgress(document, store, EventLog()).end(scheduler_pb2.JOB_STATE_SUCCEEDED, "")
    kept = Retention(1, 0)
    first, second, _ = (document.job_id for document in documents)
    for each in (store, JobStore(tmp_path)):
        assert [job_id for job_id, _ in kept.expired(each.all()[:2], 0.0)] == [first]
        assert [job_id for job_id, _ in kept.expired(each.all(), 0.0)] == [second, first]


def test_new_attempt_replaces_the_one_before_and_survives_a_restart(
    tmp_path: Path, store: JobStore, document: JobDocument
) -> None:
    job_id, newer = document.job_id, attempt_of(1, "device-1", 8, 2)
    newer.decision["share"] = float("inf")
    store.save_round(job_id, 0, attempt_of(0, "device-0", 8))
    store.save_round(job_id, 1, attempt_of(0, "device-0", 4))
    result = RoundResult(committed=RoundCommitted(num_rounds=1), attempt=0)
    store.save_result(job_id, 0, result)
    store.save_round(job_id, 0, newer)
    assert store.find_result(job_id, 0) == result == store.find_result(job_id, 0, attempt=0)
    assert store.find_result(job_id, 0, attempt=1) is None, "it is of the attempt before"
    for each in (store, JobStore(tmp_path)):
        assert each.round(job_id, 0) == each.find_round(job_id, 0) == newer
        assert each.round(job_id, 1) == attempt_of(0, "device-0", 4)


def test_round_that_was_never_planned_is_not_found(store: JobStore, document: JobDocument) -> None:
    assert store.find_round(document.job_id, 7) is None
    with pytest.raises(NotFoundError, match=f"round 8 .*{document.job_id}"):
        store.round(document.job_id, 7)
    with pytest.raises(NotFoundError, match="'other'"):
        store.round("other", 0)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"plans": None}, "damaged"),
        ({"plans": [{"stages": 3}]}, "damaged"),
        ({"attempt": "x"}, "damaged"),
        ({"version": 3}, "version 3.* version 4"),
        ({"version": 5}, "version 5.* version 4"),
        ({"version": None}, "version 1.* version 4"),
    ],
)
def test_row_of_a_round_that_cannot_be_read_is_refused_with_its_place(
    tmp_path: Path, store: JobStore, document: JobDocument, change: dict[str, object], reason: str
) -> None:
    store.save_round(document.job_id, 0, attempt_of(0, "device-0", 8))
    row = StoredRow(tmp_path, "round", document.job_id, 0)
    stored = row.read() | change
    if stored["version"] is None:
        del stored["version"]
    row.write(stored)
    for read in (store.round, store.find_round):
        with pytest.raises(CorruptDataError, match=rf"round 1 .*{document.job_id} .*{reason}"):
            read(document.job_id, 0)


def test_reopening_finds_the_last_job_of_the_name(tmp_path: Path, store: JobStore) -> None:
    job_ids = finished(store, *map(named, ("mine", "mine", "ant", "zebra", "mole")))
    assert ids_of(JobStore(tmp_path)) == job_ids, "the oldest comes first"
    assert store.reopen(named("mine")).job_id == job_ids[1]
    with pytest.raises(InvalidInputError, match=job_ids[1]):
        store.reopen(named("mine"))
    with pytest.raises(NotFoundError, match="'nobody'"):
        store.reopen(named("nobody"))


def begun(store: JobStore, state: int, reading_version: int) -> str:
    """A job with a committed round, whose data a version of CollaPipe has read."""
    document = store.create(job())
    document.state, document.num_rounds_committed = state, 1
    document.vocabulary_digest, document.reading_version = "ab" * 32, reading_version
    store.save(document)
    return document.job_id


@pytest.mark.parametrize("version", [0, READING_VERSION + 1])
def test_job_whose_data_another_version_has_read_is_not_resumed(
    tmp_path: Path, store: JobStore, version: int
) -> None:
    job_id = begun(store, scheduler_pb2.JOB_STATE_SUCCEEDED, version)
    with pytest.raises(InvalidInputError, match=f"{job_id}.*start a new job"):
        store.reopen(job())
    running = begun(store, scheduler_pb2.JOB_STATE_RUNNING, version)
    restarted = JobStore(tmp_path)
    assert restarted.take_over(abandon=False) == []
    assert restarted.get(running).state == scheduler_pb2.JOB_STATE_FAILED
    assert running in restarted.get(running).message


def test_job_whose_data_this_version_has_read_is_resumed(tmp_path: Path, store: JobStore) -> None:
    job_id = begun(store, scheduler_pb2.JOB_STATE_SUCCEEDED, READING_VERSION)
    assert store.reopen(job()).job_id == job_id
    assert [each.job_id for each in JobStore(tmp_path).take_over(abandon=False)] == [job_id]


def test_job_document_of_an_older_version_counts_as_read_by_it(
    tmp_path: Path, store: JobStore
) -> None:
    job_id = begun(store, scheduler_pb2.JOB_STATE_SUCCEEDED, READING_VERSION)
    row = StoredRow(tmp_path, "job", job_id)
    document = row.read()
    del document["reading_version"]
    row.write(document)
    assert JobStore(tmp_path).get(job_id).is_of_other_reading


def test_reopening_takes_more_rounds_and_another_schedule(tmp_path: Path, store: JobStore) -> None:
    data = {"train": "a.csv", "held_out": "b.csv"}
    finished(store, job(more={"data": data}))
    other = {"data": {**data, "max_held_out_rows": 9, "strict": True}}
    longer = job({"rounds": 9}, other, num_micro_batches=8)
    store.reopen(longer)
    (document,) = JobStore(tmp_path).all()
    assert document.job == longer


@pytest.mark.parametrize(
    ("setting", "before", "after"),
    [
        ("training.learning_rate", job({"learning_rate": 1e-3}), job({"learning_rate": 5e-4})),
        (
            "schedule.num_micro_batches",
            job({"update_per": "micro_batch"}),
            job({"update_per": "micro_batch"}, num_micro_batches=8),
        ),
        (  # Those above the limit train.
            "data.max_held_out_rows",
            job(more={"data": {"train": "a.csv"}}),
            job(more={"data": {"train": "a.csv", "max_held_out_rows": 9}}),
        ),
    ],
)
def test_reopening_with_a_value_that_changes_the_training_is_refused_by_name(
    store: JobStore, setting: str, before: JobConfig, after: JobConfig
) -> None:
    finished(store, before)
    with pytest.raises(InvalidInputError, match=rf" {setting}:"):
        store.reopen(after)


@pytest.mark.parametrize("damage", ['{"a": 1}', "{", "config"])
def test_job_that_cannot_be_read_is_left_out_and_the_others_are_not(
    tmp_path: Path, store: JobStore, caplog: pytest.LogCaptureFixture, damage: str
) -> None:
    bad, good = (store.create(named(name)).job_id for name in ("bad", "good"))
    row = StoredRow(tmp_path, "job", bad)
    if damage == "config":  # a setting that this version does not know
        damage = row.read_text().replace("clusters", "klusters")
    row.write_text(damage)
    restarted = JobStore(tmp_path)
    assert ids_of(restarted) == [good]
    assert bad in caplog.text
    assert restarted.num_unreadable == 1
    listed = restarted.statuses()
    assert [(each.job_id, each.state) for each in listed] == [
        (bad, scheduler_pb2.JOB_STATE_UNREADABLE),
        (good, scheduler_pb2.JOB_STATE_QUEUED),
    ]
    with pytest.raises(CorruptDataError, match=bad):
        restarted.get(bad)
    with pytest.raises(CorruptDataError):
        restarted.delete(bad, "a person asked")


def test_job_that_could_not_be_stored_is_not_queued(tmp_path: Path, store: JobStore) -> None:
    [job_id] = finished(store, job())
    with refusing_writes(store), pytest.raises(OSError):
        store.reopen(job())
    assert store.reopen(job()).job_id == job_id


def test_use_of_a_model_is_newer_than_earlier_runs_and_older_than_a_queued_or_later_one(
    tmp_path: Path, store: JobStore
) -> None:
    [job_id] = finished(store, job())
    assert store.begin_use(job_id) == 1
    restarted = JobStore(tmp_path)
    queued = restarted.reopen(job())
    assert queued.attempt == 2
    assert restarted.begin_use(job_id) == 3
    assert queued.attempt == 4
    finish(restarted, job_id)
    assert JobStore(tmp_path).reopen(job()).attempt == 5


@pytest.mark.parametrize("anew_since", [0, 3])
def test_job_follows_the_edge_server_to_an_earlier_commit(
    tmp_path: Path, store: JobStore, document: JobDocument, anew_since: int
) -> None:
    document.num_rounds_committed = document.num_rounds_reached = 3
    document.last_commit = 0, 3
    document.evaluation = job_pb2.Evaluation(num_rounds=2)
    finish(store, document.job_id)
    commit = plan_pb2.Commit(num_rounds=1, attempt=3, anew_since=anew_since)
    store.roll_back(document.job_id, commit)
    back = JobStore(tmp_path).get(document.job_id)
    assert (back.num_rounds_committed, back.last_commit) == (1, (3, 1))
    assert back.num_rounds_reached == (1 if anew_since else 3), "only repeated rounds keep steps"
    assert back.evaluation is None
    assert back.state == scheduler_pb2.JOB_STATE_CANCELLED
    assert "1 committed rounds" in back.message


def test_job_that_was_resumed_while_it_went_back_stays_queued(store: JobStore) -> None:
    [job_id] = finished(store, job())
    resumed = store.reopen(job())
    assert store.roll_back(job_id, plan_pb2.Commit(num_rounds=1, attempt=3)) is resumed
    assert (resumed.state, resumed.num_rounds_committed) == (scheduler_pb2.JOB_STATE_QUEUED, 1)


def test_times_of_a_job_reach_clients_and_a_document_without_them_can_be_read(
    tmp_path: Path, store: JobStore, document: JobDocument
) -> None:
    assert document.status().submitted_at.seconds > 1.7e9
    assert not document.status().HasField("ended_at")
    finish(store, document.job_id)
    row = StoredRow(tmp_path, "job", document.job_id)
    stored = row.read()
    del stored["submitted_at"], stored["ended_at"]
    row.write(stored)
    status = JobStore(tmp_path).get(document.job_id).status()
    assert not status.HasField("submitted_at") and not status.HasField("ended_at")


def test_deleted_job_is_gone_and_its_id_is_remembered_after_a_restart(
    tmp_path: Path, store: JobStore, caplog: pytest.LogCaptureFixture
) -> None:
    doomed, kept = finished(store, named("doomed"), named("kept"))
    late = store.get(doomed)
    caplog.set_level("INFO")
    store.delete(doomed, "a test asked for it")
    assert doomed in caplog.text and "a test asked for it" in caplog.text
    store.save(late)  # A late change does not bring it back.
    for each in (store, JobStore(tmp_path)):
        assert ids_of(each) == [kept]
        assert each.deletions_after(0) == ([doomed], 1)
        with pytest.raises(NotFoundError, match=doomed):
            each.delete(doomed, "again")
    assert stored_ids(tmp_path, "job") == stored_ids(tmp_path, "round") == [kept]


@pytest.mark.parametrize("state", [scheduler_pb2.JOB_STATE_QUEUED, scheduler_pb2.JOB_STATE_RUNNING])
def test_job_that_has_not_ended_is_not_deleted(
    tmp_path: Path, store: JobStore, document: JobDocument, state: scheduler_pb2.JobState
) -> None:
    document.state = state
    with pytest.raises(WrongStateError, match=f"cancel {document.job_id}"):
        store.delete(document.job_id, "a test")
    assert JobStore(tmp_path).get(document.job_id)
    assert store.deletions_after(0) == ([], 0)


def test_deletion_of_which_the_disk_takes_nothing_did_not_happen(
    tmp_path: Path, store: JobStore
) -> None:
    [job_id] = finished(store, job())
    with refusing_writes(store), pytest.raises(OSError):
        store.delete(job_id, "a test")
    for each in (store, JobStore(tmp_path)):
        assert ids_of(each) == [job_id] and each.deletions_after(0) == ([], 0)
        assert each.find_round(job_id, 0) is not None


def test_deleted_job_takes_no_more_room(tmp_path: Path, store: JobStore) -> None:
    [job_id] = finished(store, job())
    large = attempt_of(0, "device-0", 8)
    large.decision["text"] = "x" * 1_000_000
    store.save_round(job_id, 0, large)
    store.delete(job_id, "a test")
    store.give_room_back()
    store.close()
    assert (tmp_path / FILE_NAME).stat().st_size < 200_000


def test_hosts_get_only_new_ids_and_at_most_the_last_thousand(
    tmp_path: Path, store: JobStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(job_store, "_REMEMBERED", 3)
    job_ids = finished(store, *map(named, "abcde"))
    for number, job_id in enumerate(job_ids, start=1):
        store.delete(job_id, "a test")
        assert store.deletions_after(number - 1) == ([job_id], number)
        assert store.deletions_after(number) == ([], number)
    for each in (store, JobStore(tmp_path)):
        assert each.deletions_after(0) == (job_ids[2:], 5)
        assert each.deletions_after(1) == (job_ids[2:], 5)
        assert each.deletions_after(3) == (job_ids[3:], 5)


@pytest.fixture
def database(store: JobStore) -> Database:
    """That of a scheduler, with the number of its grants."""
    return store._database


def test_numbers_grow_although_the_clock_stands_or_goes_back(
    database: Database, clock: Clock
) -> None:
    numbers = GrantNumbers(database, clock)
    taken = [numbers.next(), numbers.next()]
    clock.now = 900.0
    taken.append(numbers.next())
    assert taken == [1_000_000_000, 1_000_000_001, 1_000_000_002]


@pytest.mark.parametrize("seconds", [5.0, 1000.5, 2000.0])
def test_numbers_grow_over_a_restart(database: Database, clock: Clock, seconds: float) -> None:
    earlier = GrantNumbers(database, clock)
    last = max(earlier.next() for _ in range(3))
    clock.now = 1050.0
    last = max(last, earlier.next())
    clock.now = seconds
    later = GrantNumbers(database, clock)
    least = later.least(0)
    assert last < least <= later.next()


def test_numbers_go_on_without_a_disk(
    store: JobStore, database: Database, caplog: pytest.LogCaptureFixture
) -> None:
    numbers = GrantNumbers(database)
    with refusing_writes(store):
        assert numbers.next() < numbers.next()
    assert "grants" in caplog.text
    last = numbers.next()
    assert GrantNumbers(database, lambda: 0.0).least(0) > last


def test_only_grants_of_the_present_attempt_count_in_its_clusters(database: Database) -> None:
    numbers = GrantNumbers(database)
    unused = numbers.least(0)
    numbers.begin_attempt({0, 1})
    first = numbers.next()
    # One that begins after a heartbeat counts at once.
    assert unused <= numbers.least(0) == numbers.least(1) < first < numbers.least(2)
    numbers.begin_attempt({0, 1})
    assert first < numbers.least(0) < numbers.next()
    last = numbers.next()
    numbers.end_attempt({0, 1})
    assert numbers.least(0) > last


def test_edge_server_takes_grants_of_all_present_attempts(database: Database) -> None:
    numbers = GrantNumbers(database)
    numbers.begin_attempt({0})
    of_older_job = numbers.next()
    numbers.begin_attempt({1})
    assert numbers.least(None) < of_older_job < numbers.least(1)
    numbers.end_attempt({0})
    assert numbers.least(None) == numbers.least(1)
    last = numbers.next()
    numbers.end_attempt({1})
    assert numbers.least(None) > last


@pytest.mark.parametrize("number", ["'many'", "-1", "9e99", "1 << 62"])
def test_impossible_number_is_refused_with_the_remedy(tmp_path: Path, number: str) -> None:
    state = tmp_path / "the state"
    last = JobStore(state).grants.next()
    with closing(sqlite3.connect(state / FILE_NAME)) as database:
        database.execute(f"UPDATE grant_number SET reserved = {number}").connection.commit()
        with pytest.raises(CorruptDataError, match=FILE_NAME) as refused:
            JobStore(state)
        _, path, statement = shlex.split(str(refused.value).split("`")[-2])
        assert path == str(state / FILE_NAME)
        database.executescript(statement)
    day = 86_400_000_000
    assert JobStore(state).grants.next() > last + day / 2


def test_old_grants_do_not_count_without_a_database(tmp_path: Path, clock: Clock) -> None:
    earlier = GrantNumbers(JobStore(tmp_path / "one")._database, clock).next()
    clock.now += 1
    assert earlier < GrantNumbers(JobStore(tmp_path / "other")._database, clock).least(0)


def test_job_that_was_resumed_before_its_end_was_stored_stays_resumed(
    store: JobStore, tmp_path: Path
) -> None:
    config = named("job")
    ended = store.create(config)
    ended.state = scheduler_pb2.JOB_STATE_FAILED
    resumed = store.reopen(config)
    store.save(ended)  # The run that has ended stores its end late.
    assert store.get(ended.job_id) is resumed
    (found,) = JobStore(tmp_path).all()
    assert (found.state, found.attempt) == (scheduler_pb2.JOB_STATE_QUEUED, 1)


def test_deletions_are_told_as_they_were_at_one_moment(tmp_path: Path) -> None:
    class Changing(JobStore):
        """Another job is deleted whenever the deletions have been looked at."""

        def __getattribute__(self, name: str) -> Any:
            value = super().__getattribute__(name)
            if name == "_deletions":
                number, job_ids = value
                self._deletions = number + 1, [*job_ids, f"job-{number}"]
            return value

    store = Changing(tmp_path)
    num_told, told = 0, []
    for _ in range(3):
        job_ids, num_told = store.deletions_after(num_told)
        told += job_ids
    assert told == [f"job-{number}" for number in range(num_told)]


def older_state(directory: Path, store: JobStore) -> None:
    """Writes the jobs of a store as the files of an older version, and closes the store."""
    for document in store.all():
        folder = directory / "jobs" / document.job_id
        for row in store.dump(document.job_id):
            in_folder = (
                f"{row.table}s/{row.round_index:06d}.json" if row.round_index is not None else ""
            )
            name = in_folder or f"{row.table}.json"
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text(row.text)
    (directory / "grants.json").write_text('{"reserved": 4000000000000000}')
    (directory / "deleted.json").write_text('{"num_deletions": 5, "job_ids": ["a", "b"]}')
    (directory / "deleted" / "c" / "rounds").mkdir(parents=True)
    store.close()


def test_state_of_an_older_version_is_taken_over_once(tmp_path: Path) -> None:
    before = JobStore(tmp_path / "before")
    first, second = finished(before, named("first"), named("second"))
    before.save_result(first, 0, RoundResult(committed=RoundCommitted(num_rounds=1)))
    before.save_events(first, [{"number": 1, "at": 1.0, "kind": "STATUS", "text": "began"}])
    dumps = {job_id: list(before.dump(job_id)) for job_id in (first, second)}
    state = tmp_path / "state"
    older_state(state, before)
    os.utime(state / "jobs" / second / "job.json", (1e9, 1e9))
    store = JobStore(state)
    assert ids_of(store) == [first, second]
    assert [*store.dump(first)][1:] == dumps[first][1:]
    assert store.get(second).ended_at == 1e9, "the time of the file stands for the end"
    assert store.deletions_after(0) == (["a", "b", "c"], 6)
    assert store.grants.least(0) > 4_000_000_000_000_000
    assert [path.name for path in state.iterdir() if path.is_dir()] == ["migrated"]
    store.delete(first, "a test")
    assert ids_of(JobStore(state)) == [second], "nothing is taken over twice"


@pytest.mark.parametrize("state", ["RUNNING", "SUCCEEDED"])
def test_only_a_job_of_an_older_version_that_has_ended_gets_a_time_for_it(
    tmp_path: Path, state: str
) -> None:
    before = JobStore(tmp_path / "before")
    document = before.create(job())
    document.state = scheduler_pb2.JobState.Value(f"JOB_STATE_{state}")
    before.save(document)
    older_state(tmp_path, before)
    status = JobStore(tmp_path).get(document.job_id).status()
    assert status.HasField("ended_at") == (state == "SUCCEEDED")


@pytest.mark.parametrize(
    ("owner", "victim", "num_calls"),
    [
        *((Path, "rename", n) for n in range(4)),
        *((Database, "execute", n) for n in range(12, 34, 3)),
    ],
)
def test_move_to_the_database_that_was_cut_short_ends_at_the_next_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, owner: type, victim: str, num_calls: int
) -> None:
    before = JobStore(tmp_path / "before")
    first, second = finished(before, named("first"), named("second"))
    state = tmp_path / "state"
    older_state(state, before)
    left, real = num_calls, getattr(owner, victim)

    def killed(*arguments: Any) -> Any:
        nonlocal left
        if not left:
            raise _KilledError
        left -= 1
        return real(*arguments)

    with monkeypatch.context() as patch, pytest.raises(_KilledError):
        patch.setattr(owner, victim, killed)
        JobStore(state)
    store = JobStore(state)
    store.delete(first, "a test")
    for each in (store, JobStore(state)):
        assert ids_of(each) == [second]
        assert each.find_round(second, 0) is not None
        assert each.deletions_after(0)[0] == ["a", "b", "c", first]
    folders = {path.name for path in state.iterdir() if path.is_dir()}
    assert folders <= {"migrated", "migrated-2"}


class _KilledError(BaseException):
    """Ends a start of the scheduler where SIGKILL could."""


def test_old_files_of_a_job_that_is_known_or_deleted_change_nothing(tmp_path: Path) -> None:
    before = JobStore(tmp_path / "before")
    known, deleted = finished(before, named("known"), named("deleted"))
    older_state(tmp_path / "one", before)
    older_state(tmp_path / "other", JobStore(tmp_path / "before"))
    store = JobStore(tmp_path / "one")
    store.delete(deleted, "a test")
    store.get(known).message = "changed"
    store.save(store.get(known))
    store.close()
    shutil.move(tmp_path / "other" / "jobs", tmp_path / "one" / "jobs")
    store = JobStore(tmp_path / "one")
    assert ids_of(store) == [known] and store.get(known).message == "changed"
    assert (tmp_path / "one" / "migrated-2" / "jobs" / deleted).exists()


@pytest.mark.parametrize("damage", ["{", "[]", '{"state": []}'])
def test_damaged_job_of_an_older_version_stays_unreadable_and_the_others_do_not(
    tmp_path: Path, damage: str
) -> None:
    before = JobStore(tmp_path / "before")
    bad, good = finished(before, named("bad"), named("good"))
    state = tmp_path / "state"
    older_state(state, before)
    (state / "jobs" / bad / "job.json").write_text(damage)
    shutil.rmtree(state / "jobs" / good / "rounds")
    store = JobStore(state)
    assert ids_of(store) == [good] and store.num_unreadable == 1


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("deleted.json", "{}"),
        ("deleted.json", '{"num_deletions": 1, "job_ids": [1]}'),
        ("grants.json", '{"reserved": "many"}'),
    ],
)
def test_state_of_an_older_version_that_is_damaged_stays_as_it_is(
    tmp_path: Path, name: str, content: str
) -> None:
    before = JobStore(tmp_path / "before")
    [job_id] = finished(before, job())
    state = tmp_path / "state"
    older_state(state, before)
    (state / name).write_text(content)
    for _ in range(2):
        with pytest.raises(CorruptDataError, match=name):
            JobStore(state)
    assert (state / "jobs" / job_id / "job.json").exists()
    (state / name).unlink()
    assert ids_of(JobStore(state)) == [job_id]
