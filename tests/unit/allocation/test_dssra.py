import itertools
import math
import re
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from collapipe.allocation import (
    Host,
    RadioLink,
    RoundPlan,
    RoundProblem,
    WiredLink,
    predict,
    violations,
)
from collapipe.allocation.round_model.weights_transfer import migrate_seconds
from collapipe.allocation.search import dssra
from collapipe.allocation.search.bandwidth import SolverFailedError
from collapipe.allocation.search.dssra import decide
from collapipe.allocation.search.power import allocate
from collapipe.errors import InfeasibleError

from .changes import with_cluster, with_devices, with_links
from .grids import every_plan, noisy, random_problem


def _largest(problem: RoundProblem, plans: RoundPlan, cluster: int = 0) -> Host:
    """Returns the device with most blocks."""
    segments = plans[cluster].segments
    name = max(segments, key=lambda host_id: segments[host_id].num_blocks)
    return problem.clusters[cluster].hosts[name]


def _part(host: Host) -> float:
    """Returns the full power for one link; a device has two."""
    return host.max_transmit_watts / (2 if host.host_id.startswith("device") else 1)


def _placement(plans: RoundPlan) -> list[list[tuple[str, int, int]]]:
    return [
        [(stage.host_id, stage.start_unit, stage.stop_unit) for stage in plan.stages]
        for plan in plans
    ]


def _plans_for_other_speeds() -> RoundPlan:
    """Returns plans that are feasible in random_problem(1, 2, 2), but best for very different speeds."""
    return decide(noisy(random_problem(1, 2, 2), np.random.default_rng(3), 0.9), None).plans


def _on_wires_of_their_own(seed: int, backlog: float) -> RoundProblem:
    problem = random_problem(seed, num_devices=3, wired=True, options=(2, 4), backlog=backlog)
    return with_cluster(replace(problem, channels={}), channel=None)


def _cut(problem: RoundProblem, plans: RoundPlan) -> RoundProblem:
    """Returns the problem with a rate of 0 for the first link of the first plan."""
    pair = (plans[0].stages[0].host_id, plans[0].stages[1].host_id)
    return with_cluster(problem, links={**problem.clusters[0].links, pair: WiredLink(0.0, 0.002)})


Settled = tuple[RoundProblem, RoundPlan]


@pytest.fixture(scope="module")
def settled() -> Settled:
    """A problem with one cluster, and the plans that were decided for it."""
    problem = random_problem(1, 1, 3, num_blocks=12, options=(2, 4, 8), state_bps=1e9)
    return problem, decide(problem, None).plans


# --- idle energy


@pytest.mark.parametrize("seed", range(3))
def test_decision_with_idle_power_is_the_best_of_all(seed: int) -> None:
    problem = _on_wires_of_their_own(seed, backlog=30.0)
    hosts = problem.clusters[0].hosts
    idle = {device.host_id: 3.0 * k for k, device in enumerate(problem.clusters[0].devices)}
    paying = problem
    for host_id, watts in idle.items():
        paying = with_devices(paying, host_id, idle_watts=watts)

    def objective(plans: RoundPlan) -> float:
        free = predict(problem, plans)
        prices = [hosts[name].joule_weight * watts for name, watts in idle.items()]
        return free.objective + sum(prices) * free.round_seconds

    best = min(objective(with_links(plans, share=math.inf)) for plans in every_plan(problem))
    decision = decide(paying, None)
    assert decision.prediction.objective == pytest.approx(best, rel=1e-9)
    assert decision.prediction.objective == pytest.approx(objective(decision.plans), rel=1e-9)
    # A device without a block draws its idle power, too.
    energy, free = decision.prediction.energy_joules, predict(problem, decision.plans)
    for host_id, watts in idle.items():
        more = energy.get(host_id, 0.0) - free.energy_joules.get(host_id, 0.0)
        assert more == pytest.approx(watts * free.round_seconds)


# --- optimality


@pytest.mark.parametrize("seed", range(6))
def test_decide_is_near_the_best_allocation_of_every_plan(seed: int) -> None:
    num_clusters = 1 + seed % 2
    problem = random_problem(seed, num_clusters, 3 - num_clusters, options=(2, 4), backlog=60.0)
    decision = decide(problem, None)
    assert violations(problem, decision.plans) == []
    best = min(allocate(problem, plans).prediction.objective for plans in every_plan(problem))
    assert decision.prediction.objective <= 1.02 * best


