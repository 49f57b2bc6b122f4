"""Local changes of plans, and the rough shares with which they are compared."""

import itertools
from collections.abc import Sequence
from dataclasses import replace

import pytest
from benchmarks.joint_optimality import make_shared_round
from hypothesis import assume, given

from collapipe.allocation import RoundPlan, RoundProblem, decide_round, predict, violations
from collapipe.allocation.search.assumed_links import (
    links_at_equal_shares,
    with_assumed_links,
)
from collapipe.allocation.search.link_tables import AssumedLinks
from collapipe.allocation.search.local_changes import local_changes
from collapipe.allocation.search.power import allocate, with_rough_shares
from collapipe.allocation.search.segments import place_segments
from collapipe.errors import InfeasibleError

from .rounds import Round, rounds


def plans_of(problem: RoundProblem, assumed: Sequence[AssumedLinks]) -> RoundPlan:
    try:
        return place_segments(problem, assumed)
    except InfeasibleError:
        assume(False)
        raise


@given(rounds(clusters=(1, 2), devices=(1, 4), blocks_on_control_unit=True))
def test_every_change_is_a_pipeline_of_linked_hosts_that_runs_each_unit_once(drawn: Round) -> None:
    problem, assumed = drawn
    plans = plans_of(problem, assumed)
    last = len(plans) - 1
    for changed in local_changes(problem, plans, [last]):
        assert changed[:last] == plans[:last]
        assert changed[last] != plans[last]
        cluster, plan = problem.clusters[last], changed[last]
        units = [unit for s in plan.stages for unit in range(s.start_unit, s.stop_unit)]
        assert units == list(range(problem.model.num_blocks + 2))
        names = [stage.host_id for stage in plan.stages]
        assert (names[0], names[-1]) == (cluster.control_unit.host_id, "edge")
        assert len({*names}) == len(names) == len(plan.links) + 1
        pairs = set(itertools.pairwise(names)) | set(itertools.pairwise(names[::-1]))
        assert pairs <= cluster.links.keys()
        assert not any("recomputes" in broken for broken in violations(problem, changed))


def test_stage_that_changes_may_also_recompute() -> None:
    problem = replace(make_shared_round(0), recompute_options=(False, True))
    plans = plans_of(problem, links_at_equal_shares(problem))
    assert not any(stage.recompute for stage in plans[0].stages)  # There is enough memory.
    changes = [one[0].stages for one in local_changes(problem, plans, [0])]
    moved = {stage for stages in changes for stage in stages[1:-1]} - {*plans[0].stages}
    assert moved
    assert {replace(stage, recompute=not stage.recompute) for stage in moved} == moved


@pytest.mark.parametrize("radio", [False, True])
def test_rough_shares_fill_the_channel_and_are_nearly_the_best(radio: bool) -> None:
    for seed in (3, 4, 6, 7):
        problem = make_shared_round(seed, radio=radio)
        plans = decide_round(problem, "dssra", hysteresis=0.0).plans
        equal = with_assumed_links(problem, links_at_equal_shares(problem), plans)
        rough = with_rough_shares(problem, equal)
        (total,) = problem.channels.values()
        assert sum(link.share for plan in rough for link in plan.links) == pytest.approx(total)
        best = allocate(problem, plans).prediction.objective
        found = predict(problem, rough).objective

        assert best * (1 - 1e-3) <= found <= 1.1 * best


@given(rounds(clusters=(1, 1), devices=(2, 4)))
def test_assumed_links_keep_the_limit_of_each_sender(drawn: Round) -> None:
    problem, assumed = drawn
    plans = plans_of(problem, assumed)
    (cluster,) = problem.clusters
    loud = [dict(assumed[0])]
    for pair, link in assumed[0].items():
        loud[0][pair] = replace(link, forward_watts=20 * link.forward_watts)
    (plan,) = with_assumed_links(problem, loud, plans)
    forward = [*(link.forward_watts for link in plan.links), 0.0]
    backward = [0.0, *(link.backward_watts for link in plan.links)]
    for stage, ahead, back in zip(plan.stages, forward, backward, strict=True):
        assert ahead + back <= cluster.hosts[stage.host_id].max_transmit_watts * (1 + 1e-9)
