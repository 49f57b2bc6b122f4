import random
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from collapipe.allocation.round_model.prediction import predict
from collapipe.allocation.round_model.problem import (
    ClusterPlan,
    ClusterProblem,
    Host,
    LinkPlan,
    ModelCost,
    RoundProblem,
    StagePlan,
    WiredLink,
)
from collapipe.simulation.outcome import run_round

from .pipelines import random_round


def _split(problem: RoundProblem) -> RoundProblem:
    """Returns the problem with hosts that leave a third of their work for later."""

    def splits(host: Host) -> Host:
        return replace(host, deferred_share=1 / 3)

    clusters = tuple(
        replace(
            cluster,
            control_unit=splits(cluster.control_unit),
            devices=tuple(map(splits, cluster.devices)),
            edge_server=splits(cluster.edge_server),
        )
        for cluster in problem.clusters
    )
    return replace(problem, clusters=clusters)


def _errors(
    count: int, *, num_clusters: int = 1, radio: bool = False, split: bool = False
) -> Sequence[float]:
    rng = random.Random(7)
    errors = []
    for _ in range(count):
        problem, plans = random_round(rng, num_clusters=num_clusters, radio=radio)
        if split:
            problem = _split(problem)
        predicted, simulated = predict(problem, plans), run_round(problem, plans)
        errors.append(abs(predicted.round_seconds / simulated.seconds - 1))
    return errors


@pytest.mark.parametrize(
    ("num_clusters", "radio", "split", "median", "tail"),
    [
        (1, False, False, 0.03, 0.12),
        (3, False, False, 0.03, 0.12),
        (1, True, False, 0.07, 0.17),
        (1, False, True, 0.03, 0.12),
        (3, False, True, 0.03, 0.12),
        (1, True, True, 0.07, 0.17),
    ],
    ids=[
        "one cluster",
        "clusters that share a head",
        "half-duplex links",
        "one cluster, split",
        "clusters that share a head, split",
        "half-duplex links, split",
    ],
)
def test_formula_agrees_with_simulation_on_heterogeneous_pipelines(
    num_clusters: int, radio: bool, split: bool, median: float, tail: float
) -> None:
    errors = _errors(500, num_clusters=num_clusters, radio=radio, split=split)
    found = float(np.median(errors)), float(np.quantile(errors, 0.95))
    print(
        f"docs/scheduling.md (5) against simulation: median {found[0]:.2%}, 95th percentile {found[1]:.2%}"
    )
    assert found[0] < median
    assert found[1] < tail


def _two_stages(**changes: object) -> tuple[RoundProblem, tuple[ClusterPlan, ...]]:
    """Returns a pipeline whose device has one block of 1 s a sample. Embedding and head take no time. M = 2, b = 1."""
    wire = WiredLink(8e6)
    device = Host("device", 1.0, busy_watts=5.0, base_bytes=7)
    cluster = ClusterProblem(
        Host("control-unit", 1.0),
        (device,),
        Host("edge-server", 1.0),
        {
            (a, b): wire
            for a, b in (
                ("control-unit", "device"),
                ("device", "control-unit"),
                ("device", "edge-server"),
                ("edge-server", "device"),
                ("control-unit", "edge-server"),
                ("edge-server", "control-unit"),
            )
        },
        (2,),
    )
    model = ModelCost(1, block_state_bytes=4e6, activation_bytes=1e6, block_stash_bytes=3e6)
    plan = ClusterPlan(
        (
            StagePlan("control-unit", 0, 1, 2),
            StagePlan("device", 1, 2, 2),
            StagePlan("edge-server", 2, 3, 1),
        ),
        2,
        (LinkPlan(), LinkPlan()),
    )
    cluster = replace(cluster, previous=plan)
    return replace(RoundProblem((cluster,), model, 2, 3), **changes), (plan,)  # type: ignore[arg-type]


def test_round_time_is_its_steps_plus_the_push() -> None:
    problem, plans = _two_stages()
    outcome = run_round(problem, plans)
    # A transfer takes 1 s. The activations arrive at the device at 1 s and 2 s. Their gradients return from the head at
    # 3 1/3 s and 4 1/3 s. The second backward pass ends at 5 s, and its gradient reaches the control unit at 6 s.
    push = 1e6 * 8 / 8e6  # the weights, but no gradients and no moments
    assert outcome.clusters[0].mini_batch_seconds == pytest.approx(6.0)
    assert outcome.clusters[0].bubble_ratio == pytest.approx(1 - 2 * 1.0 / (3 * 6.0))
    assert outcome.seconds == pytest.approx(3 * 6.0 + push)


def test_split_backward_passes_shorten_a_mini_batch() -> None:
    problem, plans = _two_stages()
    # The device sends its gradients at 3 s and 4 s, a third of a second earlier after each pass. Its last gradients of
    # weights end before its last input gradient has travelled to the control unit.
    whole = run_round(problem, plans).clusters[0].mini_batch_seconds
    split = run_round(_split(problem), plans)
    assert split.clusters[0].mini_batch_seconds == pytest.approx(whole - 1 / 3)
    assert predict(_split(problem), plans).clusters[0].stages[1].deferred_seconds == pytest.approx(
        1 / 3
    )


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
    elsewhere = replace(plans[0], stages=(StagePlan("other", 0, 3, 1),))
    moving = replace(problem, clusters=(replace(problem.clusters[0], previous=elsewhere),))
    paid = run_round(moving, plans)
    # The weights and both moments of the block take 3 s.
    assert paid.seconds - run_round(problem, plans).seconds == pytest.approx(3.0)
    assert paid.clusters[0].moved_units == 3


