"""The search of several clusters: what it computes in parallel, and when it ends."""

import itertools
import os
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from benchmarks.optimality import make_round
from hypothesis import given

from collapipe.allocation.round_model.limits import violations
from collapipe.allocation.round_model.prediction import predict
from collapipe.allocation.round_model.problem import LinkPlan, RoundPlan, RoundProblem
from collapipe.allocation.search import joint_search
from collapipe.allocation.search.pareto_front import (
    _LATE_WIDTH,
    ParetoFront,
    pareto_front,
)
from collapipe.allocation.search.segments import place_segments
from collapipe.errors import InfeasibleError

from .rounds import Round, rounds


def with_slower_device(problem: RoundProblem, n: int, factor: float) -> RoundProblem:
    """Returns the round with another speed of the first device of cluster n."""
    cluster = problem.clusters[n]
    first, *others = cluster.devices
    slower = replace(first, seconds_per_sample=factor * first.seconds_per_sample)
    cluster = replace(cluster, devices=(slower, *others))
    return replace(problem, clusters=(*problem.clusters[:n], cluster, *problem.clusters[n + 1 :]))


def different_clusters(num_clusters: int) -> Round:
    problems = [make_round(1, 3, 6, prefix=f"{n}-") for n in range(num_clusters)]
    clusters = tuple(one.clusters[0] for one in problems)
    problem = replace(problems[0], clusters=clusters)
    for n in range(num_clusters):
        problem = with_slower_device(problem, n, 1.0 + n / 10)
    return problem, [{pair: LinkPlan() for pair in cluster.links} for cluster in clusters]


def plans_or_none(drawn: Round) -> RoundPlan | None:
    try:
        return place_segments(*drawn)
    except InfeasibleError:
        return None


class Calls:
    """Counts the calls of functions of the search."""

    def __init__(self, patch: pytest.MonkeyPatch, *names: str) -> None:
        self.count = dict.fromkeys(names, 0)
        for name in names:
            patch.setattr(joint_search, name, self._counted(name, getattr(joint_search, name)))

    def _counted(self, name: str, function: Any) -> Any:
        def counted(*args: Any, **options: Any) -> Any:
            self.count[name] += 1
            return function(*args, **options)

        return counted


@given(rounds(clusters=(2, 6), codecs=2))
def test_plans_do_not_depend_on_the_number_of_processors(drawn: Round) -> None:
    found = []
    for processors in (1, 2, 5):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(os, "sched_getaffinity", lambda _, n=processors: set(range(n)))
            found.append(plans_or_none(drawn))
    assert found[0] == found[1] == found[2]


def test_late_search_with_known_plans_computes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    problem, assumed = different_clusters(3)
    start = place_segments(problem, assumed)
    assert violations(problem, start) == []
    calls = Calls(monkeypatch, "cluster_costs")
    found = place_segments(problem, assumed, starts=[start], is_late=lambda: True)
    assert found == start
    assert calls.count["cluster_costs"] == 0


@pytest.mark.parametrize("num_clusters", [2, 5])
@pytest.mark.parametrize("calls_in_time", range(0, 40, 3))
def test_search_that_becomes_late_keeps_the_best_plans_so_far(
    num_clusters: int, calls_in_time: int
) -> None:
    problem, assumed = different_clusters(num_clusters)
    start = place_segments(with_slower_device(problem, 0, 5.0), assumed)
    clock = itertools.count()
    found = place_segments(
        problem, assumed, starts=[start], is_late=lambda: next(clock) >= calls_in_time
    )
    assert violations(problem, found) == []
    assert predict(problem, found).objective <= predict(problem, start).objective * (1 + 1e-9)


def test_late_search_without_plans_is_narrow(monkeypatch: pytest.MonkeyPatch) -> None:
    problem, assumed = different_clusters(3)
    found: list[ParetoFront] = []
    monkeypatch.setattr(
        joint_search,
        "pareto_front",
        lambda *args, **options: found.append(pareto_front(*args, **options)) or found[-1],
    )
    wide = place_segments(problem, assumed)
    labels_when_wide = most_labels(found)
    found.clear()
    late = place_segments(problem, assumed, is_late=lambda: True)
    assert violations(problem, late) == []
    assert most_labels(found) <= _LATE_WIDTH < labels_when_wide
    assert predict(problem, late).objective >= predict(problem, wide).objective * (1 - 1e-9)


def most_labels(fronts: list[ParetoFront]) -> int:
    """Returns the most labels of a row in a layer of a front that has a device."""
    return max(
        int(np.bincount(layer["row"]).max())
        for front in fronts
        for layer in front.layers[1:]
        if len(layer)
    )
