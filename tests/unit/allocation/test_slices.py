"""Plans whose micro-batches are cut into slices: predictions against hand counts and simulation, and the search."""

import itertools
import math
import random
import re
from dataclasses import replace

import pytest

from collapipe.allocation import (
    BlockShare,
    ClusterPlan,
    ClusterProblem,
    Host,
    LinkPlan,
    ModelCost,
    RoundProblem,
    StagePlan,
    WiredLink,
    predict,
    violations,
)
from collapipe.allocation.search.dssra import decide
from collapipe.simulation.outcome import run_round
from collapipe.simulation.pipeline_events import (
    SimulatedLink,
    SimulatedPipeline,
    SimulatedStage,
    simulate,
)

from .enumeration import best_plan


def problem(
    seconds: tuple[float, ...] = (1.0, 1.0, 1.0),
    fixed: float = 0.0,
    *,
    micro_batches: tuple[int, ...] = (1,),
    slices: tuple[int, ...] = (1, 2, 4, 8),
    memory: tuple[int | None, ...] = (None, None, None),
    rate_bps: float = math.inf,
    mini_batch: int = 1,
) -> RoundProblem:
    """Returns one cluster whose devices need `seconds` for a block and a sample, and `fixed` for each pass."""
    devices = tuple(
        Host(f"device-{k}", each, fixed, memory_bytes=limit)
        for k, (each, limit) in enumerate(zip(seconds, memory, strict=True))
    )
    control_unit, edge_server = Host("control-unit", 0.1, fixed), Host("edge-server", 0.1, fixed)
    hosts = [host.host_id for host in (control_unit, *devices, edge_server)]
    cluster = ClusterProblem(
        control_unit,
        devices,
        edge_server,
        links={pair: WiredLink(rate_bps, 0.01) for pair in itertools.permutations(hosts, 2)},
        micro_batch_options=micro_batches,
        slice_options=slices,
    )
    model = ModelCost(6, 10, 5, activation_bytes=1, embedding_work=0.5, head_work=1.0)
    return RoundProblem((cluster,), model, mini_batch=mini_batch)


def pipeline(num_slices: int, num_micro_batches: int = 1, in_flight: int = 9) -> ClusterPlan:
    window = min(in_flight, num_micro_batches)
    hosts = ("control-unit", "device-0", "device-1", "device-2", "edge-server")
    stages = tuple(
        StagePlan(host, start, stop, window)
        for host, (start, stop) in zip(hosts, itertools.pairwise((0, 1, 3, 5, 7, 8)), strict=True)
    )
    return ClusterPlan(stages, num_micro_batches, (LinkPlan(),) * 4, num_slices=num_slices)


@pytest.mark.parametrize("num_slices", [1, 2, 4, 8])
def test_one_micro_batch_takes_the_time_of_one_slice_and_the_slowest_stage_for_each_other(
    num_slices: int,
) -> None:
    given = problem((1.0, 2.0, 1.5), fixed=0.25)
    prediction = predict(given, (pipeline(num_slices),)).clusters[0]
    computes = [
        0.25 + work / num_slices for work in (0.5 * 0.1, 2 * 1.0, 2 * 2.0, 2 * 1.5, 1.0 * 0.1)
    ]
    assert [s.compute_seconds for s in prediction.stages] == pytest.approx(computes)
    expected = sum(computes) + 4 * 0.01 + (num_slices - 1) * computes[2]
    assert prediction.mini_batch_seconds == pytest.approx(expected)


@pytest.mark.parametrize(
    ("seconds", "fixed", "rate_bps"),
    # With slow links, a transfer of one sample takes 1 s, and the fastest devices a tenth of it.
    [((1.0, 2.0, 1.5), 0.25, math.inf), ((0.05, 0.02, 0.03), 0.0, 8.0)],
    ids=["fast links", "slow links"],
)
@pytest.mark.parametrize("num_slices", [1, 2, 5])
def test_prediction_of_one_micro_batch_equals_the_simulation(
    num_slices: int, seconds: tuple[float, ...], fixed: float, rate_bps: float
) -> None:
    given, plans = problem(seconds, fixed, rate_bps=rate_bps), (pipeline(num_slices),)
    predicted, simulated = predict(given, plans).clusters[0], run_round(given, plans).clusters[0]
    assert predicted.mini_batch_seconds == pytest.approx(simulated.mini_batch_seconds)


def test_slices_of_several_micro_batches_keep_the_slowest_stage_busy() -> None:
    given = problem((1.0, 2.0, 1.5), micro_batches=(4,), mini_batch=4)
    plans = (pipeline(4, 4),)
    predicted = predict(given, plans).clusters[0].mini_batch_seconds
    simulated = run_round(given, plans).clusters[0].mini_batch_seconds
    assert simulated <= predicted <= 1.06 * simulated
    whole = predict(given, (pipeline(1, 4),)).clusters[0].mini_batch_seconds
    assert simulated < 0.8 * whole


