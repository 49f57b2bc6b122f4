import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from collapipe.errors import CorruptDataError, InvalidInputError, NotFoundError, WrongStateError
from collapipe.job import DataConfig, JobConfig, ScheduleConfig, TaskConfig, TrainingConfig
from collapipe.scheduler import deleted_jobs
from collapipe.scheduler.job_store import JobStore, RoundDocument, RoundResult
from collapipe.v1 import job_pb2, plan_pb2, scheduler_pb2
from collapipe.v1.plan_pb2 import Plan, Stage
from collapipe.v1.scheduler_pb2 import RoundCommitted


def make_job(
    name: str = "job", rounds: int = 3, learning_rate: float = 1e-3, micro_batches: int = 8
) -> JobConfig:
    return JobConfig(
        name=name,
        task=TaskConfig(kind="classification"),
        data=DataConfig(source="stdlib_docstrings"),
        training=TrainingConfig(rounds=rounds, learning_rate=learning_rate),
        schedule=ScheduleConfig(num_micro_batches=micro_batches),
    )


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


def test_job_survives_a_restart_unchanged(tmp_path: Path) -> None:
    store = JobStore(tmp_path)
    document = store.create(make_job())
    document.state, document.message = scheduler_pb2.JOB_STATE_CANCELLED, "by request"
    document.num_rounds_committed, document.ended_at = 2, 1e9
    document.labels, document.vocabulary_digest = ["O", "B-person"], "ab" * 32
    document.evaluation = job_pb2.Evaluation(
        num_rounds=2, metric="accuracy", value=0.75, num_rows=500
    )
    store.save(document)
    restarted = JobStore(tmp_path).get(document.job_id)
    assert restarted == document
    assert restarted.job == make_job()
    assert restarted.status().evaluation.value == 0.75


def ended_store(tmp_path: Path) -> JobStore:
    """A store with a job that ran when the scheduler ended, and one that had succeeded."""
    store = JobStore(tmp_path)
    finish(store, store.create(make_job("finished")).job_id)
    document = store.create(make_job())
    document.state, document.num_rounds_committed = scheduler_pb2.JOB_STATE_RUNNING, 1
    store.save(document)
    return JobStore(tmp_path)


def test_job_that_ran_when_the_scheduler_ended_goes_on_as_a_new_attempt(tmp_path: Path) -> None:
    store = ended_store(tmp_path)
    (document,) = store.take_over(abandon=False)
    assert document.state == scheduler_pb2.JOB_STATE_QUEUED
    assert (document.attempt, document.num_rounds_committed) == (1, 1)
    assert JobStore(tmp_path).get(document.job_id) == document


def test_jobs_that_had_begun_go_on_before_those_that_were_queued(tmp_path: Path) -> None:
    store = JobStore(tmp_path)
    queued, running = store.create(make_job()), store.create(make_job())
    running.state = scheduler_pb2.JOB_STATE_PREPARING
    store.save(running)
    taken = JobStore(tmp_path).take_over(abandon=False)
    assert [document.job_id for document in taken] == [running.job_id, queued.job_id]


def test_abandoned_job_is_failed_and_can_be_resumed(tmp_path: Path) -> None:
    store = ended_store(tmp_path)
    (document,) = (each for each in store.all() if each.job.name == "job")
    assert store.take_over(abandon=True) == []
    assert store.get(document.job_id).state == scheduler_pb2.JOB_STATE_FAILED
    assert "resume it" in store.get(document.job_id).message
    found = store.find_resumable(make_job(), "", lambda job: True)
    assert (found.job_id, found.state) == (document.job_id, scheduler_pb2.JOB_STATE_FAILED)
    resumed = store.reopen(make_job())
    assert (resumed.job_id, resumed.num_rounds_committed) == (document.job_id, 1)
    assert (resumed.state, resumed.message) == (scheduler_pb2.JOB_STATE_QUEUED, "")


def test_attempt_at_a_round_survives_a_restart(tmp_path: Path) -> None:
    store = JobStore(tmp_path)
    job_id = store.create(make_job()).job_id
    recorded = attempt_of(0, "device-0", 8, 2)
    recorded.decision["share"] = float("inf")
    store.save_round(job_id, 0, recorded)
    restarted = JobStore(tmp_path)
    assert restarted.round(job_id, 0) == recorded
    assert restarted.find_round(job_id, 0) == recorded


