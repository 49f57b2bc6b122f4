"""Which clusters of a round are late or fail, and which results count."""

from collections.abc import Sequence
from typing import Any

import pytest

from collapipe.errors import InvalidInputError
from collapipe.job import JobConfig
from collapipe.job_life.round_clusters import begin, end, fail, look, train
from collapipe.scheduler.attempt_facts import attempt_rules
from collapipe.v1.scheduler_pb2 import Host


def job(**schedule: Any) -> JobConfig:
    document = {"task": {"kind": "classification"}, "clusters": 3, "schedule": schedule}
    return JobConfig.from_dict(document, "JOB.toml")


DEADLINE = {"round_deadline_seconds": 10, "min_clusters": 2}


class Round:
    """The clusters of a round of a job with three clusters, and a time that a test sets."""

    def __init__(
        self,
        recorded: list[int] | None = None,
        *,
        failed: Sequence[int] = (),
        may_fail: bool = False,
        **schedule: Any,
    ) -> None:
        rules = attempt_rules(job(**schedule), Host(), attempt=0).clusters
        self.clusters = begin(rules, recorded, failed=failed, may_fail=may_fail)
        self.now = 100.0

    @property
    def late(self) -> frozenset[int]:
        return self.clusters.late

    def train(self) -> None:
        self.clusters = train(self.clusters, self.now)

    def ends(self, cluster: int) -> bool:
        self.clusters, counts = end(self.clusters, cluster)
        return counts

    def fails(self, cluster: int) -> bool:
        self.clusters, goes_on = fail(self.clusters, cluster)
        return goes_on

    def look(self) -> frozenset[int]:
        self.clusters = look(self.clusters, self.now)
        return self.clusters.to_end


def begun(recorded: list[int] | None = None, **schedule: Any) -> Round:
    late = Round(recorded, **schedule)
    late.train()
    return late


def test_clusters_that_have_not_ended_at_the_deadline_are_late() -> None:
    late = begun(**DEADLINE)
    late.now += 6
    late.train()  # The deadline counts from the first cluster.
    assert late.ends(0) and late.ends(2)
    late.now += 3.9
    assert late.look() == frozenset()
    late.now += 0.2
    assert late.look() == late.late == {1}
    assert not late.ends(1), "a result that comes later counts"
    assert late.look() == {1}


def test_clusters_that_end_early_count() -> None:
    late = begun(**DEADLINE, late_clusters="end_early")
    assert late.ends(0) and late.ends(2)
    late.now += 10.1
    assert late.look() == {1}
    assert late.late == frozenset()
    assert late.ends(1)
    assert late.look() == frozenset(), "it has ended"


def test_deadline_waits_until_enough_clusters_have_ended() -> None:
    late = begun(**DEADLINE)
    late.now += 1000
    for cluster in (1, 0):
        assert late.look() == frozenset()
        assert late.ends(cluster)
    assert late.look() == {2}


def test_deadline_does_not_count_before_the_training() -> None:
    late = Round(**DEADLINE)
    late.now += 1000
    assert late.ends(0) and late.ends(1)
    assert late.look() == frozenset()


@pytest.mark.parametrize(
    "schedule",
    [
        {},
        {"min_clusters": 1},
        {"round_deadline_seconds": 10},
        {"round_deadline_seconds": 10, "min_clusters": 3},
    ],
)
def test_nobody_is_late_if_all_clusters_are_needed(schedule: dict[str, Any]) -> None:
    late = begun(**schedule)
    assert late.ends(0) and late.ends(1)
    late.now += 1000
    assert late.look() == frozenset()


@pytest.mark.parametrize("recorded", [[], [1]])
@pytest.mark.parametrize("rule", ["leave_out", "end_early"])
def test_repeated_round_has_the_recorded_late_clusters_whatever_the_rule_is_now(
    recorded: list[int], rule: str
) -> None:
    late = begun(recorded, **DEADLINE, late_clusters=rule)
    assert late.ends(2)
    late.now += 1000
    assert late.ends(0)
    assert late.look() == frozenset()
    assert late.late == set(recorded)
    assert late.ends(1) == (not recorded)


def test_more_clusters_than_the_job_has_are_refused() -> None:
    with pytest.raises(InvalidInputError, match="min_clusters is 4, .* 3"):
        job(min_clusters=4)


def test_round_goes_on_without_clusters_that_fail_if_enough_are_left() -> None:
    late = Round(may_fail=True, min_clusters=2)
    assert late.fails(1)
    assert late.late == late.clusters.failed == {1}
    assert not late.fails(0), "one cluster is not enough"
    assert late.ends(0) and late.ends(2) and not late.ends(1)


@pytest.mark.parametrize(
    ("schedule", "may_fail"),
    [
        ({}, True),
        ({"min_clusters": 2, "late_clusters": "end_early"}, True),
        ({"min_clusters": 2}, False),
    ],
)
def test_round_needs_all_clusters(schedule: dict[str, Any], may_fail: bool) -> None:
    late = Round(may_fail=may_fail, **schedule)
    assert not late.fails(1)
    assert late.late == frozenset()


def test_repeated_round_counts_its_recorded_clusters_as_left_out() -> None:
    late = Round([1], failed=[1], may_fail=True, min_clusters=1)
    assert late.clusters.failed == {1}
    assert late.fails(2) and late.late == {1, 2}
    assert not late.fails(0)
