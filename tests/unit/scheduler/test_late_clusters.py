"""Which clusters of a round are late or fail, when a job goes on without them, and which results it keeps."""

from typing import Any

import pytest

from collapipe.errors import AttemptFailedError, InvalidInputError, PeerFaultyError
from collapipe.job import JobConfig
from collapipe.scheduler.evaluations import Evaluations
from collapipe.scheduler.failing_clusters import FailingClusters
from collapipe.scheduler.kept_results import KeptResult, KeptResults, weights_since_restore_point
from collapipe.scheduler.late_clusters import LateClusters
from collapipe.v1.control_unit_pb2 import RoundPrepared
from collapipe.v1.plan_pb2 import Commit, Plan

from .jobs import Clock, hosts

LOST = AttemptFailedError("a device hangs")
WRONG = PeerFaultyError("control-unit-1", "control-unit-1 sent nonsense")


def job(**schedule: Any) -> JobConfig:
    document = {"task": {"kind": "classification"}, "clusters": 3, "schedule": schedule}
    return JobConfig.from_dict(document, "JOB.toml")


DEADLINE = {"round_deadline_seconds": 10, "min_clusters": 2}


def begun(clock: Clock, recorded: list[int] | None = None, **schedule: Any) -> LateClusters:
    late = LateClusters(job(**schedule), recorded, clock=clock)
    late.training_began()
    return late


def test_clusters_that_have_not_ended_at_the_deadline_are_late(clock: Clock) -> None:
    late = begun(clock, **DEADLINE)
    clock.now += 6
    late.training_began()  # The deadline counts from the first cluster.
    assert late.ended(0) and late.ended(2)
    clock.now += 3.9
    assert late.decide() == frozenset()
    clock.now += 0.2
    assert late.decide() == late.late == {1}
    assert not late.ended(1), "a result that comes later counts"
    assert late.decide() == {1}


def test_clusters_that_end_early_count(clock: Clock) -> None:
    late = begun(clock, **DEADLINE, late_clusters="end_early")
    assert late.ended(0) and late.ended(2)
    clock.now += 10.1
    assert late.decide() == {1}
    assert late.late == frozenset()
    assert late.ended(1)
    assert late.decide() == frozenset(), "it has ended"


def test_deadline_waits_until_enough_clusters_have_ended(clock: Clock) -> None:
    late = begun(clock, **DEADLINE)
    clock.now += 1000
    for cluster in (1, 0):
        assert late.decide() == frozenset()
        assert late.ended(cluster)
    assert late.decide() == {2}


def test_deadline_does_not_count_before_the_training(clock: Clock) -> None:
    late = LateClusters(job(**DEADLINE), clock=clock)
    clock.now += 1000
    assert late.ended(0) and late.ended(1)
    assert late.decide() == frozenset()


@pytest.mark.parametrize(
    "schedule",
    [
        {},
        {"min_clusters": 1},
        {"round_deadline_seconds": 10},
        {"round_deadline_seconds": 10, "min_clusters": 3},
    ],
)
def test_nobody_is_late_if_all_clusters_are_needed(clock: Clock, schedule: dict[str, Any]) -> None:
    late = begun(clock, **schedule)
    assert late.ended(0) and late.ended(1)
    clock.now += 1000
    assert late.decide() == frozenset()


@pytest.mark.parametrize("recorded", [[], [1]])
@pytest.mark.parametrize("rule", ["leave_out", "end_early"])
def test_repeated_round_has_the_recorded_late_clusters_whatever_the_rule_is_now(
    clock: Clock, recorded: list[int], rule: str
) -> None:
    late = begun(clock, recorded, **DEADLINE, late_clusters=rule)
    assert late.ended(2)
    clock.now += 1000
    assert late.ended(0)
    assert late.decide() == frozenset()
    assert late.late == set(recorded)
    assert late.ended(1) == (not recorded)


def test_more_clusters_than_the_job_has_are_refused() -> None:
    with pytest.raises(InvalidInputError, match="min_clusters is 4, .* 3"):
        job(min_clusters=4)


def test_round_goes_on_without_clusters_that_fail_if_enough_are_left() -> None:
    late = LateClusters(job(min_clusters=2), may_fail=True)
    assert late.goes_on_without(1)
    assert late.late == late.failed == {1}
    assert not late.goes_on_without(0), "one cluster is not enough"
    assert late.ended(0) and late.ended(2) and not late.ended(1)