def test_decide_with_current_plans_finds_what_it_finds_without() -> None:
    for seed in range(2):
        problem = random_problem(seed, 2, 2, num_blocks=3)
        problem = replace(problem, model=replace(problem.model, block_state_bytes=0.0))
        other = decide(random_problem(seed + 100, 2, 2, num_blocks=3), None).plans
        cold = decide(problem, None).prediction.objective
        warm = decide(problem, other, hysteresis=0.0).prediction.objective
        assert warm == pytest.approx(cold, rel=0.01)


def test_decide_without_channels_gives_every_link_all_it_can_have() -> None:
    problem = random_problem(3, 2, 2)
    for n in (0, 1):
        problem = with_cluster(problem, n, channel=None)
    decision = decide(problem, None)
    for cluster, plan in zip(problem.clusters, decision.plans, strict=True):
        for link, (one, other) in zip(plan.links, itertools.pairwise(plan.stages), strict=True):
            assert link.share == float("inf")
            assert link.forward_watts == _part(cluster.hosts[one.host_id])
            assert link.backward_watts == _part(cluster.hosts[other.host_id])


def test_decide_on_wires_shares_what_the_channel_has_and_sends_with_no_power() -> None:
    problem = random_problem(3, 2, 2, wired=True)
    links = [link for plan in decide(problem, None).plans for link in plan.links]
    assert sum(link.share for link in links) == pytest.approx(problem.channels["air"])
    assert {link.forward_watts for link in links} == {0.0}


def test_decide_uses_only_links_that_exist() -> None:
    problem = random_problem(3, 1, 2)
    missing = [{"control-0", "device-0-1"}, {"device-0-0", "edge"}]
    links = {
        pair: link for pair, link in problem.clusters[0].links.items() if {*pair} not in missing
    }
    problem = with_cluster(problem, links=links)
    plans = decide(problem, None).plans
    assert violations(problem, plans) == []
    assert list(plans[0].segments) == ["device-0-0", "device-0-1"]


def test_decide_with_a_larger_penalty_weight_is_faster_and_spends_more() -> None:
    problem = with_devices(random_problem(6, 1, 3, num_blocks=6, backlog=60.0), backlog=20.0)
    seconds, drift = [], []
    for weight in (1.0, 10.0, 100.0, 1000.0):
        found = decide(replace(problem, penalty_weight=weight), None).prediction
        seconds.append(found.round_seconds)
        drift.append(found.drift)
    assert seconds == sorted(seconds, reverse=True)
    assert drift == sorted(drift)
    assert seconds[-1] < 0.9 * seconds[0]


# --- the current plans


def test_decide_keeps_placement_and_links_under_noise() -> None:
    problem = random_problem(1, 1, 3, num_blocks=12, options=(2, 4, 8), state_bps=1e8)
    current = decide(problem, None).plans
    rng, moves, changes = np.random.default_rng(0), 0, 0
    for _ in range(20):
        plans = decide(noisy(problem, rng, 0.1), current).plans
        moves += _placement(plans) != _placement(current)
        changes += plans != current
        current = plans
    assert moves <= 1
    assert changes <= 5


def test_decide_moves_blocks_when_a_device_slows_to_a_quarter_and_back(settled: Settled) -> None:
    problem, current = settled
    busy = _largest(problem, current)
    slowed = with_devices(problem, busy.host_id, seconds_per_sample=4 * busy.seconds_per_sample)
    after = decide(slowed, current)
    assert after.kept == ""
    assert after.plans[0].segments.get(busy.host_id, None) != current[0].segments[busy.host_id]
    oracle = decide(slowed, None).prediction
    assert after.prediction.round_seconds <= 1.15 * oracle.round_seconds
    assert _placement(decide(problem, after.plans).plans) == _placement(current)


