import itertools
import math
import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from unit.allocation.changes import with_cluster, with_hosts

from collapipe.allocation import (
    ClusterPlan,
    ClusterProblem,
    Host,
    LinkPlan,
    ModelCost,
    RadioLink,
    RoundPlan,
    RoundProblem,
    StagePlan,
    WiredLink,
    predict,
)
from collapipe.simulation.outcome import run_round

_NUM_BLOCKS = 24


def random_round(
    rng: random.Random, *, num_clusters: int = 1, radio: bool = False
) -> tuple[RoundProblem, RoundPlan]:
    """Returns pipelines of 2 to 8 devices whose speeds differ by up to 30, with classical windows."""
    model = ModelCost(
        _NUM_BLOCKS,
        activation_bytes=1e5,
        embedding_work=rng.uniform(0.05, 0.5),
        head_work=rng.uniform(0.05, 3.0),
    )
    edge_server = Host("edge-server", rng.uniform(0.0003, 0.003))
    clusters, plans = [], []
    for n in range(num_clusters):
        devices = [
            Host(f"device-{n}-{k}", 10 ** rng.uniform(-3, -1.5), rng.uniform(0, 0.01))
            for k in range(rng.randint(2, 8))
        ]
        hosts = [Host(f"control-unit-{n}", rng.uniform(0.005, 0.05)), *devices, edge_server]
        names = [host.host_id for host in hosts]
        links = {}
        for one, other in itertools.pairwise(names):
            round_trip = rng.uniform(0, 0.05)
            for pair in ((one, other), (other, one)):
                links[pair] = (
                    RadioLink(10 ** rng.uniform(-9, -7), 4e-20, round_trip)
                    if radio
                    else WiredLink(10 ** rng.uniform(6.5, 9), round_trip)
                )
        num_micro_batches = rng.choice([4, 8, 16, 32])
        cuts = [0, *sorted(rng.sample(range(1, _NUM_BLOCKS), len(devices) - 1)), _NUM_BLOCKS]
        units = [0, *(cut + 1 for cut in cuts), _NUM_BLOCKS + 2]
        stages = tuple(
            StagePlan(name, units[k], units[k + 1], min(num_micro_batches, len(names) - k))
            for k, name in enumerate(names)
        )
        watts = 0.1 if radio else 0.0
        share = 2e6 if radio else math.inf
        plan = LinkPlan("fp32", share, watts, watts)
        plans.append(ClusterPlan(stages, num_micro_batches, (plan,) * (len(names) - 1)))
        clusters.append(
            ClusterProblem(hosts[0], tuple(devices), edge_server, links, (4, 8, 16, 32))
        )
    return RoundProblem(tuple(clusters), model, mini_batch=32, local_steps=10), tuple(plans)


def _split(problem: RoundProblem) -> RoundProblem:
    """Returns the problem with hosts that leave a third of their work for later."""
    return with_hosts(problem, lambda host: replace(host, deferred_share=1 / 3))


@pytest.mark.parametrize("split", [False, True], ids=["", "split"])
@pytest.mark.parametrize(
    ("num_clusters", "radio", "median", "tail"),
    [(1, False, 0.03, 0.12), (3, False, 0.03, 0.12), (1, True, 0.07, 0.17)],
    ids=["one cluster", "clusters that share a head", "half-duplex links"],
)
def test_formula_agrees_with_simulation_on_heterogeneous_pipelines(
    num_clusters: int, radio: bool, median: float, tail: float, split: bool
) -> None:
    rng, errors = random.Random(7), []
    for _ in range(100):
        problem, plans = random_round(rng, num_clusters=num_clusters, radio=radio)
        if split:
            problem = _split(problem)
        predicted, simulated = predict(problem, plans), run_round(problem, plans)
        errors.append(abs(predicted.round_seconds / simulated.seconds - 1))
    found = float(np.median(errors)), float(np.quantile(errors, 0.95))
    print(f"docs/scheduling.md (5): median {found[0]:.2%}, 95th percentile {found[1]:.2%}")
    assert found[0] < median
    assert found[1] < tail