def test_new_attempt_replaces_the_one_before_and_leaves_other_rounds(tmp_path: Path) -> None:
    store = JobStore(tmp_path)
    job_id = store.create(make_job()).job_id
    store.save_round(job_id, 0, attempt_of(0, "device-0", 8))
    store.save_round(job_id, 1, attempt_of(0, "device-0", 4))
    store.save_result(job_id, 0, RoundResult(committed=RoundCommitted(num_rounds=1)))
    store.save_round(job_id, 0, attempt_of(1, "device-1", 8))
    assert store.find_result(job_id, 0) is None, "it is of the attempt before"
    assert store.round(job_id, 0) == attempt_of(1, "device-1", 8)
    assert store.round(job_id, 1) == attempt_of(0, "device-0", 4)


def test_round_that_was_never_planned_is_not_found(tmp_path: Path) -> None:
    store = JobStore(tmp_path)
    job_id = store.create(make_job()).job_id
    assert store.find_round(job_id, 7) is None
    with pytest.raises(NotFoundError, match=f"round 8 of job {job_id} was not planned yet"):
        store.round(job_id, 7)
    with pytest.raises(NotFoundError, match="no job 'other'"):
        store.round("other", 0)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"plans": None}, "is damaged"),
        ({"plans": [{"stages": 3}]}, "is damaged"),
        ({"attempt": "x"}, "is damaged"),
        ({"version": 3}, "has format version 3, but this scheduler reads version 4"),
        ({"version": 5}, "has format version 5, but this scheduler reads version 4"),
    ],
)
def test_round_document_that_cannot_be_read_is_refused_with_its_path(
    tmp_path: Path, change: dict[str, object], reason: str
) -> None:
    store = JobStore(tmp_path)
    job_id = store.create(make_job()).job_id
    store.save_round(job_id, 0, attempt_of(0, "device-0", 8))
    (path,) = tmp_path.rglob("000000.json")
    document = json.loads(path.read_text(encoding="utf-8"))
    path.write_text(json.dumps(document | change), encoding="utf-8")
    for read in (store.round, store.find_round):
        with pytest.raises(CorruptDataError, match=rf"000000\.json {reason}"):
            read(job_id, 0)


def test_round_document_without_a_version_is_refused_as_version_1(tmp_path: Path) -> None:
    store = JobStore(tmp_path)
    job_id = store.create(make_job()).job_id
    store.save_round(job_id, 0, attempt_of(0, "device-0", 8))
    (path,) = tmp_path.rglob("000000.json")
    document = json.loads(path.read_text(encoding="utf-8"))
    del document["version"]
    path.write_text(json.dumps(document), encoding="utf-8")
    with pytest.raises(
        CorruptDataError, match="format version 1, but this scheduler reads version 4"
    ):
        store.find_round(job_id, 0)


def test_jobs_are_listed_oldest_first_after_a_restart(tmp_path: Path) -> None:
    store = JobStore(tmp_path)
    job_ids = [store.create(make_job(name)).job_id for name in ("zebra", "ant", "mole")]
    assert [document.job_id for document in JobStore(tmp_path).all()] == job_ids


def test_reopening_finds_the_last_job_of_the_name(tmp_path: Path) -> None:
    store = JobStore(tmp_path)
    job_ids = [store.create(make_job(name)).job_id for name in ("mine", "mine", "other")]
    for job_id in job_ids:
        finish(store, job_id)
    assert store.reopen(make_job("mine")).job_id == job_ids[1]
    with pytest.raises(NotFoundError, match="no job named 'nobody'"):
        store.reopen(make_job("nobody"))


def test_reopening_a_job_that_still_runs_is_refused(tmp_path: Path) -> None:
    store = JobStore(tmp_path)
    job_id = store.create(make_job()).job_id
    with pytest.raises(InvalidInputError, match=f"{job_id} is still running"):
        store.reopen(make_job())


def test_reopening_with_another_learning_rate_is_refused_by_name(tmp_path: Path) -> None:
    store = JobStore(tmp_path)
    finish(store, store.create(make_job()).job_id)
    with pytest.raises(InvalidInputError, match=r"other values of training\.learning_rate:"):
        store.reopen(make_job(learning_rate=5e-4))


def test_reopening_with_more_rounds_and_another_schedule_takes_the_new_values(
    tmp_path: Path,
) -> None:
    store = JobStore(tmp_path)
    finish(store, store.create(make_job()).job_id)
    store.reopen(make_job(rounds=9, micro_batches=4))
    (document,) = JobStore(tmp_path).all()
    assert document.job == make_job(rounds=9, micro_batches=4)


