"""What is compiled before a decision is all that a decision needs."""

import random
from dataclasses import replace
from types import ModuleType

import pytest
from benchmarks.optimality import make_round

from collapipe.allocation import LinkPlan
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


@pytest.mark.parametrize("module", [labels, segment_bounds])
def test_compiled_functions_call_only_those_of_their_own_file(module: ModuleType) -> None:
    # numba compares the stored result with the file of the function only.
    functions = [one.py_func for one in vars(module).values() if hasattr(one, "py_func")]
    own = [function for function in functions if function.__module__ == module.__name__]
    assert own
    for function in own:
        for name in function.__code__.co_names:
            called = getattr(getattr(module, name, None), "py_func", function)
            assert called.__module__ == module.__name__, (function.__name__, name)


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
