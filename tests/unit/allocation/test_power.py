import math
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest

from collapipe.allocation.round_model.limits import violations
from collapipe.allocation.round_model.problem import RadioLink, RoundPlan, RoundProblem
from collapipe.allocation.search.power import allocate, best_watts
from collapipe.allocation.strategies.decide import decide_round

from .grids import best_on_grid, random_problem, some_plan
from .shares import share_at_given_powers

# --- one transmitter, in closed form


def test_best_watts_are_the_best_of_a_fine_grid() -> None:
    rng = np.random.default_rng(0)
    powers = np.geomspace(1e-9, 1e3, 200_001)
    for _ in range(50):
        time_weight, joule_weight, gain = 10 ** rng.uniform(-3, 3, 3)
        costs = (time_weight + joule_weight * powers) / np.log2(1 + gain * powers)
        (found,) = best_watts(*(np.array([x]) for x in (time_weight, joule_weight, gain, 1e3)))
        cost = (time_weight + joule_weight * found) / np.log2(1 + gain * found)
        assert cost <= costs.min() * (1 + 1e-9)


@pytest.mark.parametrize(
    ("time_weight", "joule_weight", "expected"),
    [(1.0, 0.0, 0.5), (0.0, 0.0, 0.5), (1e12, 1.0, 0.5), (0.0, 1.0, 0.0)],
    ids=["energy is free", "nothing counts", "only time counts", "only energy counts"],
)
def test_best_watts_at_the_limits(time_weight: float, joule_weight: float, expected: float) -> None:
    found = best_watts(*(np.array([x]) for x in (time_weight, joule_weight, 10.0, 0.5)))
    assert found[0] == pytest.approx(expected, abs=1e-6)


# --- shares and powers together


@pytest.mark.parametrize("most_bits_per_hertz", [math.inf, 6.0])
def test_allocate_is_as_good_as_a_fine_joint_grid(most_bits_per_hertz: float) -> None:
    gaps = []
    for seed in range(16):
        num_clusters = 1 + seed % 2
        problem = random_problem(
            seed,
            num_clusters,
            2 if num_clusters == 1 else 1,
            backlog=100.0,
            most_bits_per_hertz=most_bits_per_hertz,
        )
        plans = some_plan(problem, seed, narrow=seed % 3 == 0)
        found = allocate(problem, plans)
        assert violations(problem, found.plans) == []
        gaps.append(found.prediction.objective / best_on_grid(problem, plans) - 1)
    print(f"gap to the grid: mean {np.mean(gaps):.2%}, worst {max(gaps):.2%}, best {min(gaps):.2%}")
    assert max(gaps) < 0.003
    assert min(gaps) > -0.03  # A larger gap would mean that the grid is too coarse.


def test_allocate_is_never_worse_than_shares_at_full_power() -> None:
    for seed in range(20):
        problem = random_problem(seed, 1 + seed % 3, 3, backlog=50.0)
        plans = some_plan(problem, seed)
        at_full_power = share_at_given_powers(problem, plans).prediction.objective
        assert allocate(problem, plans).prediction.objective <= at_full_power * (1 + 1e-3)


def _with_backlog(problem: RoundProblem, cluster: int, backlog: float) -> RoundProblem:
    clusters = list(problem.clusters)
    clusters[cluster] = replace(
        clusters[cluster],
        devices=tuple(replace(one, backlog=backlog) for one in clusters[cluster].devices),
    )
    return replace(problem, clusters=tuple(clusters))


def _device_watts(plans: RoundPlan, cluster: int) -> float:
    links = plans[cluster].links
    return sum(link.forward_watts for link in links[1:]) + sum(
        link.backward_watts for link in links[:-1]
    )


def test_allocate_lowers_the_power_of_devices_with_backlog() -> None:
    problem = random_problem(1)
    plans = some_plan(problem, 20)
    watts = [
        _device_watts(allocate(_with_backlog(problem, 0, backlog), plans).plans, 0)
        for backlog in (0.0, 3e3, 3e4, 3e5)
    ]
    assert watts[0] > watts[1] > watts[2] > watts[3] > 0


