from dataclasses import replace

import cvxpy as cp
import numpy as np
import pytest

from collapipe.allocation import RoundPlan, predict, violations
from collapipe.allocation.round_model.uploads import with_soonest_uploads
from collapipe.allocation.search import bandwidth
from collapipe.allocation.search.bandwidth import SolverFailedError
from collapipe.allocation.search.power import allocate
from collapipe.allocation.search.shared_links import shared_links

from .changes import with_cluster, with_links
from .grids import (
    direct_problem,
    least_deadline,
    objectives,
    random_problem,
    share_at_given_powers,
    some_plan,
)


def _shares(plans: RoundPlan) -> list[float]:
    return [link.share for plan in plans for link in plan.links]


@pytest.mark.parametrize("wired", [False, True])
def test_allocate_agrees_with_bisection_on_the_deadline(wired: bool) -> None:
    worst = 0.0
    for seed in range(4):
        problem, plans = direct_problem(seed, num_clusters=1 + seed % 4, wired=wired)
        found = allocate(problem, plans)  # No energy counts in this problem, so powers are full.
        expected = least_deadline(problem, plans)
        worst = max(worst, abs(found.prediction.round_seconds / expected - 1))
        assert violations(problem, found.plans) == []
    print(f"largest relative difference {worst:.1e}")
    assert worst < 1e-6


@pytest.mark.parametrize("wired", [False, True])
def test_shares_of_any_plan_are_not_improved_by_other_shares(wired: bool) -> None:
    rng = np.random.default_rng(1)
    for seed in range(9):
        problem = random_problem(seed, 1 + seed % 3, 3, wired=wired)
        plans = some_plan(problem, seed, narrow=True)
        found = share_at_given_powers(problem, plans)
        shares = np.array(_shares(found.plans))
        near = shares * np.exp(
            rng.normal(0, rng.choice([1e-3, 0.03, 0.3], (400, 1)), (400, len(shares)))
        )
        near *= problem.channels["air"] / near.sum(axis=1, keepdims=True)
        watts = [
            (np.full(400, link.forward_watts), np.full(400, link.backward_watts))
            for plan in plans
            for link in plan.links
        ]
        values = objectives(problem, plans, near, watts)
        assert values.min() >= found.prediction.objective * (1 - 1e-6)
        assert sum(_shares(found.plans)) == pytest.approx(problem.channels["air"])


def test_shares_of_two_channels_fill_each() -> None:
    problem = with_cluster(random_problem(3, num_clusters=2), 1, channel="other")
    problem = replace(problem, channels={"air": 2e7, "other": 5e6})
    found = share_at_given_powers(problem, some_plan(problem, 0)).plans
    assert sum(link.share for link in found[0].links) == pytest.approx(2e7)
    assert sum(link.share for link in found[1].links) == pytest.approx(5e6)


def test_price_of_a_channel_is_what_more_of_it_saves() -> None:
    problem = random_problem(7, num_clusters=2)
    plans = some_plan(problem, 3)
    found = share_at_given_powers(problem, plans)
    more = replace(problem, channels={"air": 2e7 * 1.001})
    saved = found.prediction.objective - share_at_given_powers(more, plans).prediction.objective
    assert found.prices is not None
    assert found.prices.channels["air"] * 2e4 == pytest.approx(saved, rel=0.01)


@pytest.mark.parametrize("update_per_micro_batch", [False, True])
@pytest.mark.parametrize("wired", [False, True])
def test_round_delay_agrees_with_predict(wired: bool, update_per_micro_batch: bool) -> None:
    rng = np.random.default_rng(0)
    for seed in range(10):
        problem = replace(
            random_problem(seed, 2, 3, wired=wired, state_bps=1e8),
            update_per_micro_batch=update_per_micro_batch,
            fixed_seconds=0.5,
        )
        plans = with_links(some_plan(problem, seed, narrow=True), share=2e6)
        problem = with_cluster(problem, previous=some_plan(problem, seed + 1)[0])
        problem = with_cluster(problem, 1, channel=None)
        plans = tuple(
            replace(plan, links=(replace(plan.links[0], codec="int8"), *plan.links[1:]))
            for plan in plans
        )
        plans = with_soonest_uploads(problem, plans)
        assert wired == (not plans[0].uploads)
        links = shared_links(problem, plans)
        assert links is not None
        shares = links.totals[links.channel] * rng.uniform(0.01, 0.2, len(links.positions))
        watts = links.limit_watts * rng.uniform(0.1, 1, len(links.limit_watts))
        some = [plans[n].uploads[k] for n, k in links.uploads.positions]
        parts = rng.uniform(0.1, 1, (2, len(some)))
        point = links.point(
            shares,
            watts,
            parts[0] * np.array([upload.share for upload in some]),
            parts[1] * np.array([upload.watts for upload in some]),
        )
        predicted = predict(problem, links.applied(plans, point))
        rounds = links.round_seconds(point)
        np.testing.assert_allclose(rounds, [one.round_seconds for one in predicted.clusters])


def test_problem_of_one_shape_is_built_once() -> None:
    bandwidth._program.cache_clear()
    for seed in range(5):
        problem = random_problem(seed)
        share_at_given_powers(problem, some_plan(problem, 4))
    assert bandwidth._program.cache_info().misses == 1


@pytest.mark.parametrize("capped", [False, True])
def test_problem_follows_the_rules_for_parameters_so_that_a_resolve_is_fast(capped: bool) -> None:
    shape = bandwidth._Shape(
        2, 5, 6, 1, num_given=4, num_free=4, num_wires=2, num_uploads=3, capped=capped
    )
    program = bandwidth._Program(shape)
    assert program._problem.is_dcp(dpp=True)


def test_shares_with_a_solver_that_raises_say_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: object, **kwargs: object) -> None:
        raise cp.SolverError("out of luck")

    monkeypatch.setattr(cp.Problem, "solve", fail)
    problem = random_problem(0)
    with pytest.raises(SolverFailedError, match="CLARABEL .*out of luck"):
        share_at_given_powers(problem, some_plan(problem, 0))
