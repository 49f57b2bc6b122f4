import json
from pathlib import Path

import pytest

from collapipe.errors import CorruptDataError, InvalidInputError, NotFoundError
from collapipe.job import DataConfig, JobConfig, ScheduleConfig, TaskConfig, TrainingConfig
from collapipe.scheduler.job_store import JobStore, RoundDocument
from collapipe.v1 import job_pb2, plan_pb2, scheduler_pb2
from collapipe.v1.plan_pb2 import Plan, Stage


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
    document.num_rounds_committed = 2
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


def test_abandoned_job_is_failed_and_can_be_resumed(tmp_path: Path) -> None:
    store = ended_store(tmp_path)
    (document,) = (each for each in store.all() if each.job.name == "job")
    assert store.take_over(abandon=True) == []
    assert store.get(document.job_id).state == scheduler_pb2.JOB_STATE_FAILED
    assert "resume it" in store.get(document.job_id).message
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
    store.save_round(job_id, 0, attempt_of(1, "device-1", 8))
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
