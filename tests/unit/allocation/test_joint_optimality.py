"""The exact programmes of `benchmarks` against the enumeration of all plans, and `dssra` against a programme."""

import math
from dataclasses import replace

import pytest
from benchmarks.joint_optimality import compare, make_shared_round, optimal_plans
from benchmarks.optimality import make_round, optimal_plan

from collapipe.allocation import LinkPlan, predict, violations
from collapipe.allocation.search.power import allocate

from .changes import with_cluster
from .enumeration import best_plan
from .grids import every_plan


@pytest.mark.parametrize("every_host", [False, True])
@pytest.mark.parametrize("seed", range(4))
def test_optimal_plan_is_the_best_of_all(seed: int, every_host: bool) -> None:
    problem = replace(
        make_round(seed, *((3, 6), (4, 5))[seed % 2]),
        blocks_on_control_unit=every_host,
        blocks_on_edge_server=every_host,
    )
    best = best_plan(problem, [{pair: LinkPlan() for pair in problem.clusters[0].links}])
    assert best is not None
    found = predict(problem, optimal_plan(problem)).objective
    assert math.isclose(found, predict(problem, best).objective, rel_tol=1e-9)


@pytest.mark.parametrize("radio", [False, True])
@pytest.mark.parametrize("seed", [0, 1])
def test_optimal_plans_of_a_shared_channel_are_the_best_of_all(seed: int, radio: bool) -> None:
    problem = make_shared_round(seed, radio=radio)
    num_blocks, options = (3, (1, 4, 8)) if len(problem.clusters) == 1 else (2, (4,))
    problem = replace(problem, model=replace(problem.model, num_blocks=num_blocks))
    for n, cluster in enumerate(problem.clusters):
        changes = {"micro_batch_options": options, "previous": None}
        problem = with_cluster(problem, n, devices=cluster.devices[:2], **changes)
    best = math.inf
    for plans in every_plan(problem):
        found = allocate(problem, plans)
        if not violations(problem, found.plans):
            best = min(best, found.prediction.objective)
    exact = predict(problem, optimal_plans(problem)).objective
    assert math.isclose(exact, best, rel_tol=1e-4)


@pytest.mark.parametrize(
    ("radio", "seeds"),
    [
        # In the last two, an idle device has to take the place of another one.
        (False, (100, 101, 119, 372)),
        # In the last two, one device has to take the blocks of two.
        (True, (3, 27, 78)),
    ],
)
def test_decisions_are_near_the_joint_optimum(radio: bool, seeds: tuple[int, ...]) -> None:
    gaps = [compare(seed, radio=radio).gap for seed in seeds]
    print(f"gaps in percent: {gaps}")
    assert min(gaps) > -0.01
    assert max(gaps) <= 0.5
