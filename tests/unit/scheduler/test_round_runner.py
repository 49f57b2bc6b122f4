"""How attempts at a round are recorded, and what the rounds of a private job add up to; whole jobs run in tests/integration."""

import math
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from dp_accounting import GaussianDpEvent
from dp_accounting.pld import PLDAccountant
from planned_jobs import NO_STATE, SIZES, hosts, job
from pydantic import ValidationError

from collapipe.errors import (
    AttemptFailedError,
    CancelledError,
    InfeasibleError,
    InvalidInputError,
    WrongStateError,
)
from collapipe.evaluation import evaluation_delay
from collapipe.job import LEAST_NOISE, JobConfig
from collapipe.job_life import attempt_events
from collapipe.job_life.attempt_events import CatchUp, CaughtUp, Copied, Event, TrainingBegan
from collapipe.job_life.restore_points import becomes_candidate
from collapipe.planning.decisions import RoundDecision
from collapipe.planning.planner_state import PlannerState
from collapipe.rpc import ChannelPool, Security
from collapipe.scheduler import round_runner
from collapipe.scheduler.attempt_tools import AttemptTools
from collapipe.scheduler.events import EventLog
from collapipe.scheduler.host_calls import HostCalls
from collapipe.scheduler.job_commits import JobCommits
from collapipe.scheduler.job_documents import JobDocument, RoundDocument, RoundResult
from collapipe.scheduler.job_preparation import PreparedJob
from collapipe.scheduler.job_progress import JobProgress
from collapipe.scheduler.job_store import JobStore
from collapipe.scheduler.privacy_account import PrivacyAccount, check_first_round
from collapipe.scheduler.round_runner import RoundRunner
from collapipe.v1.control_unit_pb2 import RoundPrepared
from collapipe.v1.edge_server_pb2 import CommitRoundResponse
from collapipe.v1.job_pb2 import BlobSource, RoundSummary
from collapipe.v1.plan_pb2 import Attempt, ClusterState, Commit, ModelSpec, Plan, Stage
from collapipe.v1.scheduler_pb2 import RoundCommitted

LIMIT_SECONDS = 60.0
SECURE = {"clusters": 3, "averaging": {"secure": True}}


@dataclass
class Decision:
    plans: tuple[None, ...] = (None, None, None)
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
            Plan(
                plan_id=self._host_id,
                cluster_index=index,
                num_micro_batches=number,
                stages=[Stage(host_id=self._host_id)],
            )
            for index, number in enumerate(numbers)
        ]
        return plans, Decision()

    def round_started(self, decision: Decision) -> None:
        pass

    def round_committed(self, *_: Any, **__: Any) -> None:
        pass

    def state(self) -> PlannerState:
        return NO_STATE


class Runner(RoundRunner):
    """A runner whose clusters fail."""

    def __init__(
        self,
        store: JobStore,
        document: JobDocument,
        planner: Any,
        commit: Commit,
        num_rows: Sequence[int] = (),
        **options: Any,
    ) -> None:
        progress = JobProgress(document, store, EventLog())
        prepared = PreparedJob(ModelSpec(), SIZES, BlobSource(), commit, [*num_rows], [])
        channels = ChannelPool(Security.insecure())
        runner = self

        class Commits(JobCommits):
            def commit_round(self, *arguments: Any, **options: Any) -> CommitRoundResponse:
                return runner._commit_round(*arguments, **options)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(round_runner, "JobCommits", Commits)
            tools = AttemptTools(progress, prepared, planner, HostCalls(channels, 5.0))
            super().__init__(tools, **options)

    def _run_cluster(self, *_: Any, **__: Any) -> RoundPrepared:
        raise AttemptFailedError("a cluster failed")

    def _commit_round(
        self, attempt: Attempt, states: Sequence[ClusterState], **options: Any
    ) -> CommitRoundResponse:
        raise AssertionError("nothing is committed")


def fail_round(
    store: JobStore,
    document: JobDocument,
    planner: ScriptedPlanner,
    round_index: int = 0,
    anew_since: int = 0,
) -> RoundDocument:
    """Runs a round that fails in its clusters, and returns its record."""
    commit = Commit(num_rounds=round_index)
    commit.restore_point.num_rounds = round_index
    commit.restore_point.anew_since = anew_since
    with pytest.raises(AttemptFailedError):
        Runner(store, document, planner, commit).run(local_steps=1)
    return store.round(document.job_id, round_index)


def micro_batches_of(record: RoundDocument) -> list[int]:
    return [plan.num_micro_batches for plan in record.plans]


