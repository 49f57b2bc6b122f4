"""What happens in a round. Imitated jobs (tests/disturbed_jobs) go through all cases; here are those that they cannot show."""

from dataclasses import replace

import pytest

from collapipe.job_life.attempt import AttemptRules, Phase, begin_attempt, step
from collapipe.job_life.attempt_events import (
    Because,
    CancelCalls,
    CatchUp,
    ClusterFailed,
    ClusterFinished,
    Event,
    Fail,
    Failed,
    Planned,
    RoundWanted,
    Ticked,
    TrainingBegan,
)
from collapipe.job_life.commits import Kept
from collapipe.job_life.failing_clusters import FailingClusters
from collapipe.job_life.round_clusters import RoundRules
from collapipe.job_life.tries import Failure, Kind

RULES = AttemptRules(
    RoundRules(2, 1, deadline_seconds=10.0, may_leave_out=True, ends_early=False),
    replicate_every=1,
    evaluate_every=0,
    is_masked=False,
    is_private=False,
    edge_server="edge-server",
    edge_process="1",
    is_retry=False,
)


def test_bug_in_the_work_for_a_late_cluster_is_no_failure_of_the_cluster() -> None:
    state = begin_attempt(RULES, (0, 0), FailingClusters(), None)
    events: list[tuple[float, Event]] = [
        (0.0, RoundWanted(trains=True, decides_anew=True)),
        (0.0, Planned({0: {}, 1: {}})),
        (1.0, TrainingBegan(0)),
        (5.0, ClusterFinished(0, 10)),
    ]
    for now, event in events:
        state, _ = step(state, event, now)
    state, actions = step(state, Ticked(), 11.0)
    assert actions == [CancelCalls(frozenset({1}))]
    for kind, phase in ((Kind.PASSING, Phase.COMMITTING), (Kind.BUG, Phase.FAILED)):
        after, actions = step(state, ClusterFailed(1, Failure(kind)), 11.5)
        assert after.phase is phase
    assert actions == [Fail(Because.CLUSTER_FAILED, 1)]


@pytest.mark.parametrize(
    ("kind", "decides_anew", "because"),
    [
        (Kind.NO_PLAN, True, Because.CANNOT_REPEAT),
        (Kind.NO_PLAN, False, Because.PHASE_FAILED),
        (Kind.HOST_LOST, True, Because.PHASE_FAILED),
        (Kind.PASSING, True, Because.PHASE_FAILED),  # A link without a rate may be the cause.
    ],
)
def test_kept_results_are_given_up_if_the_rounds_before_them_cannot_be_repeated(
    kind: Kind, because: Because, *, decides_anew: bool
) -> None:
    kept = Kept((0, 2), "1", {0: {"device": "1"}})
    state = begin_attempt(RULES, (0, 2), FailingClusters(), kept)
    state, actions = step(state, RoundWanted(trains=True, decides_anew=decides_anew), 0.0)
    assert actions == [CatchUp(frozenset({1}))]
    if kind is Kind.HOST_LOST:
        state, _ = step(state, ClusterFailed(1, Failure(kind)), 1.0)
    state, actions = step(state, Failed(Failure(kind)), 1.0)
    assert actions == [Fail(because)]
    assert (state.kept is None) == (because is Because.CANNOT_REPEAT)
    assert state.has_plan == (kind is Kind.HOST_LOST), (
        "otherwise nobody waits for a device that is measured, and no link is measured again"
    )


def test_round_that_fails_goes_on_without_no_further_cluster() -> None:
    rules = replace(RULES, clusters=replace(RULES.clusters, num_clusters=3))
    state = begin_attempt(rules, (0, 0), FailingClusters(), None)
    events: list[Event] = [
        RoundWanted(trains=True, decides_anew=True),
        Planned({0: {"a": "1"}, 1: {"b": "1"}, 2: {"c": "1"}}),
        ClusterFailed(0, Failure(Kind.HOST_LOST, "a")),
        ClusterFailed(1, Failure(Kind.HOST_FAULTY, "b")),  # Alone, it would be left out.
    ]
    for event in events:
        state, actions = step(state, event, 1.0)
    assert actions == []
    state, actions = step(state, ClusterFinished(2, 10), 2.0)
    assert actions == [Fail(Because.CLUSTER_FAILED, 0)]
    assert state.kept is not None and state.kept.processes.keys() == {2}
    assert state.failing.pausing(1) == []