def test_move_over_a_link_whose_probe_failed_is_never_worth_it(settled: Settled) -> None:
    """Only the host that had a block has its optimizer state, so the rate from the edge server does not count."""
    problem, current = settled
    (cluster,) = problem.clusters
    busy = _largest(problem, current)
    idle = next(device for device in cluster.devices if device.host_id != busy.host_id)
    times = []
    for rate in (1e9, 0.0):
        links = {**cluster.links, (busy.host_id, idle.host_id): WiredLink(rate)}
        given = with_cluster(problem, previous=current[0], links=links)
        times.append(migrate_seconds(given, given.clusters[0], idle, 1, 13))
    fast, dead = times
    assert fast < 1e4
    assert 1e6 < dead < math.inf


def test_decide_within_the_hysteresis_keeps_the_plan_and_says_so() -> None:
    problem, other = random_problem(1, 2, 2), _plans_for_other_speeds()
    eager = decide(problem, other, hysteresis=0.0)
    reluctant = decide(problem, other, hysteresis=1e9)
    assert eager.prediction.objective < reluctant.prediction.objective
    assert _placement(eager.plans) != _placement(other)
    assert reluctant.plans == other
    assert reluctant.kept == "hysteresis"
    assert any("schedule.hysteresis" in note for note in reluctant.notes)


def test_decide_changes_only_shares_when_only_they_gain_enough() -> None:
    problem = random_problem(1, 1, 1, num_blocks=2, options=(4,), backlog=0.0)
    problem = with_devices(problem, seconds_per_sample=1e-3)
    current = decide(problem, None).plans
    links = dict(problem.clusters[0].links)
    for pair, link in links.items():
        if "edge" in pair and isinstance(link, RadioLink):
            links[pair] = replace(link, gain=link.gain / 1000)
    decision = decide(with_cluster(problem, links=links), current)
    assert decision.kept == ""
    assert _placement(decision.plans) == _placement(current)
    assert decision.plans[0].links[1].share > 1.1 * current[0].links[1].share


def test_what_the_hysteresis_costs_does_not_grow_with_the_penalty_weight() -> None:
    """Then the delay is within O(1/V) of the best one: docs/scheduling.md, "How a round is solved", 4."""
    lost: dict[float, list[float]] = {100.0: [], 400.0: [], 1600.0: []}
    for seed in range(5):
        problem = _on_wires_of_their_own(seed, backlog=0.0)
        current = decide(problem, None).plans
        changed = noisy(problem, np.random.default_rng(seed), 0.25)
        for weight, losses in lost.items():
            weighted = replace(changed, penalty_weight=weight)
            reluctant = decide(weighted, current, hysteresis=0.1)
            eager = decide(weighted, current, hysteresis=0.0)
            loss = reluctant.prediction.objective - eager.prediction.objective
            most = 0.1 * 100.0 * predict(weighted, current).penalty / weight
            assert loss <= most * 1.2  # A fifth of it may keep the shares and powers.
            losses.append(loss / weight)
    means = [np.mean(losses) for losses in lost.values()]
    assert means[0] > 0
    assert means[1] <= means[0]
    assert means[2] <= means[0] / 4


def test_decide_replaces_a_plan_that_breaks_a_limit_whatever_the_hysteresis(
    settled: Settled,
) -> None:
    problem, current = settled
    busy = _largest(problem, current)
    held = current[0].segments[busy.host_id].num_blocks
    memory = int(problem.model.block_state_bytes * (held - 0.5))
    tight = with_devices(problem, busy.host_id, memory_bytes=memory)
    assert violations(tight, current) != []
    assert violations(tight, decide(tight, current, hysteresis=1e9).plans) == []
    rest = tuple(one for one in problem.clusters[0].devices if one != busy)
    gone = with_cluster(problem, devices=rest)
    plans = decide(gone, current, hysteresis=1e9).plans
    assert violations(gone, plans) == []
    assert busy.host_id not in plans[0].segments


@pytest.mark.parametrize(("num_clusters", "channel"), [(1, "air"), (2, "air"), (2, None)])
def test_decide_replaces_a_plan_with_a_link_that_carries_nothing_any_more(
    num_clusters: int, channel: str | None
) -> None:
    problem = with_cluster(random_problem(1, num_clusters, 2, wired=True), channel=channel)
    current = decide(problem, None).plans
    problem = _cut(problem, current)
    (broken,) = violations(problem, current)
    assert re.search(r"cluster 0 .* rate of 0", broken)
    decision = decide(problem, current, hysteresis=1e9)
    assert violations(problem, decision.plans) == []
    assert decision.kept == ""


