"""Which results of a failed attempt another attempt can use."""

import pytest

from collapipe.scheduler.evaluations import Evaluations
from collapipe.scheduler.host_registry import JobHosts
from collapipe.scheduler.kept_results import (
    KeptResult,
    KeptResults,
    weights_since_restore_point,
)
from collapipe.v1.control_unit_pb2 import RoundPrepared
from collapipe.v1.plan_pb2 import Commit, Plan

from .jobs import hosts

LAST = Commit(attempt=2, num_rounds=7)


def present() -> JobHosts:
    taking_part = hosts()
    for host in taking_part.by_id.values():
        host.incarnation = f"process of {host.host_id}"
    return taking_part


def kept() -> KeptResults:
    def result(host_id: str) -> KeptResult:
        incarnations = {host_id: f"process of {host_id}"}
        return KeptResult(RoundPrepared(), Plan(), None, incarnations)  # type: ignore[arg-type]

    results = {0: result("device-0"), 1: result("device-1")}
    return KeptResults((2, 7), "process of edge-server", Evaluations("classification", 3), results)


def test_results_of_hosts_that_are_still_there_are_used() -> None:
    usable = kept().usable(LAST, present())
    assert usable is not None
    assert usable.results.keys() == {0, 1}


def test_result_of_a_restarted_host_is_lost() -> None:
    taking_part = present()
    taking_part.by_id["device-0"].incarnation = "another"
    usable = kept().usable(LAST, taking_part)
    assert usable is not None
    assert usable.results.keys() == {1}
    taking_part.by_id["device-1"].incarnation = "another"
    assert kept().usable(LAST, taking_part) is None


@pytest.mark.parametrize("last", [Commit(attempt=3, num_rounds=7), Commit(attempt=2, num_rounds=6)])
def test_results_of_another_round_are_not_used(last: Commit) -> None:
    assert kept().usable(last, present()) is None


def test_results_are_lost_with_the_process_of_the_edge_server() -> None:
    taking_part = present()
    taking_part.edge_server.incarnation = "another"
    assert kept().usable(LAST, taking_part) is None


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