def test_first_round_fetches_the_initial_weights() -> None:
    problem, plans = _two_stages()
    first = replace(problem, clusters=(replace(problem.clusters[0], previous=None),))
    more = run_round(first, plans).seconds - run_round(problem, plans).seconds
    assert more == pytest.approx(1e6 * 8 / 8e6)


@pytest.mark.parametrize(
    ("channel", "seconds"),
    [({}, 2.0), ({"shared": 8e6}, 3.0), ({"shared": 4e6}, 6.0), ({"shared": 1e9}, 2.0)],
)
def test_pushes_overlap_on_separate_wires_only(channel: dict[str, float], seconds: float) -> None:
    problem, plans = _two_stages()
    large = replace(
        problem.model, embedding_state_bytes=8e6
    )  # 2 s on its own wire; the block takes 1 s
    cluster = replace(problem.clusters[0], channel="shared" if channel else None)
    links = tuple(replace(link, share=8e6) for link in plans[0].links)
    both = replace(problem, clusters=(cluster,), model=large, channels=channel)
    alone = replace(both, model=replace(problem.model, block_state_bytes=0.0))
    shared = (replace(plans[0], links=links),)
    more = run_round(both, shared).seconds - run_round(alone, shared).seconds
    assert more == pytest.approx(seconds)


def test_several_clusters_also_fetch_the_average() -> None:
    problem, plans = _two_stages()
    two = replace(problem, clusters=problem.clusters * 2)
    for model, seconds in ((two.model, 2.0), (replace(two.model, block_state_bytes=0.0), 0.0)):
        outcome = run_round(replace(two, model=model), plans * 2)
        steps = [3 * cluster.mini_batch_seconds for cluster in outcome.clusters]
        found = [
            cluster.round_seconds - step
            for cluster, step in zip(outcome.clusters, steps, strict=True)
        ]
        assert found == pytest.approx([seconds] * 2)


def test_energy_is_power_times_busy_seconds() -> None:
    problem, plans = _two_stages()
    assert run_round(problem, plans).energy_joules["device"] == pytest.approx(3 * 2 * 1.0 * 5.0)


def test_idle_energy_is_power_times_the_simulated_round_whether_a_host_takes_part_or_not() -> None:
    problem, plans = _two_stages()
    cluster = problem.clusters[0]
    device = replace(cluster.devices[0], idle_watts=2.0)
    spare = replace(device, host_id="spare", idle_watts=3.0)
    problem = replace(
        problem, clusters=(replace(cluster, devices=(device, spare)),), fixed_seconds=4.0
    )
    outcome = run_round(problem, plans)
    assert outcome.energy_joules["device"] == pytest.approx(30.0 + 2.0 * outcome.seconds)
    assert outcome.energy_joules["spare"] == pytest.approx(3.0 * outcome.seconds)


def test_memory_counts_the_micro_batches_that_were_held() -> None:
    problem, plans = _two_stages()
    wide = replace(
        plans[0],
        stages=tuple(replace(stage, in_flight=9) for stage in plans[0].stages),
    )
    # Only 2 micro-batches exist. Each needs its stash, an activation and a gradient.
    expected = 7 + 4e6 + 2 * (3e6 + 2 * 1e6)
    assert run_round(problem, (wide,)).memory_bytes["device"] == expected


def test_update_per_micro_batch_runs_micro_batches_one_by_one() -> None:
    problem, plans = _two_stages()
    flushed = run_round(replace(problem, update_per_micro_batch=True), plans)
    one_way = 1.0 + 1.0
    assert flushed.clusters[0].mini_batch_seconds == pytest.approx(2 * (1.0 + 2 * one_way))


def test_number_of_simulated_steps_changes_nothing_for_one_cluster() -> None:
    problem, plans = random_round(random.Random(1))
    one, ten = (run_round(problem, plans, num_steps=n).seconds for n in (1, 10))
    assert one == pytest.approx(ten, rel=1e-9)


def test_cluster_that_waits_for_the_head_is_slower_than_alone() -> None:
    problem, plans = random_round(random.Random(3), num_clusters=4)
    busy = replace(problem, model=replace(problem.model, head_work=200.0))
    together = run_round(busy, plans)
    for index, outcome in enumerate(together.clusters):
        alone = run_round(
            replace(busy, clusters=(busy.clusters[index],)), (plans[index],)
        ).clusters[0]
        assert outcome.mini_batch_seconds > alone.mini_batch_seconds


@pytest.mark.parametrize("num_micro_batches", [1, 2, 8])
def test_formula_counts_all_clusters_of_an_edge_server_that_runs_the_blocks(
    num_micro_batches: int,
) -> None:
    problem, _ = _two_stages(mini_batch=8)
    cluster = replace(problem.clusters[0], micro_batch_options=(num_micro_batches,))
    problem = replace(problem, clusters=(cluster,) * 3)
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
