import math
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest

from collapipe.allocation import RadioLink, RoundPlan, decide_round, violations
from collapipe.allocation.search.power import allocate, best_watts

from .changes import with_cluster, with_devices, with_links
from .grids import best_on_grid, random_problem, share_at_given_powers, some_plan


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


@pytest.mark.parametrize("most_bits_per_hertz", [math.inf, 6.0])
def test_allocate_is_as_good_as_a_fine_joint_grid(most_bits_per_hertz: float) -> None:
    gaps = []
    for seed in range(6):
        num_clusters = 1 + seed % 2
        limits = {"backlog": 100.0, "most_bits_per_hertz": most_bits_per_hertz}
        problem = random_problem(seed, num_clusters, 3 - num_clusters, **limits)
        plans = some_plan(problem, seed, narrow=seed % 3 == 0)
        found = allocate(problem, plans)
        assert violations(problem, found.plans) == []
        gaps.append(found.prediction.objective / best_on_grid(problem, plans) - 1)
    print(f"gap to the grid: mean {np.mean(gaps):.2%}, worst {max(gaps):.2%}, best {min(gaps):.2%}")
    assert max(gaps) < 0.003
    assert min(gaps) > -0.03  # A larger gap would mean that the grid is too coarse.


def _device_watts(plans: RoundPlan, cluster: int = 0) -> float:
    links = plans[cluster].links
    forward = sum(link.forward_watts for link in links[1:])
    return forward + sum(link.backward_watts for link in links[:-1])


def test_allocate_without_backlog_divides_all_power_between_the_links_of_a_sender() -> None:
    problem = with_devices(random_problem(1), backlog=0.0)
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
    problem = with_devices(random_problem(1, num_devices=1), backlog=0.0)
    links = dict.fromkeys(problem.clusters[0].links, RadioLink(1e-9, 4e-20))
    links["device-0-0", "edge"] = RadioLink(1e-11, 4e-20)
    problem = with_cluster(problem, links=links)
    plans = some_plan(problem, 20)
    found = allocate(problem, plans)
    first, second = found.plans[0].links
    assert second.forward_watts > 1.2 * first.backward_watts
    at_halves = share_at_given_powers(problem, with_links(plans, share=1e7))
    assert found.prediction.objective < at_halves.prediction.objective


def test_powers_of_a_sender_beyond_its_limit_together_are_a_violation() -> None:
    problem = random_problem(1, num_devices=1)
    (plan,) = allocate(problem, some_plan(problem, 20)).plans
    limit = problem.clusters[0].devices[0].max_transmit_watts
    first, second = plan.links
    links = (replace(first, backward_watts=0.6 * limit), replace(second, forward_watts=0.6 * limit))
    (text,) = violations(problem, (replace(plan, links=links),))
    assert "device-0-0" in text and f"{0.6 * limit:g}" in text and f"{limit:g}" in text


def test_allocate_slows_a_cluster_with_backlog_until_it_is_as_slow_as_the_slowest() -> None:
    problem = random_problem(4, 2, 1)
    problem = with_devices(problem, "device-0", backlog=0.0, seconds_per_sample=0.2)
    problem = with_devices(problem, "device-1", backlog=5.0)
    plans = some_plan(problem, 0)
    full = share_at_given_powers(problem, plans)
    found = allocate(problem, plans)
    assert found.prediction.round_seconds == pytest.approx(full.prediction.round_seconds, rel=1e-2)
    # Less power means less energy for each bit, so the power falls until this cluster is the slowest one.
    rounds = [one.round_seconds for one in found.prediction.clusters]
    assert rounds[1] == pytest.approx(rounds[0], rel=1e-2)
    assert _device_watts(found.plans, 1) < _device_watts(full.plans, 1) / 10


def test_allocate_gives_links_without_a_channel_full_power_and_no_share() -> None:
    problem = with_cluster(random_problem(2, backlog=100.0), channel=None)
    plans = some_plan(problem, 5)
    found = allocate(problem, with_links(plans, forward_watts=0.0, share=3.0))
    assert found.prices is None
    assert found.plans == with_links(plans, share=math.inf)