def test_allocate_without_backlog_divides_all_power_between_the_links_of_a_sender() -> None:
    problem = _with_backlog(random_problem(1), 0, 0.0)
    (plan,) = allocate(problem, some_plan(problem, 20)).plans
    hosts = problem.clusters[0].hosts
    forward = [*(link.forward_watts for link in plan.links), 0.0]
    backward = [0.0, *(link.backward_watts for link in plan.links)]
    for stage, *watts in zip(plan.stages, forward, backward, strict=True):
        assert sum(watts) == pytest.approx(hosts[stage.host_id].max_transmit_watts)


def test_no_link_has_more_power_than_the_highest_modulation_needs() -> None:
    problem = random_problem(2, backlog=0.0, most_bits_per_hertz=4.0, options=(4,))
    plans = [
        allocate(problem, some_plan(problem, 20)).plans,
        decide_round(problem, "pipeline").plans,
    ]
    for (plan,) in plans:
        for (one, other), link in zip(pairwise(plan.stages), plan.links, strict=True):
            there = problem.clusters[0].links[one.host_id, other.host_id]
            back = problem.clusters[0].links[other.host_id, one.host_id]
            for radio, watts in ((there, link.forward_watts), (back, link.backward_watts)):
                rate = radio.rate_bps(link.share, watts)
                assert radio.rate_bps(link.share, 2 * watts) == pytest.approx(rate)
                assert radio.rate_bps(link.share, 0.9 * watts) < rate


def test_allocate_gives_more_power_to_the_worse_of_two_links() -> None:
    problem = _with_backlog(random_problem(1, num_devices=1), 0, 0.0)
    cluster, plans = problem.clusters[0], some_plan(problem, 20)
    links = {pair: RadioLink(1e-9, 4e-20) for pair in cluster.links}
    links["device-0-0", "edge"] = RadioLink(1e-11, 4e-20)
    problem = replace(problem, clusters=(replace(cluster, links=links),))
    found = allocate(problem, plans)
    first, second = found.plans[0].links
    assert second.forward_watts > 1.2 * first.backward_watts
    halves = replace(plans[0], links=tuple(replace(link, share=1e7) for link in plans[0].links))
    at_halves = share_at_given_powers(problem, (halves,)).prediction.objective
    assert found.prediction.objective < at_halves


def test_powers_of_a_sender_beyond_its_limit_together_are_a_violation() -> None:
    problem = random_problem(1, num_devices=1)
    (plan,) = allocate(problem, some_plan(problem, 20)).plans
    limit = problem.clusters[0].devices[0].max_transmit_watts
    first, second = plan.links
    links = (replace(first, backward_watts=0.6 * limit), replace(second, forward_watts=0.6 * limit))
    (text,) = violations(problem, (replace(plan, links=links),))
    assert text.startswith("device-0-0 transmits with ")


def test_allocate_slows_a_cluster_with_backlog_until_it_is_as_slow_as_the_slowest() -> None:
    problem = _with_backlog(_with_backlog(random_problem(4, 2, 1), 0, 0.0), 1, 5.0)
    slow = tuple(replace(one, seconds_per_sample=0.2) for one in problem.clusters[0].devices)
    problem = replace(
        problem, clusters=(replace(problem.clusters[0], devices=slow), problem.clusters[1])
    )
    plans = some_plan(problem, 0)
    full = share_at_given_powers(problem, plans)
    found = allocate(problem, plans)
    assert found.prediction.round_seconds == pytest.approx(full.prediction.round_seconds, rel=1e-2)
    # Less power means less energy for each bit, so the power falls until this cluster is the slowest one.
    rounds = [one.round_seconds for one in found.prediction.clusters]
    assert rounds[1] == pytest.approx(rounds[0], rel=1e-2)
    assert _device_watts(found.plans, 1) < _device_watts(full.plans, 1) / 10


def test_allocate_gives_links_without_a_channel_full_power_and_no_share() -> None:
    problem = random_problem(2, backlog=100.0)
    problem = replace(problem, clusters=(replace(problem.clusters[0], channel=None),))
    plans = some_plan(problem, 5)
    silent = tuple(
        replace(
            plan, links=tuple(replace(link, forward_watts=0.0, share=3.0) for link in plan.links)
        )
        for plan in plans
    )
    found = allocate(problem, silent)
    assert found.prices is None
    (plan,) = found.plans
    assert [link.forward_watts for link in plan.links] == [
        link.forward_watts for link in plans[0].links
    ]
    assert {link.share for link in plan.links} == {float("inf")}
