"""Shares and powers of uploads over radios, against grids over all of them."""

import itertools
import math
import re
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from collapipe.allocation import (
    ClusterPlan,
    LinkPlan,
    RadioLink,
    RoundPlan,
    RoundProblem,
    StagePlan,
    decide_round,
    predict,
    violations,
)
from collapipe.allocation.round_model.uploads import with_soonest_uploads
from collapipe.allocation.search.dssra import decide
from collapipe.allocation.search.power import allocate

from .changes import with_cluster, with_hosts
from .grids import Vector, every_plan, objectives, random_problem, softmax, some_plan, zoomed

_STATE_BPS = 1e8


def _uploading(seed: int, num_clusters: int = 1, **changes: Any) -> RoundProblem:
    """Returns a problem in which every host but the edge server has weights, and each cluster its own channel."""
    problem = random_problem(seed, num_clusters, state_bps=_STATE_BPS, **changes)
    for n, cluster in enumerate(problem.clusters):
        entry = replace(cluster.control_unit, push_bps=_STATE_BPS)
        problem = with_cluster(problem, n, control_unit=entry, channel=f"air {n}")
    return replace(
        problem,
        channels={f"air {n}": 2e7 for n in range(num_clusters)},
        model=replace(problem.model, embedding_state_bytes=3e7, block_state_bytes=3e7),
    )


def _bits(problem: RoundProblem, plan: ClusterPlan) -> list[float]:
    model = problem.model
    return [8 * model.weights_bytes(s.start_unit, s.stop_unit) for s in plan.stages[:-1]]


def _seconds(
    problem: RoundProblem, plan: ClusterPlan, index: int, shares: Vector, watts: Vector
) -> Vector:
    """Computes docs/scheduling.md (1) and (6) for many uploads of a cluster at once. (points, hosts)"""
    cluster = problem.clusters[index]
    found = []
    for k, bits in enumerate(_bits(problem, plan)):
        link = cluster.links[plan.stages[k].host_id, "edge"]
        assert isinstance(link, RadioLink)
        signal = watts[:, k] * link.gain / link.noise_watts_per_hertz / shares[:, k]
        most = np.minimum(np.log2(1 + signal), link.most_bits_per_hertz)
        found.append(bits / (link.efficiency * shares[:, k] * most))
    return np.array(found).T


def _is_as_good_as(grid: float, ours: float) -> None:
    print(f"gap to the grid: {ours / grid - 1:.2%}")
    assert ours < grid * (1 + 1e-3)
    assert ours > grid * (1 - 0.02)  # A larger gap would mean that the grid is too coarse.


@pytest.mark.parametrize("most_bits_per_hertz", [math.inf, 8.0])
@pytest.mark.parametrize("seed", range(4))
def test_full_power_uploads_end_as_soon_as_the_best_of_a_grid(
    seed: int, most_bits_per_hertz: float
) -> None:
    problem = _uploading(seed, num_devices=3, most_bits_per_hertz=most_bits_per_hertz)
    (plan,) = with_soonest_uploads(problem, some_plan(problem, seed))
    hosts = problem.clusters[0].hosts
    full = np.array([hosts[stage.host_id].max_transmit_watts for stage in plan.stages[:-1]])
    assert violations(problem, (plan,)) == [] or plan.links[0].share == 1.0

    def seconds(at: Vector) -> Vector:
        shares = 2e7 * softmax(at)
        return _seconds(problem, plan, 0, shares, np.tile(full, (len(at), 1))).max(axis=1)

    found = predict(problem, (plan,)).clusters[0].push_seconds
    assert found == pytest.approx(zoomed(seconds, len(full) - 1), rel=2e-4)
    # Turns with the whole channel take longer, because only one host has its power on the air.
    turns = sum(
        bits / problem.clusters[0].links[stage.host_id, "edge"].rate_bps(2e7, limit)
        for stage, limit, bits in zip(plan.stages, full, _bits(problem, plan), strict=False)
    )
    assert found <= turns * (1 + 1e-6)
    if math.isinf(most_bits_per_hertz):
        assert [upload.watts for upload in plan.uploads] == [*full, 0.0]
        assert found < turns