def test_retry_counts_the_attempt_and_keeps_the_micro_batches_of_each_cluster(
    tmp_path: Path, store: JobStore, document: JobDocument
) -> None:
    assert fail_round(store, document, ScriptedPlanner("device-0", 8, 2)).attempt == 0
    restarted = JobStore(tmp_path)
    (document,) = restarted.take_over(abandon=False)
    retried = fail_round(restarted, document, ScriptedPlanner("device-1", 4, 4))
    assert (retried.attempt, micro_batches_of(retried)) == (1, [8, 2])
    assert {plan.plan_id for plan in retried.plans} == {"device-1"}  # other hosts may run it


def test_only_repeated_rounds_keep_their_steps(store: JobStore, document: JobDocument) -> None:
    planner, longer = ScriptedPlanner("device-0", 4), job({"rounds": 99})
    fail_round(store, document, ScriptedPlanner("device-0", 8))
    second = fail_round(store, document, planner, 1)
    assert (second.attempt, micro_batches_of(second)) == (0, [4]), "each round decides its own"
    document.num_rounds_reached = 1  # the second round was never committed
    document = document.model_copy(update={"config_json": longer.to_json()})
    steps = [fail_round(store, document, planner, index).total_steps for index in range(2)]
    assert steps == [job().total_steps, longer.total_steps]
    assert steps[0] != steps[1]


def test_rounds_after_a_return_are_decided_anew(store: JobStore, document: JobDocument) -> None:
    document.num_rounds_reached = 1
    for attempt, micro_batches, expected in ((0, 8, 8), (2, 4, 4), (3, 2, 4)):
        document.attempt = attempt
        planner = ScriptedPlanner("device-0", micro_batches)
        recorded = fail_round(store, document, planner, anew_since=1 if attempt else 0)
        assert micro_batches_of(recorded) == [expected]


def test_attempt_without_a_plan_records_nothing(store: JobStore, document: JobDocument) -> None:
    runner = Runner(store, document, ScriptedPlanner("device-0", feasible=False), Commit())
    with pytest.raises(InfeasibleError):
        runner.run(local_steps=1)
    assert store.find_round(document.job_id, 0) is None


def test_retry_may_need_other_micro_batches(store: JobStore, document: JobDocument) -> None:
    fail_round(store, document, ScriptedPlanner("device-0", 8))
    document.num_rounds_reached = 1
    other = ScriptedPlanner("device-1", 2, refuses_earlier=True)
    assert micro_batches_of(fail_round(store, document, other)) == [2]


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
    trained: list[int] = []
    left_out: list[int] = []
    is_ended = {index: threading.Event() for index in range(3)}

    class ToCommit(Runner):
        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments)
            self._clusters.stop = lambda late: [is_ended[i].set() for i in late]  # type: ignore

        def _run_cluster(self, plan: Plan) -> RoundPrepared:
            index = plan.cluster_index
            trained.append(index)
            self._events.put(TrainingBegan(index))
            if index not in ended:
                assert is_ended[index].wait(LIMIT_SECONDS)
                raise AttemptFailedError("the call was ended")
            summary = RoundSummary(local_steps=1)
            return RoundPrepared(state=ClusterState(cluster_index=index), summary=summary)

        def _commit_round(
            self, attempt: Attempt, states: Sequence[ClusterState], **options: Any
        ) -> CommitRoundResponse:
            assert [state.cluster_index for state in states] == [0, 1, 2]
            left_out.extend(options["late_clusters"])
            if document.job.averaging.secure:
                assert options["unmasking"] == [i for i in range(3) if i not in left_out]
            # A commit that the scheduler does not see must be repeated with the same clusters.
            assert store.round(document.job_id, 0).late_clusters == left_out
            raise CommitReachedError

        def _agree_on_masks(self, action: attempt_events.AgreeOnMasks) -> attempt_events.Masked:
            assert self._now.document.total_samples == 2 * (5 + 6 + 7)
            self._now.masking = Masks(store, document.job_id)
            return attempt_events.Masked()

    states = [ClusterState(cluster_index=index) for index in range(3)]
    commit = Commit(clusters=states, restore_point=Commit(clusters=states))
    planner = ScriptedPlanner("device-0", 4, 4, 4)
    with pytest.raises(CommitReachedError):
        ToCommit(store, document, planner, commit, [5, 6, 7]).run(local_steps=1)
    return sorted(trained), left_out


