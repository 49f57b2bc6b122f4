"""Which results of clusters another attempt can use."""

import pytest

from collapipe.scheduler.evaluations import Evaluations
from collapipe.scheduler.kept_results import KeptResult, KeptResults, weights_since_restore_point
from collapipe.v1.control_unit_pb2 import RoundPrepared
from collapipe.v1.plan_pb2 import Commit, Plan

from .jobs import hosts

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