def test_last_stage_runs_backward_passes_when_all_slices_went_forward() -> None:
    stages = [SimulatedStage(1.0, 2.0, 3, "first"), SimulatedStage(1.0, 2.0, 3, "last")]
    link = SimulatedLink(0.0, 0.0)
    (run,) = simulate([SimulatedPipeline(stages, [link], 3, num_slices=3)])
    assert run.seconds == 1 + 3 * 1 + 3 * 2 + 2
    assert run.peak_in_flight == (3, 3)


def test_window_of_one_micro_batch_begins_the_next_one_after_its_first_slice() -> None:
    given = problem(micro_batches=(4,), mini_batch=4)
    narrow = predict(given, (pipeline(4, 4, in_flight=1),)).clusters[0]
    # Without links and fixed costs, the loop of the first device is its own slice and those behind it.
    loop = sum(stage.compute_seconds for stage in narrow.stages[1:]) + 3 * 0.01
    assert narrow.stages[1].window_seconds == pytest.approx(loop)
    wide = predict(given, (pipeline(4, 4, in_flight=2),)).clusters[0]
    assert wide.stages[1].window_seconds == pytest.approx(loop / 5)


def test_slices_need_memory_for_keys_and_values() -> None:
    given, plan = problem(), pipeline(1)
    need = [
        predict(given, (replace(plan, num_slices=s),)).clusters[0].stages[1].memory_bytes
        for s in (1, 2, 4)
    ]
    # Two blocks, each with keys and values of two activations of 1 byte.
    assert need[1] - need[0] == pytest.approx(2 * 2 * (0.5 + 2 * 0.5))
    assert need[2] - need[0] == pytest.approx(2 * 2 * (1.5 + 2 * 0.75))


def test_keys_and_values_are_those_of_attention_halves() -> None:
    model = replace(problem().model, pattern=(BlockShare(1.5, 1, 1), BlockShare(0.5, 1, 1)))
    layer = problem().model.slice_bytes(1, 2, 4)
    ranges = [(0, 1), (1, 2), (2, 3), (1, 3), (2, 5), (2, 4), (0, 8)]
    found = [model.slice_bytes(*units, 4) / layer for units in ranges]
    assert found == [0, 1, 0, 1, 1, 1, 3]


def best_by_trying_all(given: RoundProblem) -> float:
    """Returns the least objective of all orders, splits, M and S."""
    best = best_plan(given, [{pair: LinkPlan() for pair in given.clusters[0].links}])
    assert best is not None
    return predict(given, best).objective


def test_dssra_cuts_a_long_row_into_slices_that_fill_the_pipeline() -> None:
    given = problem(fixed=0.01)
    decision = decide(given, None)
    (plan,) = decision.plans
    assert (plan.num_micro_batches, plan.num_slices) == (1, 8)
    assert len(plan.segments) == 3
    slice_seconds = 2 * 1.0 / 8 + 0.01
    ends = (0.5 * 0.1 + 1.0 * 0.1) / 8 + 2 * 0.01
    expected = 3 * slice_seconds + ends + 4 * 0.01 + 7 * slice_seconds
    assert decision.prediction.clusters[0].mini_batch_seconds == pytest.approx(expected)
    assert decision.prediction.objective == pytest.approx(best_by_trying_all(given))


def test_dssra_takes_fewer_slices_where_they_cost_too_much_or_do_not_fit() -> None:
    assert decide(problem(fixed=10.0), None).plans[0].num_slices == 1
    # A device with two blocks needs 20 for their state, 12 for one sample, and 6 for two slices.
    given = problem(fixed=0.01, memory=(40, 40, 40))
    (plan,) = decide(given, None).plans
    assert not violations(given, (plan,))
    assert 1 < plan.num_slices < 8


@pytest.mark.parametrize("seed", range(6))
def test_dssra_finds_the_best_number_of_slices(seed: int) -> None:
    rng = random.Random(seed)
    given = problem(
        tuple(rng.uniform(0.2, 2.0) for _ in range(3)),
        fixed=rng.choice([0.0, 0.1, 0.5]),
        micro_batches=(1, 2),
        slices=(1, 2, 3),
        memory=tuple(rng.choice([None, 60, 90, 120]) for _ in range(3)),
        rate_bps=rng.choice([math.inf, 100.0, 20.0]),
        mini_batch=2,
    )
    decision = decide(given, None)
    assert decision.prediction.objective == pytest.approx(best_by_trying_all(given))


def test_plan_with_a_number_of_slices_that_is_not_allowed_is_refused() -> None:
    given = problem(slices=(1, 2))
    assert violations(given, (pipeline(2),)) == []
    (broken,) = violations(given, (pipeline(4),))
    assert re.search(r"cluster 0 .* 4 .* \(1, 2\)", broken)
