"""How the runner records attempts at a round; whole jobs run in tests/integration."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from collapipe.errors import AttemptFailedError, InfeasibleError
from collapipe.rpc import ChannelPool, Security
from collapipe.scheduler.events import EventLog
from collapipe.scheduler.host_registry import HostRegistry
from collapipe.scheduler.job_runner import JobRunner
from collapipe.scheduler.job_store import JobDocument, JobStore
from collapipe.scheduler.telemetry_window import Telemetry
from collapipe.v1.plan_pb2 import Commit, Plan

from .jobs import Source, job


class Decision:
    def to_json(self) -> dict[str, Any]:
        return {}


class ScriptedPlanner:
    """Plans with its own numbers of micro-batches, unless it must keep those of an earlier attempt."""

    def __init__(self, host_id: str, *micro_batches: int, feasible: bool = True) -> None:
        self._host_id, self._micro_batches, self._feasible = host_id, micro_batches, feasible

    def decide(
        self, round_index: int, earlier: Sequence[Plan], *, evaluation_only: bool
    ) -> tuple[list[Plan], Decision]:
        if not self._feasible:
            raise InfeasibleError("no plan")
        numbers = [plan.num_micro_batches for plan in earlier] or self._micro_batches
        plans = [
            Plan(plan_id=self._host_id, cluster_index=index, num_micro_batches=number)
            for index, number in enumerate(numbers)
        ]
        return plans, Decision()

    def round_started(self, decision: Decision) -> None:
        pass


def run_round(
    store: JobStore, document: JobDocument, planner: ScriptedPlanner, round_index: int = 0
) -> None:
    """Runs a round that fails in its clusters."""
    channels = ChannelPool(Security.insecure())
    telemetry = Telemetry(Source(), 1.0)
    runner = JobRunner(document, HostRegistry(), store, channels, EventLog(), telemetry)

    def fail(*_: Any) -> None:
        raise AttemptFailedError("a cluster failed")

    runner._planner, runner._commit = planner, Commit(num_rounds=round_index)  # type: ignore[assignment]
    runner._run_cluster = fail  # type: ignore[method-assign,assignment]
    runner._run_round(local_steps=1)


def test_retry_counts_the_attempt_and_keeps_the_micro_batches_of_each_cluster(
    tmp_path: Path,
) -> None:
    store = JobStore(tmp_path)
    document = store.create(job())
    with pytest.raises(AttemptFailedError):
        run_round(store, document, ScriptedPlanner("device-0", 8, 2))
    assert store.round(document.job_id, 0).attempt == 0
    restarted = JobStore(tmp_path)
    document = restarted.reopen(job())
    with pytest.raises(AttemptFailedError):
        run_round(restarted, document, ScriptedPlanner("device-1", 4, 4))
    retried = restarted.round(document.job_id, 0)
    assert retried.attempt == 1
    assert [plan.num_micro_batches for plan in retried.plans] == [8, 2]
    assert {plan.plan_id for plan in retried.plans} == {"device-1"}  # other hosts may run it


def test_only_a_repeated_round_keeps_its_number_of_steps(tmp_path: Path) -> None:
    store = JobStore(tmp_path)
    document = store.create(job())
    longer = job()
    longer = longer.model_copy(
        update={"training": longer.training.model_copy(update={"rounds": 99})}
    )
    planner = ScriptedPlanner("device-0", 4)
    for round_index in range(2):
        with pytest.raises(AttemptFailedError):
            run_round(store, document, planner, round_index)
    document.num_rounds_reached = 1  # the second round was never committed
    document = document.model_copy(update={"config_json": longer.to_json()})
    for round_index in range(2):
        with pytest.raises(AttemptFailedError):
            run_round(store, document, planner, round_index)
    steps = [store.round(document.job_id, index).total_steps for index in range(2)]
    assert steps == [job().total_steps, longer.total_steps]
    assert steps[0] != steps[1]


def test_each_round_decides_its_own_micro_batches(tmp_path: Path) -> None:
    store = JobStore(tmp_path)
    document = store.create(job())
    for round_index, micro_batches in enumerate((8, 4)):
        with pytest.raises(AttemptFailedError):
            planner = ScriptedPlanner("device-0", micro_batches)
            run_round(store, document, planner, round_index)
    second = store.round(document.job_id, 1)
    assert (second.attempt, second.plans[0].num_micro_batches) == (0, 4)


def test_attempt_that_cannot_be_planned_records_nothing(tmp_path: Path) -> None:
    store = JobStore(tmp_path)
    document = store.create(job())
    with pytest.raises(InfeasibleError):
        run_round(store, document, ScriptedPlanner("device-0", feasible=False))
    assert store.find_round(document.job_id, 0) is None
