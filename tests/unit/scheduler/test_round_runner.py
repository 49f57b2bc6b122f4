"""How attempts at a round are recorded; whole jobs run in tests/integration."""

import threading
import time
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from collapipe.errors import (
    AttemptFailedError,
    InfeasibleError,
    InvalidInputError,
    WrongStateError,
)
from collapipe.job import JobConfig
from collapipe.rpc import ChannelPool, Security
from collapipe.scheduler.events import EventLog
from collapipe.scheduler.host_calls import HostCalls
from collapipe.scheduler.job_preparation import PreparedJob
from collapipe.scheduler.job_progress import JobProgress
from collapipe.scheduler.job_store import JobDocument, JobStore, RoundDocument
from collapipe.scheduler.late_clusters import LateClusters
from collapipe.scheduler.round_runner import RoundRunner, _check_rows
from collapipe.v1.control_unit_pb2 import RoundPrepared
from collapipe.v1.edge_server_pb2 import CommitRoundResponse
from collapipe.v1.job_pb2 import BlobSource, RoundSummary
from collapipe.v1.plan_pb2 import Attempt, ClusterState, Commit, ModelSpec, Plan

from .jobs import SIZES, hosts, job


class Decision:
    plans = (None, None, None)
    question = SimpleNamespace(problem=SimpleNamespace(clusters=()))

    def to_json(self) -> dict[str, Any]:
        return {}


class ScriptedPlanner:
    """Plans with its own numbers of micro-batches, unless it must keep those of an earlier attempt."""

    hosts = hosts()

    def __init__(
        self,
        host_id: str,
        *micro_batches: int,
        feasible: bool = True,
        refuses_earlier: bool = False,
    ) -> None:
        self._host_id, self._micro_batches, self._feasible = host_id, micro_batches, feasible
        self._refuses_earlier = refuses_earlier

    def decide(
        self, round_index: int, earlier: Sequence[Plan], *, evaluation_only: bool
    ) -> tuple[list[Plan], Decision]:
        if not self._feasible or (earlier and self._refuses_earlier):
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
    store: JobStore,
    document: JobDocument,
    planner: ScriptedPlanner,
    round_index: int = 0,
    anew_since: int = 0,
) -> None:
    """Runs a round that fails in its clusters."""
    channels = ChannelPool(Security.insecure())
    progress = JobProgress(document, store, EventLog())
    commit = Commit(num_rounds=round_index)
    commit.restore_point.num_rounds = round_index
    commit.restore_point.anew_since = anew_since
    prepared = PreparedJob(ModelSpec(), SIZES, BlobSource(), commit, [], [])
    runner = RoundRunner(progress, prepared, planner, channels, HostCalls(5.0))  # type: ignore[arg-type]

    def fail(*_: Any, **__: Any) -> None:
        raise AttemptFailedError("a cluster failed")

    runner._run_cluster = fail  # type: ignore[method-assign,assignment]
    runner.run(local_steps=1)


def test_retry_counts_the_attempt_and_keeps_the_micro_batches_of_each_cluster(
    tmp_path: Path,
) -> None:
    store = JobStore(tmp_path)
    document = store.create(job())
    with pytest.raises(AttemptFailedError):
        run_round(store, document, ScriptedPlanner("device-0", 8, 2))
    assert store.round(document.job_id, 0).attempt == 0
    restarted = JobStore(tmp_path)
    (document,) = restarted.take_over(abandon=False)
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


def test_rounds_after_a_return_without_optimizer_states_are_decided_anew(tmp_path: Path) -> None:
    store = JobStore(tmp_path)
    document = store.create(job())
    document.num_rounds_reached = 1
    for attempt, micro_batches, expected in ((0, 8, 8), (2, 4, 4), (3, 2, 4)):
        document.attempt = attempt
        with pytest.raises(AttemptFailedError):
            planner = ScriptedPlanner("device-0", micro_batches)
            run_round(store, document, planner, anew_since=1 if attempt else 0)
        recorded = store.round(document.job_id, 0)
        assert recorded.plans[0].num_micro_batches == expected