def three_clusters(deadline: float = 1e-6, **more: Any) -> JobConfig:
    return job(more={"clusters": 3, **more}, min_clusters=2, round_deadline_seconds=deadline)


def test_repeated_round_has_the_recorded_clusters(store: JobStore) -> None:
    document = store.create(three_clusters())
    assert run_to_commit(store, document, ended=[0, 2]) == ([0, 1, 2], [1])
    # It was not committed, so others may be late in the next attempt.
    document.attempt = 1
    assert run_to_commit(store, document, ended=[1, 2]) == ([0, 1, 2], [0])
    document.attempt, document.num_rounds_reached = 2, 1  # the commit was found
    assert run_to_commit(store, document, ended=[1, 2]) == ([1, 2], [0])
    changes = {"config_json": three_clusters(deadline=0).to_json(), "attempt": 3}
    document = document.model_copy(update=changes)
    assert run_to_commit(store, document, ended=[1, 2]) == ([1, 2], [0])


def test_round_whose_masks_were_revealed_keeps_its_clusters(store: JobStore) -> None:
    document = store.create(three_clusters(averaging={"secure": True}))
    assert run_to_commit(store, document, ended=[0, 2]) == ([0, 1, 2], [1])
    document.attempt = 1
    assert run_to_commit(store, document, ended=[0, 2]) == ([0, 2], [1])


def test_masked_round_with_too_many_rows_is_refused_before_anything_is_revealed(
    store: JobStore,
) -> None:
    class Growing(Runner):
        def _run_cluster(self, plan: Plan) -> RoundPrepared:
            index = plan.cluster_index
            rows = (5, 900, 7)[index]
            return RoundPrepared(state=ClusterState(cluster_index=index, num_samples=rows))

        def _agree_on_masks(self, action: attempt_events.AgreeOnMasks) -> attempt_events.Masked:
            self._now.masking = Masks(store, document.job_id)
            return attempt_events.Masked()

    states = [ClusterState(cluster_index=index) for index in range(3)]
    commit = Commit(clusters=states, restore_point=Commit(clusters=states))
    document, planner = store.create(job(more=SECURE)), ScriptedPlanner("device-0", 4, 4, 4)
    planner.hosts = replace(planner.hosts, clusters=planner.hosts.clusters * 3)
    runner = Growing(store, document, planner, commit, [5, 6, 7])
    with pytest.raises(WrongStateError, match=r"control-unit.* 1 .*900.*912.* 36"):
        runner.run(local_steps=1)
    assert not store.round(document.job_id, 0).is_revealed