def test_uploads_use_no_power_beyond_what_the_highest_modulation_needs() -> None:
    problem = _uploading(2, num_devices=3, most_bits_per_hertz=5.0)
    (plan,) = with_soonest_uploads(problem, some_plan(problem, 2))
    ends = []
    for stage, upload, bits in zip(plan.stages, plan.uploads, _bits(problem, plan), strict=False):
        link = problem.clusters[0].links[stage.host_id, "edge"]
        rate = link.rate_bps(upload.share, upload.watts)
        assert link.rate_bps(upload.share, 0.99 * upload.watts) < rate
        ends.append(bits / rate)
    assert ends == pytest.approx([ends[0]] * len(plan.stages[:-1]), abs=1e-6)


@pytest.mark.parametrize("strategy", ["pipeline", "proportional", "vanilla_fl", "centralized"])
def test_baselines_upload_at_full_power_and_end_together(strategy: str) -> None:
    problem = _uploading(3, options=(4,))
    (plan,) = decide_round(problem, strategy).plans
    assert sum(upload.share for upload in plan.uploads) == pytest.approx(2e7)
    ends = []
    for stage, upload in zip(plan.stages, plan.uploads, strict=True):
        if not upload.share:
            continue
        assert upload.watts == problem.clusters[0].hosts[stage.host_id].max_transmit_watts
        link = problem.clusters[0].links[stage.host_id, "edge"]
        bits = 8 * problem.model.weights_bytes(stage.start_unit, stage.stop_unit)
        ends.append(bits / link.rate_bps(upload.share, upload.watts))
    assert ends == pytest.approx([ends[0]] * len(ends))


def test_uploads_are_not_decided_on_wires_or_without_push_times() -> None:
    for problem in (_uploading(0, wired=True), random_problem(0)):
        assert not with_soonest_uploads(problem, some_plan(problem, 1))[0].uploads


@pytest.mark.parametrize("most_bits_per_hertz", [math.inf, 6.0])
@pytest.mark.parametrize("seed", range(3))
def test_costly_uploads_of_one_cluster_are_as_good_as_a_fine_grid(
    seed: int, most_bits_per_hertz: float
) -> None:
    problem = _uploading(seed, backlog=300.0, most_bits_per_hertz=most_bits_per_hertz)
    plans = some_plan(problem, seed)
    found = allocate(problem, plans)
    assert violations(problem, found.plans) == []
    (plan,), cluster = found.plans, problem.clusters[0]
    senders = [cluster.hosts[stage.host_id] for stage in plan.stages[:-1]]
    price = np.array([host.joule_weight for host in senders])
    limit = np.array([host.max_transmit_watts for host in senders])

    bits = np.array(_bits(problem, plan))
    links = [cluster.links[host.host_id, "edge"] for host in senders]
    gain = np.array([link.gain / link.noise_watts_per_hertz for link in links])  # type: ignore[union-attr]
    efficiency = np.array([link.efficiency for link in links])  # type: ignore[union-attr]

    def cost(at: Vector) -> Vector:
        # A host that sends more slowly needs less energy, so none ends before the last one.
        shares, seconds = 2e7 * softmax(at[:, 1:]), np.exp(at[:, :1])
        bits_per_hertz = bits / (efficiency * shares * seconds)
        watts = np.exp2(np.minimum(bits_per_hertz, 99.0)) - 1
        watts *= shares / gain
        value = problem.penalty_weight / problem.reference_seconds * seconds[:, 0]
        value += (seconds * watts) @ price
        possible = (watts <= limit) & (bits_per_hertz <= most_bits_per_hertz)
        return np.asarray(np.where(np.all(possible, axis=1), value, math.inf))

    uploads = plan.uploads[:-1]
    shares, watts = np.array([[(u.share, u.watts) for u in uploads]]).transpose(2, 0, 1)
    seconds = _seconds(problem, plan, 0, shares, watts)
    ours = problem.penalty_weight / problem.reference_seconds * seconds.max()
    ours += float(((seconds * watts) @ price)[0])
    _is_as_good_as(zoomed(cost, len(senders)), ours)
    # One cluster is the slowest one, so nothing couples links and uploads.
    without = tuple(replace(one, uploads=()) for one in found.plans)
    silent = with_hosts(problem, lambda host: replace(host, push_bps=math.inf))
    assert found.prediction.objective == pytest.approx(
        predict(silent, without).objective + ours, rel=1e-9
    )