def _two_stages(**changes: Any) -> tuple[RoundProblem, tuple[ClusterPlan, ...]]:
    """Returns a pipeline whose device has one block of 1 s a sample. Embedding and head take no time. M = 2, b = 1."""
    names = ("control-unit", "device", "edge-server")
    device = Host("device", 1.0, busy_watts=5.0, base_bytes=7)
    links = {pair: WiredLink(8e6) for pair in itertools.permutations(names, 2)}
    model = ModelCost(1, block_state_bytes=4e6, activation_bytes=1e6, block_stash_bytes=3e6)
    stages = tuple(StagePlan(name, k, k + 1, (2, 2, 1)[k]) for k, name in enumerate(names))
    plan = ClusterPlan(stages, 2, (LinkPlan(), LinkPlan()))
    cluster = ClusterProblem(
        Host(names[0], 1.0), (device,), Host(names[2], 1.0), links, (2,), previous=plan
    )
    return replace(RoundProblem((cluster,), model, 2, 3), **changes), (plan,)


def test_round_time_is_its_steps_plus_the_push() -> None:
    problem, plans = _two_stages()
    outcome = run_round(problem, plans)
    # A transfer takes 1 s. The activations arrive at the device at 1 s and 2 s. Their gradients return from the head at
    # 3 1/3 s and 4 1/3 s. The second backward pass ends at 5 s, and its gradient reaches the control unit at 6 s.
    push = 1e6 * 8 / 8e6  # the weights, but no gradients and no moments
    assert outcome.clusters[0].mini_batch_seconds == pytest.approx(6.0)
    assert outcome.clusters[0].bubble_ratio == pytest.approx(1 - 2 * 1.0 / (3 * 6.0))
    assert outcome.seconds == pytest.approx(3 * 6.0 + push)
    assert outcome.energy_joules["device"] == pytest.approx(3 * 2 * 1.0 * 5.0)


def test_split_backward_passes_shorten_a_mini_batch() -> None:
    problem, plans = _two_stages()
    # The device sends its gradients at 3 s and 4 s, a third of a second earlier after each pass. Its last gradients of
    # weights end before its last input gradient has travelled to the control unit.
    whole = run_round(problem, plans).clusters[0].mini_batch_seconds
    split = run_round(_split(problem), plans)
    assert split.clusters[0].mini_batch_seconds == pytest.approx(whole - 1 / 3)
    predicted = predict(_split(problem), plans).clusters[0].stages[1]
    assert predicted.deferred_seconds == pytest.approx(1 / 3)


def test_stage_that_recomputes_repeats_its_forward_pass_and_keeps_only_its_inputs() -> None:
    problem, plans = _two_stages()
    problem = replace(problem, recompute_options=(True,))
    control_unit, device, head = plans[0].stages
    repeating = (replace(plans[0], stages=(control_unit, replace(device, recompute=True), head)),)
    kept, repeated = run_round(problem, plans), run_round(problem, repeating)
    # The backward passes begin at 3 1/3 s and 4 1/3 s. Each takes a third of a second longer, and so just ends when
    # the next one begins.
    longer = kept.clusters[0].mini_batch_seconds + 1 / 3
    assert repeated.clusters[0].mini_batch_seconds == pytest.approx(longer)
    # It keeps two inputs of 1 MB and one stash of 3 MB instead of two stashes.
    assert kept.memory_bytes["device"] - repeated.memory_bytes["device"] == pytest.approx(1e6)


def test_moving_units_counts_in_full_in_this_round() -> None:
    problem, plans = _two_stages()
    usual = run_round(problem, plans).seconds
    elsewhere = replace(plans[0], stages=(StagePlan("other", 0, 3, 1),))
    paid = run_round(with_cluster(problem, previous=elsewhere), plans)
    first = run_round(with_cluster(problem, previous=None), plans)
    # The weights and both moments of the block take 3 s. In the first round, only the weights are fetched.
    assert paid.seconds - usual == pytest.approx(3.0)
    assert first.seconds - usual == pytest.approx(1.0)
    assert paid.clusters[0].moved_units == 3