def test_micro_batches_are_fixed_when_each_of_them_updates_the_model(tmp_path: Path) -> None:
    def per_micro_batch(micro_batches: int) -> JobConfig:
        training = TrainingConfig(update_per="micro_batch")
        return make_job(micro_batches=micro_batches).model_copy(update={"training": training})

    store = JobStore(tmp_path)
    finish(store, store.create(per_micro_batch(8)).job_id)
    with pytest.raises(InvalidInputError, match=r"other values of schedule\.num_micro_batches:"):
        store.reopen(per_micro_batch(4))


@pytest.mark.parametrize("damage", ['{"a": 1}', "{", "config"])
def test_job_that_cannot_be_read_is_left_out_and_the_others_are_not(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, damage: str
) -> None:
    store = JobStore(tmp_path)
    bad, good = (store.create(make_job(name)).job_id for name in ("bad", "good"))
    path = tmp_path / "jobs" / bad / "job.json"
    if damage == "config":  # a setting that this version does not know
        damage = path.read_text("utf-8").replace("clusters", "klusters")
    path.write_text(damage, "utf-8")
    assert [document.job_id for document in JobStore(tmp_path).all()] == [good]
    assert str(path) in caplog.text


def test_job_that_could_not_be_stored_is_not_queued(tmp_path: Path) -> None:
    store = JobStore(tmp_path)
    job_id = store.create(make_job()).job_id
    finish(store, job_id)
    path = tmp_path / "jobs" / job_id / "job.json"
    (path.parent / "job.json.tmp").mkdir()  # Nothing can be written, as on a full disk.
    with pytest.raises(OSError):
        store.reopen(make_job())
    (path.parent / "job.json.tmp").rmdir()
    assert store.reopen(make_job()).job_id == job_id


def test_use_of_a_model_is_newer_than_earlier_runs_and_older_than_a_queued_or_later_one(
    tmp_path: Path,
) -> None:
    store = JobStore(tmp_path)
    document = store.create(make_job())
    finish(store, document.job_id)
    assert store.begin_use(document.job_id) == 1
    restarted = JobStore(tmp_path)
    queued = restarted.reopen(make_job())
    assert queued.attempt == 2
    assert restarted.begin_use(document.job_id) == 3
    assert queued.attempt == 4
    finish(restarted, document.job_id)
    assert JobStore(tmp_path).reopen(make_job()).attempt == 5


@pytest.mark.parametrize("anew_since", [0, 3])
def test_job_follows_the_edge_server_to_an_earlier_commit(tmp_path: Path, anew_since: int) -> None:
    store = JobStore(tmp_path)
    document = store.create(make_job())
    document.num_rounds_committed = document.num_rounds_reached = 3
    document.last_commit = 0, 3
    document.evaluation = job_pb2.Evaluation(num_rounds=2)
    finish(store, document.job_id)
    store.roll_back(
        document.job_id, plan_pb2.Commit(num_rounds=1, attempt=3, anew_since=anew_since)
    )
    back = JobStore(tmp_path).get(document.job_id)
    assert (back.num_rounds_committed, back.last_commit) == (1, (3, 1))
    assert back.num_rounds_reached == (1 if anew_since else 3), "only repeated rounds keep steps"
    assert back.evaluation is None
    assert (back.state, back.message) == (
        scheduler_pb2.JOB_STATE_CANCELLED,
        "went back to 1 committed rounds: resume it",
    )


def test_job_that_was_resumed_while_it_went_back_stays_queued(tmp_path: Path) -> None:
    store = JobStore(tmp_path)
    job_id = store.create(make_job()).job_id
    finish(store, job_id)
    resumed = store.reopen(make_job())
    assert store.roll_back(job_id, plan_pb2.Commit(num_rounds=1, attempt=3)) is resumed
    assert (resumed.state, resumed.num_rounds_committed) == (scheduler_pb2.JOB_STATE_QUEUED, 1)


def test_times_of_a_job_reach_clients_and_a_document_without_them_can_be_read(
    tmp_path: Path,
) -> None:
    store = JobStore(tmp_path)
    document = store.create(make_job())
    assert document.status().submitted_at.seconds > 1.7e9
    assert not document.status().HasField("ended_at")
    finish(store, document.job_id)
    path = tmp_path / "jobs" / document.job_id / "job.json"
    stored = json.loads(path.read_text("utf-8"))
    del stored["submitted_at"], stored["ended_at"]
    path.write_text(json.dumps(stored), "utf-8")
    os.utime(path, (1e9, 1e9))
    status = JobStore(tmp_path).get(document.job_id).status()
    assert not status.HasField("submitted_at")
    assert status.ended_at.seconds == 1e9, "the time of the file stands for the end of the job"


