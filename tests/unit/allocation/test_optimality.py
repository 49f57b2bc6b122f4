"""The exact programme of `benchmarks.optimality` against the exhaustive enumeration of all plans."""

import math
from dataclasses import replace

import pytest
from benchmarks.optimality import make_round, optimal_plan

from collapipe.allocation.round_model.prediction import predict
from collapipe.allocation.round_model.problem import LinkPlan

from .enumeration import best_plan


@pytest.mark.parametrize("every_host", [False, True])
@pytest.mark.parametrize("seed", range(10))
def test_optimal_plan_is_the_best_of_all(seed: int, every_host: bool) -> None:
    num_devices, num_blocks = ((3, 6), (4, 5))[seed % 2]
    problem = replace(
        make_round(seed, num_devices, num_blocks),
        blocks_on_control_unit=every_host,
        blocks_on_edge_server=every_host,
    )
    best = best_plan(problem, [{pair: LinkPlan() for pair in problem.clusters[0].links}])
    assert best is not None
    found = predict(problem, optimal_plan(problem)).objective
    assert math.isclose(found, predict(problem, best).objective, rel_tol=1e-9)
