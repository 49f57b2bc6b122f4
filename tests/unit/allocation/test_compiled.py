"""What is compiled before a decision is all that a decision needs."""

import random
from dataclasses import replace

from benchmarks.optimality import make_round

from collapipe.allocation.round_model.problem import LinkPlan
from collapipe.allocation.search import labels, segment_bounds
from collapipe.allocation.search.labels import compile_search
from collapipe.allocation.search.segments import place_segments


def compiled_types() -> dict[str, int]:
    """Returns for how many types of arguments each function was compiled."""
    functions = {**vars(labels), **vars(segment_bounds)}
    return {
        name: len(function.signatures)
        for name, function in functions.items()
        if hasattr(function, "signatures")
    }


def test_searches_compile_nothing_that_was_not_compiled_before() -> None:
    compile_search()
    before = compiled_types()
    assert before["with_segments"] == 1
    numbers = random.Random(0)
    for seed in range(4):
        problem = make_round(seed, numbers.randint(1, 4), 6)
        for clusters in (problem.clusters, problem.clusters * 2):
            assumed = [{pair: LinkPlan() for pair in cluster.links} for cluster in clusters]
            place_segments(replace(problem, clusters=clusters), assumed)
    assert compiled_types() == before