@pytest.mark.parametrize(
    ("channel", "seconds"),
    [({}, 2.0), ({"shared": 8e6}, 3.0), ({"shared": 4e6}, 6.0), ({"shared": 1e9}, 2.0)],
)
def test_pushes_overlap_on_separate_wires_only(channel: dict[str, float], seconds: float) -> None:
    problem, plans = _two_stages(channels=channel)
    # The embedding takes 2 s on its own wire, and the block 1 s.
    large = replace(problem.model, embedding_state_bytes=8e6)
    both = with_cluster(replace(problem, model=large), channel="shared" if channel else None)
    alone = replace(both, model=replace(problem.model, block_state_bytes=0.0))
    links = tuple(replace(link, share=8e6) for link in plans[0].links)
    shared = (replace(plans[0], links=links),)
    more = run_round(both, shared).seconds - run_round(alone, shared).seconds
    assert more == pytest.approx(seconds)


@pytest.mark.parametrize(("state_bytes", "seconds"), [(4e6, 2.0), (0.0, 0.0)])
def test_several_clusters_also_fetch_the_average(state_bytes: float, seconds: float) -> None:
    problem, plans = _two_stages()
    model = replace(problem.model, block_state_bytes=state_bytes)
    two = replace(problem, clusters=problem.clusters * 2, model=model)
    for outcome in run_round(two, plans * 2).clusters:
        assert outcome.round_seconds - 3 * outcome.mini_batch_seconds == pytest.approx(seconds)


def test_idle_energy_is_power_times_the_simulated_round_whether_a_host_takes_part_or_not() -> None:
    problem, plans = _two_stages(fixed_seconds=4.0)
    device = replace(problem.clusters[0].devices[0], idle_watts=2.0)
    spare = replace(device, host_id="spare", idle_watts=3.0)
    outcome = run_round(with_cluster(problem, devices=(device, spare)), plans)
    assert outcome.energy_joules["device"] == pytest.approx(30.0 + 2.0 * outcome.seconds)
    assert outcome.energy_joules["spare"] == pytest.approx(3.0 * outcome.seconds)


def test_memory_counts_the_micro_batches_that_were_held() -> None:
    problem, (plan,) = _two_stages()
    wide = replace(plan, stages=tuple(replace(stage, in_flight=9) for stage in plan.stages))
    # Only 2 micro-batches exist. Each needs its stash, an activation and a gradient.
    expected = 7 + 4e6 + 2 * (3e6 + 2 * 1e6)
    assert run_round(problem, (wide,)).memory_bytes["device"] == expected


def test_update_per_micro_batch_runs_micro_batches_one_by_one() -> None:
    flushed = run_round(*_two_stages(update_per_micro_batch=True))
    one_way = 1.0 + 1.0
    assert flushed.clusters[0].mini_batch_seconds == pytest.approx(2 * (1.0 + 2 * one_way))


def test_number_of_simulated_steps_changes_nothing_for_one_cluster() -> None:
    problem, plans = random_round(random.Random(1))
    one, ten = (run_round(problem, plans, num_steps=n).seconds for n in (1, 10))
    assert one == pytest.approx(ten, rel=1e-9)


@pytest.mark.parametrize("num_micro_batches", [1, 2, 8])
def test_formula_counts_all_clusters_of_an_edge_server_that_runs_the_blocks(
    num_micro_batches: int,
) -> None:
    problem, _ = _two_stages(mini_batch=8)
    problem = with_cluster(problem, micro_batch_options=(num_micro_batches,))
    problem = replace(problem, clusters=problem.clusters * 3)
    stages = (StagePlan("control-unit", 0, 1, 8), StagePlan("edge-server", 1, 3, 1))
    plans = (ClusterPlan(stages, num_micro_batches, (LinkPlan(),)),) * 3
    predicted, simulated = predict(problem, plans), run_round(problem, plans)
    assert predicted.round_seconds == pytest.approx(simulated.seconds, rel=0.03)
    assert predicted.round_seconds > 3 * 8


def test_control_unit_that_only_sends_token_ids_takes_no_time() -> None:
    problem, _ = _two_stages()
    whole = ClusterPlan(
        (StagePlan("control-unit", 0, 0, 2), StagePlan("device", 0, 3, 1)), 2, (LinkPlan(),)
    )
    assert run_round(problem, (whole,)).clusters[0].mini_batch_seconds == pytest.approx(2.0)
