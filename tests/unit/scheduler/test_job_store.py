from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from collapipe.errors import InvalidInputError, NotFoundError
from collapipe.job import DataConfig, JobConfig, ScheduleConfig, TaskConfig, TrainingConfig
from collapipe.scheduler.job_store import JobStore
from collapipe.v1 import job_pb2, scheduler_pb2
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


MakePlans = Callable[[list[int] | None], tuple[Sequence[Plan], dict[str, Any]]]


def planner(host_id: str, *defaults: int) -> MakePlans:
    """Plans as the scheduler does: each cluster's recorded number of micro-batches, else its own."""

    def plan(replayed: list[int] | None) -> tuple[Sequence[Plan], dict[str, Any]]:
        stage = Stage(host_id=host_id, start_unit=1, stop_unit=3, in_flight=2)
        plans = [
            Plan(plan_id=host_id, cluster_index=index, stages=[stage], num_micro_batches=number)
            for index, number in enumerate(replayed or defaults)
        ]
        return plans, {"decided_by": host_id}

    return plan


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


def test_job_that_ran_when_the_scheduler_ended_is_failed_and_can_be_resumed(tmp_path: Path) -> None:
    store = JobStore(tmp_path)
    document = store.create(make_job())
    document.state, document.num_rounds_committed = scheduler_pb2.JOB_STATE_RUNNING, 1
    store.save(document)
    store = JobStore(tmp_path)
    assert store.get(document.job_id).state == scheduler_pb2.JOB_STATE_FAILED
    assert "resume it" in store.get(document.job_id).message
    resumed = store.reopen(make_job())
    assert (resumed.job_id, resumed.num_rounds_committed) == (document.job_id, 1)
    assert (resumed.state, resumed.message) == (scheduler_pb2.JOB_STATE_QUEUED, "")


def test_retry_of_a_round_keeps_the_recorded_micro_batches(tmp_path: Path) -> None:
    store = JobStore(tmp_path)
    job_id = store.create(make_job()).job_id
    first = store.begin_attempt(job_id, 0, planner("device-0", 8))
    retried = JobStore(tmp_path).begin_attempt(job_id, 0, planner("device-1", 4))
    assert (first.attempt, retried.attempt) == (0, 1)
    assert [plan.num_micro_batches for plan in retried.plans] == [8]
    assert [plan.plan_id for plan in retried.plans] == ["device-1"]  # who runs it may change


def test_retry_keeps_the_micro_batches_of_each_cluster(tmp_path: Path) -> None:
    store = JobStore(tmp_path)
    job_id = store.create(make_job()).job_id
    store.begin_attempt(job_id, 0, planner("device-0", 8, 2))
    retried = store.begin_attempt(job_id, 0, planner("device-1", 4, 4))
    assert [plan.num_micro_batches for plan in retried.plans] == [8, 2]


def test_decision_and_planner_survive_a_restart(tmp_path: Path) -> None:
    store = JobStore(tmp_path)
    job_id = store.create(make_job()).job_id
    assert store.planner(job_id) is None
    store.begin_attempt(job_id, 0, planner("device-0", 8))
    store.save_planner(job_id, {"knowledge": {"backlogs": {"device-0": 1.5}}})
    restarted = JobStore(tmp_path)
    assert restarted.decision(job_id, 0) == {"decided_by": "device-0"}
    assert restarted.planner(job_id) == {"knowledge": {"backlogs": {"device-0": 1.5}}}


def test_decision_of_a_round_that_was_never_planned_is_not_found(tmp_path: Path) -> None:
    store = JobStore(tmp_path)
    job_id = store.create(make_job()).job_id
    with pytest.raises(NotFoundError, match="round 4 .* not planned"):
        store.decision(job_id, 3)


def test_each_round_decides_its_own_micro_batches(tmp_path: Path) -> None:
    store = JobStore(tmp_path)
    job_id = store.create(make_job()).job_id
    store.begin_attempt(job_id, 0, planner("device-0", 8))
    second = store.begin_attempt(job_id, 1, planner("device-0", 4))
    assert (second.attempt, second.plans[0].num_micro_batches) == (0, 4)


def test_plans_of_a_round_survive_a_restart(tmp_path: Path) -> None:
    store = JobStore(tmp_path)
    job_id = store.create(make_job()).job_id
    recorded = store.begin_attempt(job_id, 0, planner("device-0", 8))
    assert JobStore(tmp_path).plans(job_id, 0) == list(recorded.plans)


def test_attempt_that_cannot_be_planned_records_nothing(tmp_path: Path) -> None:
    store = JobStore(tmp_path)
    job_id = store.create(make_job()).job_id

    def fail(replayed: list[int] | None) -> tuple[Sequence[Plan], dict[str, Any]]:
        raise InvalidInputError("no")

    with pytest.raises(InvalidInputError):
        store.begin_attempt(job_id, 0, fail)
    assert store.begin_attempt(job_id, 0, planner("device-0", 8)).attempt == 0


def test_plans_of_a_round_that_was_never_planned_are_not_found(tmp_path: Path) -> None:
    store = JobStore(tmp_path)
    job_id = store.create(make_job()).job_id
    with pytest.raises(NotFoundError, match=f"round 8 of job {job_id} was not planned yet"):
        store.plans(job_id, 7)
    with pytest.raises(NotFoundError, match="no job 'other'"):
        store.plans("other", 0)


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
