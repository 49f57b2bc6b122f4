"""The exact programme of `benchmarks.joint_optimality` against the convex solver, and `dssra` against the programme."""

import math
from dataclasses import replace

import pytest
from benchmarks.joint_optimality import compare, make_shared_round, optimal_plans

from collapipe.allocation.round_model.limits import violations
from collapipe.allocation.round_model.prediction import predict
from collapipe.allocation.search.power import allocate

from .grids import every_plan


@pytest.mark.parametrize("radio", [False, True])
@pytest.mark.parametrize("seed", [0, 1])
def test_optimal_plans_are_the_best_of_all(seed: int, radio: bool) -> None:
    problem = make_shared_round(seed, radio=radio)
    options = (1, 4, 8) if len(problem.clusters) == 1 else (1, 4)
    clusters = tuple(
        replace(cluster, devices=cluster.devices[:2], micro_batch_options=options, previous=None)
        for cluster in problem.clusters
    )
    problem = replace(problem, clusters=clusters, model=replace(problem.model, num_blocks=3))
    best = math.inf
    for plans in every_plan(problem):
        found = allocate(problem, plans)
        if not violations(problem, found.plans):
            best = min(best, found.prediction.objective)
    exact = predict(problem, optimal_plans(problem)).objective
    print(f"exact {exact}, best of all plans {best}")
    assert math.isclose(exact, best, rel_tol=1e-4)


@pytest.mark.parametrize(
    ("radio", "seeds"),
    [
        # In the last two, an idle device has to take the place of another one.
        (False, (*range(100, 104), 119, 372)),
        # In the last three, one device has to take the blocks of two.
        (True, (3, 6, 27, 43, 78)),
    ],
)
def test_decisions_are_near_the_joint_optimum(radio: bool, seeds: tuple[int, ...]) -> None:
    gaps = [compare(seed, radio=radio).gap for seed in seeds]
    print(f"gaps in percent: {gaps}")
    assert min(gaps) > -0.01
    assert max(gaps) <= 0.5