@pytest.mark.parametrize("most_bits_per_hertz", [math.inf, 6.0])
@pytest.mark.parametrize("seed", range(2))
def test_links_and_uploads_of_two_clusters_are_as_good_as_a_joint_grid(
    seed: int, most_bits_per_hertz: float
) -> None:
    """The control units run all blocks, so each cluster has one link and one upload."""
    problem = _uploading(seed, num_clusters=2, most_bits_per_hertz=most_bits_per_hertz)
    rng, plans = np.random.default_rng(seed), []
    for n, cluster in enumerate(problem.clusters):
        budget, backlog = float(rng.uniform(5, 50)), float(rng.uniform(100, 900))
        entry = replace(cluster.control_unit, energy_budget_joules=budget, backlog=backlog)
        problem = with_cluster(problem, n, control_unit=entry)
        stages = (StagePlan(entry.host_id, 0, 5, 4), StagePlan("edge", 5, 6, 4))
        plans.append(ClusterPlan(stages, 4, (LinkPlan("fp32", 1.0, 1.0, 1.0),)))
    found = allocate(problem, tuple(plans))
    assert violations(problem, found.plans) == []
    price = np.array([cluster.control_unit.joule_weight for cluster in problem.clusters])

    def cost(at: Vector) -> Vector:
        watts = np.exp(np.minimum(at - 3.0, 0.0))
        shares = np.full((len(at), 1), 2e7)
        seconds = np.concatenate(
            [_seconds(problem, plans[n], n, shares, watts[:, [2 + n]]) for n in (0, 1)], axis=1
        )
        links = [(watts[:, n], np.ones(len(at))) for n in (0, 1)]
        both = np.full((len(at), 2), 2e7)
        value = objectives(problem, tuple(plans), both, links, seconds)
        return np.asarray(value + (seconds * watts[:, 2:]) @ price)

    _is_as_good_as(zoomed(cost, 4), found.prediction.objective)


@pytest.mark.parametrize("seed", range(3))
def test_decision_is_as_good_as_the_best_placement_with_its_own_uploads(seed: int) -> None:
    problem = _uploading(seed, num_blocks=3, options=(2, 4), backlog=30.0)
    best = min(allocate(problem, plans).prediction.objective for plans in every_plan(problem))
    decision = decide(problem, None)
    assert violations(problem, decision.plans) == []
    assert decision.plans[0].uploads
    assert decision.prediction.objective <= best * 1.005


def test_uploads_beyond_the_channel_or_the_power_are_violations() -> None:
    problem = _uploading(0)
    found: RoundPlan = allocate(problem, some_plan(problem, 1)).plans
    assert violations(problem, found) == []
    (plan,) = found
    wide = tuple(replace(upload, share=1.1 * upload.share) for upload in plan.uploads)
    (text,) = violations(problem, (replace(plan, uploads=wide),))
    assert "2.2e+07 Hz" in text
    loud = tuple(replace(upload, watts=2.0) for upload in plan.uploads[:1]) + plan.uploads[1:]
    (text,) = violations(problem, (replace(plan, uploads=loud),))
    assert re.search(r"control-0 .*2\.0 W.* 1\.0 W", text)


def test_energy_of_uploads_is_power_times_seconds() -> None:
    problem = _uploading(1)
    (plan,) = allocate(problem, some_plan(problem, 1)).plans
    more = predict(problem, (plan,)).energy_joules
    less = predict(problem, (replace(plan, uploads=()),)).energy_joules  # `push_watts` is 0
    sending = zip(plan.stages, plan.uploads, _bits(problem, plan), strict=False)
    for stage, upload, bits in itertools.islice(sending, 1, None):
        link = problem.clusters[0].links[stage.host_id, "edge"]
        joules = upload.watts * bits / link.rate_bps(upload.share, upload.watts)
        assert more[stage.host_id] - less[stage.host_id] == pytest.approx(joules)
