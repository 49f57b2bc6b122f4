"""Which clusters of a round are late."""

from dataclasses import dataclass
from typing import Any

import pytest

from collapipe.errors import InvalidInputError
from collapipe.job import JobConfig
from collapipe.scheduler.late_clusters import LateClusters


@dataclass
class Clock:
    now: float = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def job(**schedule: Any) -> JobConfig:
    document = {"task": {"kind": "classification"}, "clusters": 3, "schedule": schedule}
    return JobConfig.from_dict(document, "JOB.toml")


DEADLINE = job(round_deadline_seconds=10, min_clusters=2)


def test_clusters_that_have_not_ended_at_the_deadline_are_late(clock: Clock) -> None:
    late = LateClusters(DEADLINE, clock=clock)
    late.training_began()
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
    late = LateClusters(
        job(round_deadline_seconds=10, min_clusters=2, late_clusters="end_early"), clock=clock
    )
    late.training_began()
    assert late.ended(0) and late.ended(2)
    clock.now += 10.1
    assert late.decide() == {1}
    assert late.late == frozenset()
    assert late.ended(1)
    assert late.decide() == frozenset(), "it has ended"


def test_deadline_waits_until_enough_clusters_have_ended(clock: Clock) -> None:
    late = LateClusters(DEADLINE, clock=clock)
    late.training_began()
    clock.now += 1000
    assert late.decide() == frozenset()
    assert late.ended(1)
    assert late.decide() == frozenset()
    assert late.ended(0)
    assert late.decide() == {2}


def test_deadline_does_not_count_before_the_training(clock: Clock) -> None:
    late = LateClusters(DEADLINE, clock=clock)
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
def test_nobody_is_late_without_a_deadline_or_if_all_clusters_are_needed(
    clock: Clock, schedule: dict[str, Any]
) -> None:
    late = LateClusters(job(**schedule), clock=clock)
    late.training_began()
    assert late.ended(0) and late.ended(1)
    clock.now += 1000
    assert late.decide() == frozenset()


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


@pytest.mark.parametrize("recorded", [[], [1]])
@pytest.mark.parametrize("rule", ["leave_out", "end_early"])
def test_repeated_round_has_the_recorded_late_clusters_whatever_the_rule_is_now(
    clock: Clock, recorded: list[int], rule: str
) -> None:
    now = job(round_deadline_seconds=10, min_clusters=2, late_clusters=rule)
    late = LateClusters(now, recorded, clock)
    late.training_began()
    assert late.ended(2)
    clock.now += 1000
    assert late.ended(0)
    assert late.decide() == frozenset()
    assert late.late == set(recorded)
    assert late.ended(1) == (not recorded)


def test_more_clusters_than_the_job_has_are_refused() -> None:
    with pytest.raises(InvalidInputError, match="min_clusters is 4, but the job has 3 clusters"):
        job(min_clusters=4)