class CommitReachedError(Exception):
    """Ends a round when it would be committed."""


class Masks:
    """Masks whose shares may be asked for only after that is stored."""

    def __init__(self, store: JobStore, job_id: str) -> None:
        self._store, self._job_id = store, job_id

    def reveal(self, present: Sequence[int]) -> Sequence[int]:
        assert self._store.round(self._job_id, 0).is_revealed
        return present


def run_to_commit(
    store: JobStore, document: JobDocument, ended: Sequence[int]
) -> tuple[list[int], list[int]]:
    """Runs a round of three clusters, of which some have ended when the deadline passes.

    Returns:
        The clusters that trained, and the late ones that the commit would leave out.
    """
    states = [ClusterState(cluster_index=index) for index in range(3)]
    commit = Commit(clusters=states, restore_point=Commit(clusters=states))
    prepared = PreparedJob(ModelSpec(), SIZES, BlobSource(), commit, [5, 6, 7], [])
    progress = JobProgress(document, store, EventLog())
    planner: Any = ScriptedPlanner("device-0", 4, 4, 4)
    channels = ChannelPool(Security.insecure())
    runner = RoundRunner(progress, prepared, planner, channels, HostCalls(5.0))
    trained, left_out = [], []
    has_ended = threading.Barrier(max(len(ended), 1))

    def run_cluster(
        plan: Plan,
        decision: Decision,
        recorded: RoundDocument,
        late: LateClusters,
        masking: Masks | None,
        *,
        evaluation_only: bool,
    ) -> RoundPrepared:
        index = plan.cluster_index
        if index not in late.late:
            trained.append(index)
            late.training_began()
            if index in ended:
                has_ended.wait(5)
                late.ended(index)
            else:
                while index not in late.decide():
                    time.sleep(0.01)
        summary = RoundSummary(local_steps=1)
        return RoundPrepared(state=ClusterState(cluster_index=index), summary=summary)

    def commit_round(attempt: Attempt, states: Sequence[ClusterState], **options: Any) -> Commit:
        assert [state.cluster_index for state in states] == [0, 1, 2]
        left_out.extend(options["late_clusters"])
        if document.job.averaging.secure:
            assert options["unmasking"] == [i for i in range(3) if i not in left_out]
        # A commit that the scheduler does not see must be repeated with the same clusters.
        assert store.round(document.job_id, 0).late_clusters == left_out
        raise CommitReachedError

    def masks(attempt: Attempt, recorded: RoundDocument, late: LateClusters) -> Masks:
        assert recorded.total_samples == 2 * (5 + 6 + 7)
        return Masks(store, document.job_id)

    runner._masking = masks  # type: ignore[method-assign,assignment]
    runner._run_cluster = run_cluster  # type: ignore[method-assign,assignment]
    runner._commit_round = commit_round  # type: ignore[method-assign,assignment]
    with pytest.raises(CommitReachedError):
        runner.run(local_steps=1)
    return sorted(trained), left_out


def test_repeated_round_has_the_recorded_clusters_whatever_the_deadline_says(
    tmp_path: Path,
) -> None:
    store = JobStore(tmp_path)
    schedule = {"min_clusters": 2, "round_deadline_seconds": 1e-6}
    three = {**job().model_dump(), "clusters": 3}
    three["schedule"] |= schedule
    document = store.create(JobConfig.model_validate(three))
    assert run_to_commit(store, document, ended=[0, 2]) == ([0, 1, 2], [1])
    # It was not committed, so others may be late in the next attempt.
    document.attempt = 1
    assert run_to_commit(store, document, ended=[1, 2]) == ([0, 1, 2], [0])
    document.attempt, document.num_rounds_reached = 2, 1  # the commit was found
    assert run_to_commit(store, document, ended=[1, 2]) == ([1, 2], [0])
    three["schedule"] |= {"round_deadline_seconds": 0}
    changes = {"config_json": JobConfig.model_validate(three).to_json(), "attempt": 3}
    document = document.model_copy(update=changes)
    assert run_to_commit(store, document, ended=[1, 2]) == ([1, 2], [0])