def test_decide_shrinks_shares_with_their_channel_and_keeps_the_placement() -> None:
    problem = random_problem(1, 2, 2)
    current = decide(problem, None).plans
    narrow = replace(problem, channels={"air": 1e7})
    decision = decide(narrow, current, hysteresis=1e9)
    assert _placement(decision.plans) == _placement(current)
    assert violations(narrow, decision.plans) == []


def test_decide_is_the_same_whatever_was_decided_before() -> None:
    problem, current = random_problem(1, 2, 2), decide(random_problem(2, 2, 2), None).plans
    first = decide(problem, current)
    decide(random_problem(3, 2, 2), None)
    assert decide(problem, current) == first


# --- failures of the solver


def _fail(*args: object, **kwargs: object) -> None:
    raise SolverFailedError("out of luck")


def test_decide_with_a_failing_solver_keeps_the_current_plans_or_splits_equally(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    problem, current = random_problem(1, 2, 2), _plans_for_other_speeds()
    monkeypatch.setattr(dssra, "allocate", _fail)
    decision = decide(problem, current)
    assert decision.plans == current
    assert decision.kept == "solver_failed"
    assert decision.notes == ("out of luck",)
    decision = decide(problem, None)
    assert violations(problem, decision.plans) == []
    assert decision.kept == "solver_failed"
    (share,) = {link.share for plan in decision.plans for link in plan.links}
    assert share * sum(len(plan.links) for plan in decision.plans) == pytest.approx(2e7)


def test_decide_with_a_solver_that_fails_later_has_the_best_so_far(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    problem, real, calls = random_problem(1, 2, 2), allocate, itertools.count()
    monkeypatch.setattr(
        dssra, "allocate", lambda *a, **k: real(*a, **k) if next(calls) < 1 else _fail()
    )
    decision = decide(problem, None)
    assert decision.kept == "solver_failed"
    assert len({link.share for plan in decision.plans for link in plan.links}) > 1


def _clock() -> Callable[[], float]:
    """Returns a clock that is a second later at each call."""
    seconds = itertools.count()
    return lambda: float(next(seconds))


def test_decide_out_of_time_keeps_the_current_plans() -> None:
    problem, current = random_problem(1, 2, 2), _plans_for_other_speeds()
    decision = decide(problem, current, time_limit_seconds=3.5, clock=_clock())
    assert decision.plans == current
    assert decision.kept == "solver_slow"
    assert "3.5 s" in decision.notes[0]


@pytest.mark.parametrize("seed", [0, 1, 5])
def test_decide_out_of_time_during_small_changes_has_the_best_so_far(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    # In the turn in which the time is up, the placement has become better, so another turn would follow.
    problem = random_problem(seed, 2, 3)
    current = decide(random_problem(seed + 100, 2, 3), None).plans
    real, calls = dssra.with_rough_shares, [0]

    def slow(problem: RoundProblem, plans: RoundPlan) -> RoundPlan:
        calls[0] += 1
        return real(problem, plans)

    monkeypatch.setattr(dssra, "with_rough_shares", slow)
    decision = decide(
        problem, current, hysteresis=0.0, time_limit_seconds=3.5, clock=lambda: 9.0 * calls[0]
    )
    assert calls[0] == 1  # The time was up after the first change.
    assert decision.kept == ""
    assert decision.prediction.objective < predict(problem, current).objective


def test_decide_out_of_time_without_a_plan_decides_nevertheless() -> None:
    problem = random_problem(1, 2, 2)
    decision = decide(problem, None, time_limit_seconds=0.5, clock=_clock())
    assert violations(problem, decision.plans) == []
    assert decision.kept == "solver_slow"


def test_decide_without_any_feasible_plan_says_which_limit() -> None:
    with pytest.raises(InfeasibleError, match="memory"):
        decide(with_devices(random_problem(1, 1, 2), memory_bytes=10), None)