@pytest.mark.parametrize(
    ("schedule", "may_fail"),
    [
        ({}, True),
        ({"min_clusters": 2, "late_clusters": "end_early"}, True),
        ({"min_clusters": 2}, False),
    ],
)
def test_round_needs_all_clusters(schedule: dict[str, Any], may_fail: bool) -> None:
    late = LateClusters(job(**schedule), may_fail=may_fail)
    assert not late.goes_on_without(1)
    assert late.late == frozenset()


def test_repeated_round_counts_its_recorded_clusters_as_left_out() -> None:
    late = LateClusters(job(min_clusters=1), [1], failed=[1], may_fail=True)
    assert late.failed == {1}
    assert late.goes_on_without(2) and late.late == {1, 2}
    assert not late.goes_on_without(0)


def test_wrong_answer_leaves_a_cluster_out_at_once_and_other_failures_the_fourth_time() -> None:
    assert FailingClusters().failed(1, WRONG)
    failing = FailingClusters()
    assert [failing.failed(1, LOST) for _ in range(5)] == [False] * 3 + [True] * 2
    assert not failing.failed(0, LOST), "another cluster has its own patience"


def test_cluster_that_fails_and_succeeds_in_turns_costs_few_attempts() -> None:
    failing, repeated = FailingClusters(), 0
    for index in range(1000):
        repeated += not failing.failed(1, LOST)
        failing.ended(1, index)
    assert repeated <= 103


def test_pause_doubles_up_to_a_limit_until_the_cluster_ends_a_round() -> None:
    failing = FailingClusters()
    tried, again = [], 0
    for index in range(150):
        if 1 not in failing.pausing(index):
            assert index == again
            tried.append(index)
            again = failing.left_out(1, index)
    assert tried == [0, 1, 3, 7, 15, 31, 63, 95, 127]
    failing.ended(1, 159)
    assert failing.pausing(160) == []
    assert failing.left_out(1, 160) == 161


def test_cluster_that_pauses_takes_part_in_earlier_rounds_that_are_repeated() -> None:
    failing = FailingClusters()
    failing.left_out(1, 20)
    again = failing.left_out(1, 21)
    assert again == 23
    failing.ended(1, 10)
    assert [index for index in range(30) if 1 in failing.pausing(index)] == [21, 22]


LAST = Commit(attempt=2, num_rounds=7)


def usable(last: Commit = LAST, *restarted: str, num_failures: int = 0) -> set[int]:
    """Returns the clusters whose results can be used when these hosts have restarted. Each has one device."""
    taking_part = hosts()
    for host in taking_part.by_id.values():
        host.incarnation = "another" if host.host_id in restarted else f"first {host.host_id}"
    results = {
        index: KeptResult(RoundPrepared(), Plan(), None, {name: f"first {name}"})  # type: ignore[arg-type]
        for index, name in enumerate(("device-0", "device-1"))
    }
    evaluations = Evaluations("classification", 3)
    all_kept = KeptResults((2, 7), "first edge-server", evaluations, results, num_failures)
    kept = all_kept.usable(last, taking_part)
    if kept is None:
        return set()
    assert kept.results and kept.num_failures == num_failures
    return set(kept.results)


def test_results_are_lost_with_the_processes_of_their_hosts_or_of_the_edge_server() -> None:
    assert usable() == {0, 1}
    assert usable(LAST, "device-0") == {1}
    assert usable(LAST, "device-0", "device-1") == set()
    assert usable(LAST, "edge-server") == set()


def test_results_are_given_up_after_other_clusters_have_failed_three_times_on_their_way() -> None:
    assert [bool(usable(num_failures=number)) for number in range(4)] == [True, True, True, False]


@pytest.mark.parametrize("last", [Commit(attempt=3, num_rounds=7), Commit(attempt=2, num_rounds=6)])
def test_results_of_another_round_are_not_used(last: Commit) -> None:
    assert usable(last) == set()


def test_rounds_are_repeated_alone_if_all_commits_since_the_restore_point_are_kept() -> None:
    last = Commit(num_rounds=7, restore_point=Commit(num_rounds=4))
    last.history.extend(Commit(num_rounds=number) for number in (6, 4))
    assert weights_since_restore_point(last) is None
    last.history.add(num_rounds=5)
    found = weights_since_restore_point(last)
    assert found is not None
    assert [commit.num_rounds for commit in found] == [5, 6, 7]
    last.restore_point.num_rounds = 7
    assert weights_since_restore_point(last) == []