def test_round_whose_masks_were_revealed_has_the_same_clusters_even_if_it_was_not_committed(
    tmp_path: Path,
) -> None:
    store = JobStore(tmp_path)
    secure = {**job().model_dump(), "clusters": 3, "averaging": {"secure": True}}
    secure["schedule"] |= {"min_clusters": 2, "round_deadline_seconds": 1e-6}
    document = store.create(JobConfig.model_validate(secure))
    assert run_to_commit(store, document, ended=[0, 2]) == ([0, 1, 2], [1])
    document.attempt = 1
    assert run_to_commit(store, document, ended=[0, 2]) == ([0, 2], [1])


def test_masked_round_with_too_many_rows_is_refused_before_anything_is_revealed() -> None:
    prepared = [RoundPrepared(state=ClusterState(num_samples=rows)) for rows in (5, 900, 7)]
    _check_rows(prepared, {1}, 18)
    with pytest.raises(WrongStateError, match="912 rows, cluster 1 alone on 900, .* is 18"):
        _check_rows(prepared, set(), 18)


def test_attempt_begins_with_the_candidate_that_all_clusters_have_copied(tmp_path: Path) -> None:
    store = JobStore(tmp_path)
    longer = {**job().model_dump(), "training": {"rounds": 9}}
    document = store.create(JobConfig.model_validate(longer))
    progress = JobProgress(document, store, EventLog())
    commit, moved = Commit(num_rounds=4), Commit(num_rounds=4)
    commit.restore_point.num_rounds, commit.candidate.num_rounds = 2, 3
    moved.restore_point.num_rounds = 3

    class Runner(RoundRunner):
        def _commit_round(self, *_: Any, **__: Any) -> CommitRoundResponse:
            return CommitRoundResponse(commit=moved)

    prepared = PreparedJob(ModelSpec(), SIZES, BlobSource(), commit, [], [])
    channels, planner = ChannelPool(Security.insecure()), ScriptedPlanner("device-0")
    runner = Runner(progress, prepared, planner, channels, HostCalls(5.0), copied_candidate=3)  # type: ignore[arg-type]
    assert runner.num_rounds == 3


def test_plan_with_blocks_on_the_edge_server_is_refused_if_it_may_not_see_them(
    tmp_path: Path,
) -> None:
    class OnEdgeServer(ScriptedPlanner):
        def decide(self, *args: Any, **options: Any) -> tuple[list[Plan], Decision]:
            plans, decision = super().decide(*args, **options)
            plans[0].stages.add(host_id="edge-server", start_unit=3, stop_unit=5)
            return plans, decision

    store = JobStore(tmp_path)
    document = store.create(
        JobConfig.model_validate(
            {**job().model_dump(), "clusters": 3, "averaging": {"secure": True}}
        )
    )
    with pytest.raises(
        InvalidInputError, match="units 3 to 4 on edge-server, which would then see"
    ):
        run_round(store, document, OnEdgeServer("device-0", 4, 4, 4))


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


def test_retry_on_hosts_that_cannot_keep_its_micro_batches_records_others(tmp_path: Path) -> None:
    store = JobStore(tmp_path)
    document = store.create(job())
    with pytest.raises(AttemptFailedError):
        run_round(store, document, ScriptedPlanner("device-0", 8))
    document.num_rounds_reached = 1
    with pytest.raises(AttemptFailedError):
        run_round(store, document, ScriptedPlanner("device-1", 2, refuses_earlier=True))
    assert store.round(document.job_id, 0).plans[0].num_micro_batches == 2