def test_bug_in_the_work_of_a_cluster_ends_the_others_and_is_raised(
    store: JobStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Buggy(Runner):
        def _run_cluster(self, plan: Plan) -> RoundPrepared:
            if plan.cluster_index == 1:
                raise RuntimeError("a bug")
            assert have_ended.wait(LIMIT_SECONDS)
            raise CancelledError("another call failed")

    states = [ClusterState(cluster_index=index) for index in range(2)]
    commit = Commit(clusters=states, restore_point=Commit(clusters=states))
    document = store.create(job(more={"clusters": 2}))
    runner, have_ended = (
        Buggy(store, document, ScriptedPlanner("device-0", 4, 4), commit),
        threading.Event(),
    )
    monkeypatch.setattr(runner._calls, "end_all", have_ended.set)
    with pytest.raises(RuntimeError, match="a bug"):
        runner.run(local_steps=1)
    assert runner._work == []


def test_attempt_begins_with_the_candidate_that_all_clusters_have_copied(store: JobStore) -> None:
    commit, moved = Commit(num_rounds=4, attempt=1), Commit(num_rounds=4)
    commit.restore_point.num_rounds, commit.candidate.num_rounds = 2, 3
    commit.candidate.attempt, moved.restore_point.num_rounds = 1, 3

    class Moving(Runner):
        def _commit_round(self, *_: Any, **__: Any) -> CommitRoundResponse:
            return CommitRoundResponse(commit=moved)

    document, planner = store.create(job({"rounds": 9})), ScriptedPlanner("device-0")
    for copied, begins_at in (((1, 3), 3), ((0, 3), 2), (None, 2)):
        document.copied_candidate = copied
        assert Moving(store, document, planner, commit).num_rounds == begins_at


def test_evaluation_leaves_the_calls_of_the_job_open(store: JobStore) -> None:
    class Evaluating(Runner):
        def _run_cluster(self, plan: Plan) -> RoundPrepared:
            return RoundPrepared()

    runner = Evaluating(store, store.create(job()), ScriptedPlanner("device-0", 4), Commit())
    runner.run(local_steps=0)
    assert not runner._calls.is_ending


def test_kept_result_is_used_though_its_device_takes_no_part_any_more(store: JobStore) -> None:
    class Failing(Runner):
        def _run_cluster(self, plan: Plan) -> RoundPrepared:
            ran.append(plan.cluster_index)
            if plan.cluster_index == 1:
                raise AttemptFailedError("a cluster failed")
            return RoundPrepared(state=ClusterState(cluster_index=plan.cluster_index))

        def _commit_round(self, *_: Any, **__: Any) -> CommitRoundResponse:
            raise CommitReachedError

    ran: list[int] = []
    states = [ClusterState(cluster_index=index) for index in range(2)]
    commit = Commit(clusters=states, restore_point=Commit(clusters=states))
    document = store.create(job(more={"clusters": 2}))
    first = Failing(store, document, ScriptedPlanner("device-2", 4, 4), commit)
    with pytest.raises(AttemptFailedError):
        first.run(local_steps=1)
    planner = ScriptedPlanner("device-0", 4, 4)
    second = Failing(store, document, planner, commit, before=first.for_next_attempt)
    assert second.state_holders == {"device-2": ""}
    planner.hosts = hosts(num_devices=2)
    second._catch_up = lambda action: CaughtUp()  # type: ignore[method-assign]
    ran.clear()
    with pytest.raises(AttemptFailedError):
        second.run(local_steps=1)
    assert ran == [1]
    kept = second.for_next_attempt.kept
    assert kept is not None and kept.processes == {0: {"device-2": ""}}

    def fail(action: CatchUp) -> Event:
        raise InfeasibleError("the devices have too little memory")

    planner = ScriptedPlanner("device-0", 4, 4)
    third = Failing(store, document, planner, commit, before=first.for_next_attempt)
    third._catch_up = fail  # type: ignore[method-assign]
    with pytest.raises(AttemptFailedError, match="too little memory"):
        third.run(local_steps=1)
    assert third.for_next_attempt.kept is None, "otherwise the next attempt would fail alike"


class Committing(Runner):
    """A runner of one cluster whose rounds succeed. It notes the rounds that became candidates."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        self.candidates: list[int] = []
        super().__init__(*arguments, **options)

    def _run_cluster(self, *_: Any, **__: Any) -> RoundPrepared:
        return RoundPrepared(state=ClusterState(), summary=RoundSummary(local_steps=1))

    def _commit_round(
        self, attempt: Attempt, states: Sequence[ClusterState], **options: Any
    ) -> CommitRoundResponse:
        number = attempt.round_index + 1
        commit = Commit(num_rounds=number, attempt=attempt.attempt, clusters=states)
        commit.restore_point.clusters.extend(states)
        if options["is_candidate"]:
            self.candidates.append(number)
        if self.candidates:
            commit.candidate.num_rounds = self.candidates[-1]
            commit.candidate.attempt = attempt.attempt
        return CommitRoundResponse(commit=commit)


def test_result_of_a_commit_that_the_scheduler_did_not_hear_of_is_stored_once(
    tmp_path: Path, store: JobStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Deaf(Committing):
        def _commit_round(self, *_: Any, **__: Any) -> CommitRoundResponse:
            raise CommitReachedError

    class Learning(ScriptedPlanner):
        num_rounds = 0

        def take_over_round(self, *_: Any) -> None:
            self.num_rounds += 1

    monkeypatch.setattr(RoundDecision, "from_json", lambda document: Decision())
    commit = Commit(clusters=[ClusterState()], restore_point=Commit(clusters=[ClusterState()]))
    job_id = store.create(job({"rounds": 9})).job_id
    with pytest.raises(CommitReachedError):
        Deaf(store, store.get(job_id), ScriptedPlanner("device-0", 4), commit).run(local_steps=1)
    assert store.find_result(job_id, 0) is None
    store, planner = JobStore(tmp_path), Learning("device-0", 4)
    # What attempt 0 has measured is not that of attempt 5, and a result of an earlier attempt is replaced.
    earlier = RoundResult(committed=RoundCommitted(num_rounds=1, round_seconds=77.0), attempt=9)
    store.save_result(job_id, 0, earlier)
    for attempt, num_learnt in ((5, 0), (0, 1), (0, 1)):
        last = Commit(num_rounds=1, attempt=attempt)
        last.MergeFrom(commit)
        Committing(store, store.get(job_id), planner, last)
        assert planner.num_rounds == num_learnt
    found = JobStore(tmp_path)
    result = found.find_result(job_id, 0)
    assert result is not None and (result.attempt, result.committed.num_rounds) == (0, 1)
    assert result.committed.round_seconds != 77.0
    assert found.get(job_id).num_rounds_committed == 1 and found.planner_state(job_id) is not None


def test_attempt_after_a_failure_copies_its_first_round(tmp_path: Path, store: JobStore) -> None:
    state = ClusterState()
    commit = Commit(num_rounds=3, clusters=[state])
    commit.restore_point.CopyFrom(Commit(num_rounds=3, clusters=[state]))
    store.create(job({"rounds": 99, "replicate_every": 10}))
    candidates = []
    for _ in range(2):  # Then the scheduler is started again.
        (document,) = store.all()
        runner = Committing(store, document, ScriptedPlanner("device-0", 4), commit)
        while runner.num_rounds < 12:
            runner.run(local_steps=1)
        candidates.append(runner.candidates)
        store = JobStore(tmp_path)
        store.take_over(abandon=False)
    assert candidates == [[10], [4, 6, 10]]


def test_scheduler_stores_at_once_that_all_clusters_have_copied_a_candidate(
    tmp_path: Path, store: JobStore
) -> None:
    stored: list[tuple[int, int] | None] = []

    class Copying(Committing):
        def _run_cluster(self, *_: Any, **__: Any) -> RoundPrepared:
            if not self.candidates:
                return super()._run_cluster()
            self._events.put(Copied(0))
            deadline = time.monotonic() + LIMIT_SECONDS
            while time.monotonic() < deadline and not (stored and stored[-1]):
                time.sleep(0.01)
                (document,) = JobStore(tmp_path).all()
                stored.append(document.copied_candidate)
            raise AttemptFailedError("the scheduler is killed")

    document = store.create(job({"rounds": 9, "replicate_every": 1}))
    commit = Commit(clusters=[ClusterState()])
    commit.restore_point.clusters.add()
    runner = Copying(store, document, ScriptedPlanner("device-0", 4), commit)
    runner.run(local_steps=1)
    with pytest.raises(AttemptFailedError):
        runner.run(local_steps=1)
    assert stored[-1] == (0, 1)


@pytest.mark.parametrize(
    ("every", "began", "first_ten"),
    [
        (1, 0, [1, 2, 3, 4, 5, 6, 7, 8, 9, 10]),
        (4, 0, [1, 3, 4, 8, 12, 16, 20, 24, 28, 32]),
        (10, 3, [4, 6, 10, 20, 30, 40, 50, 60, 70, 80]),
        (10, 19, [20, 22, 26, 30, 40, 50, 60, 70, 80, 90]),
        (100, 1, [2, 4, 8, 16, 32, 64, 100, 200, 300, 400]),
    ],
)
def test_candidates_of_an_attempt_after_a_failure_get_ever_farther_apart(
    every: int, began: int, first_ten: list[int]
) -> None:
    rounds = range(began + 1, first_ten[-1] + 1)
    after_failure = [n for n in rounds if becomes_candidate(n, every, began, has_failed=True)]
    assert after_failure == first_ten
    undisturbed = [n for n in rounds if becomes_candidate(n, every, began, has_failed=False)]
    assert undisturbed == [n for n in rounds if n % every == 0]


def test_blocks_that_the_edge_server_may_not_see_are_refused(store: JobStore) -> None:
    class OnEdgeServer(ScriptedPlanner):
        def decide(self, *args: Any, **options: Any) -> tuple[list[Plan], Decision]:
            plans, decision = super().decide(*args, **options)
            plans[0].stages.add(host_id="edge-server", start_unit=3, stop_unit=5)
            return plans, decision

    document = store.create(job(more=SECURE))
    runner = Runner(store, document, OnEdgeServer("device-0", 4, 4, 4), Commit())
    with pytest.raises(InvalidInputError, match="units 3 to 4 on edge-server"):
        runner.run(local_steps=1)


def test_evaluation_delays_a_round_only_beyond_the_slowest_training() -> None:
    evaluates = RoundSummary(training_seconds=5.0, evaluation_seconds=10.0)
    trains = RoundSummary(training_seconds=14.0)
    assert evaluation_delay([evaluates]) == 10.0
    assert evaluation_delay([evaluates, trains]) == 1.0
    assert evaluation_delay([trains]) == evaluation_delay([]) == 0.0


def private_job(clusters: int = 5, **privacy: Any) -> JobConfig:
    noise = {"noise_multiplier": 3.0, **privacy}
    return job(more={"clusters": clusters, "privacy": noise})


def after(num_rounds: int, config: JobConfig) -> PrivacyAccount:
    return PrivacyAccount().after_rounds(config, num_rounds)


def test_epsilon_of_rounds_of_different_sizes_is_that_of_dp_accounting() -> None:
    few, many = private_job(3, delta=1e-4), private_job(9, delta=1e-4)
    nothing = PrivacyAccount().loss(few)
    assert (nothing.epsilon, nothing.update_epsilon) == (0, 0)
    loss = after(4, few).after_rounds(many, 6).loss(many)
    # All but one update together have the noise of the average.
    for epsilon, multipliers in (
        (loss.epsilon, (3.0, 3.0)),
        (loss.update_epsilon, (3.0 / 2**0.5, 3.0 / 8**0.5)),
    ):
        accountant = PLDAccountant(value_discretization_interval=1e-3)
        for multiplier, num_rounds in zip(multipliers, (4, 6), strict=True):
            accountant.compose(GaussianDpEvent(multiplier), num_rounds)
        assert epsilon == pytest.approx(accountant.get_epsilon(1e-4), rel=1e-3)
    assert loss.delta == 1e-4


def test_every_attempt_counts_and_no_return_takes_it_back(tmp_path: Path, store: JobStore) -> None:
    document = store.create(private_job())
    epsilons = []
    for _ in range(3):
        fail_round(store, document, ScriptedPlanner("device-0", *[4] * 5))
        document = JobStore(tmp_path).get(document.job_id)  # what a restarted scheduler reads
        epsilons.append(document.status().privacy_loss.epsilon)
        document = store.roll_back(document.job_id, Commit(num_rounds=0, attempt=9))
        assert document.status().privacy_loss.epsilon == epsilons[-1]
    expected = [after(number, private_job()).loss(private_job()) for number in (1, 2, 3)]
    assert epsilons == [loss.epsilon for loss in expected]
    assert epsilons == sorted(set(epsilons))
    without_noise = store.create(job())
    fail_round(store, without_noise, ScriptedPlanner("device-0", 4))
    assert not without_noise.status().HasField("privacy_loss")


def test_rounds_are_allowed_up_to_the_largest_epsilon() -> None:
    limit = after(7, private_job()).loss(private_job()).epsilon
    config = private_job(max_epsilon=limit)
    assert after(4, config).allows_rounds(config, 3)
    assert not after(4, config).allows_rounds(config, 4)


@pytest.mark.parametrize(
    ("noise", "delta"), [(LEAST_NOISE, 1e-30), (LEAST_NOISE, 0.99), (1e6, 1e-30)]
)
def test_every_job_that_is_called_private_has_a_finite_epsilon(noise: float, delta: float) -> None:
    config = private_job(1000, noise_multiplier=noise, delta=delta)
    loss = after(1_000_000, config).loss(config)
    assert math.isfinite(loss.epsilon)
    assert math.isfinite(loss.update_epsilon)


def test_job_that_may_not_train_a_round_is_refused() -> None:
    with pytest.raises(InvalidInputError, match=r"1\.\d+.*max_epsilon is 1"):
        check_first_round(private_job(max_epsilon=1.0))
    check_first_round(private_job(max_epsilon=2.0))
    check_first_round(job())


def test_noise_of_all_but_one_of_the_fewest_clusters_is_that_of_the_average() -> None:
    def shares(clusters: int = 5, **schedule: Any) -> int:
        config = private_job(clusters)
        schedule = {**config.schedule.model_dump(), **schedule}
        return JobConfig.model_validate(
            {**config.model_dump(), "schedule": schedule}
        ).num_noise_shares

    late = {"round_deadline_seconds": 10.0, "min_clusters": 3}
    assert [shares(clusters) for clusters in (1, 2, 5)] == [1, 1, 4]
    assert shares(**late) == 2
    assert shares(**late, late_clusters="end_early") == 4


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"averaging": {"rule": "median"}}, "averaging.rule .*'median'"),
        ({"training": {"upload_codecs": ["fp32", "int8"]}}, r"upload_codecs .*'int8'\]"),
        ({"privacy": {"max_epsilon": 1.0}}, "max_epsilon is 1"),
    ],
)
def test_settings_that_void_a_guarantee_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        JobConfig.model_validate(private_job().model_dump() | changes)