def make_finished(store: JobStore, *names: str) -> list[str]:
    job_ids = [store.create(make_job(name)).job_id for name in names]
    for job_id in job_ids:
        finish(store, job_id)
        store.save_round(job_id, 0, attempt_of(0, "device-0", 8))
    return job_ids


def test_deleted_job_is_gone_and_its_id_is_remembered_after_a_restart(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store = JobStore(tmp_path)
    doomed, kept = make_finished(store, "doomed", "kept")
    caplog.set_level("INFO")
    store.delete(doomed, "a test asked for it")
    assert f"job {doomed} was deleted: a test asked for it" in caplog.text
    for each in (store, JobStore(tmp_path)):
        assert [document.job_id for document in each.all()] == [kept]
        assert each.deleted.after(0) == ([doomed], 1)
        with pytest.raises(NotFoundError, match=f"no job '{doomed}'"):
            each.delete(doomed, "again")
    assert [path.name for path in (tmp_path / "jobs").iterdir()] == [kept]
    assert list((tmp_path / "deleted").iterdir()) == []


@pytest.mark.parametrize("state", [scheduler_pb2.JOB_STATE_QUEUED, scheduler_pb2.JOB_STATE_RUNNING])
def test_job_that_has_not_ended_is_not_deleted(
    tmp_path: Path, state: scheduler_pb2.JobState
) -> None:
    store = JobStore(tmp_path)
    document = store.create(make_job())
    document.state = state
    with pytest.raises(WrongStateError, match=f"collapipe jobs cancel {document.job_id}"):
        store.delete(document.job_id, "a test")
    assert JobStore(tmp_path).get(document.job_id)
    assert store.deleted.after(0) == ([], 0)


def test_late_change_of_a_deleted_job_does_not_bring_it_back(tmp_path: Path) -> None:
    store = JobStore(tmp_path)
    (job_id,) = make_finished(store, "doomed")
    document = store.get(job_id)
    store.delete(job_id, "a test")
    store.save(document)
    assert JobStore(tmp_path).all() == []


class _KilledError(BaseException):
    """Ends a deletion where SIGKILL could."""


@pytest.mark.parametrize(
    ("victim", "num_calls"),
    [
        ("sync_directory", 0),
        ("sync_directory", 1),
        ("rmtree", 0),
        ("write_document", 0),
        ("rmtree", 1),
    ],
)
def test_deletion_that_was_cut_short_ends_at_the_next_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, victim: str, num_calls: int
) -> None:
    store = JobStore(tmp_path)
    doomed, kept = make_finished(store, "doomed", "kept")
    left = num_calls
    owner: Any = shutil if victim == "rmtree" else deleted_jobs
    real = getattr(owner, victim)

    def killed(*arguments: Any, **options: Any) -> None:
        nonlocal left
        if not left:
            raise _KilledError
        left -= 1
        real(*arguments, **options)

    with monkeypatch.context() as patch:
        patch.setattr(owner, victim, killed)
        with pytest.raises(_KilledError):
            store.delete(doomed, "a test")
    restarted = JobStore(tmp_path)
    assert [document.job_id for document in restarted.all()] == [kept]
    assert restarted.deleted.after(0) == ([doomed], 1)
    assert list((tmp_path / "deleted").iterdir()) == []


def test_deletion_on_a_full_disk_makes_room_and_hosts_learn_of_it_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    store = JobStore(tmp_path)
    (job_id,) = make_finished(store, "doomed")

    def full(path: Path, document: object) -> None:
        raise OSError(28, "No space left on device", str(path))

    with monkeypatch.context() as patch:
        patch.setattr(deleted_jobs, "write_document", full)
        store.delete(job_id, "a test")
    assert store.all() == []
    assert not list(tmp_path.rglob("000000.json")), "the rounds still take room"
    assert f"removes the rest of job {job_id}" in caplog.text
    assert JobStore(tmp_path).deleted.after(0) == ([job_id], 1)


def test_hosts_get_only_new_ids_and_at_most_the_last_thousand(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(deleted_jobs, "_REMEMBERED", 3)
    store = JobStore(tmp_path)
    job_ids = make_finished(store, *"abcde")
    for number, job_id in enumerate(job_ids, start=1):
        store.delete(job_id, "a test")
        assert store.deleted.after(number - 1) == ([job_id], number)
        assert store.deleted.after(number) == ([], number)
    for each in (store, JobStore(tmp_path)):
        assert each.deleted.after(0) == (job_ids[2:], 5)
        assert each.deleted.after(1) == (job_ids[2:], 5)
        assert each.deleted.after(3) == (job_ids[3:], 5)
