"""The search of several clusters: what it computes in parallel, when it ends, and what it chooses."""

import itertools
import math
import os
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from benchmarks.optimality import make_round
from hypothesis import given
from hypothesis import strategies as st

from collapipe.allocation import LinkPlan, RoundPlan, RoundProblem, predict, violations
from collapipe.allocation.search import joint_clusters, joint_search
from collapipe.allocation.search.joint_clusters import Candidates, choose, fair_weights
from collapipe.allocation.search.pareto_front import (
    _LATE_WIDTH,
    ParetoFront,
    pareto_front,
)
from collapipe.allocation.search.segments import place_segments
from collapipe.errors import InfeasibleError

from .changes import with_cluster
from .rounds import Round, rounds


def with_slower_device(problem: RoundProblem, n: int, factor: float) -> RoundProblem:
    """Returns the round with another speed of the first device of cluster n."""
    first, *others = problem.clusters[n].devices
    slower = replace(first, seconds_per_sample=factor * first.seconds_per_sample)
    return with_cluster(problem, n, devices=(slower, *others))


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
    monkeypatch.setattr(joint_search, "cluster_costs", None)  # It cannot be called.
    assert place_segments(problem, assumed, starts=[start], is_late=lambda: True) == start


@pytest.mark.parametrize("num_clusters", [2, 5])
@pytest.mark.parametrize("calls_in_time", range(0, 40, 8))
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
    labels: list[int] = []
    """The most labels of a row of each layer that has a device."""

    def recorded(*args: Any, **options: Any) -> ParetoFront:
        front = pareto_front(*args, **options)
        labels.extend(int(np.bincount(x["row"]).max()) for x in front.layers[1:] if len(x))
        return front

    monkeypatch.setattr(joint_search, "pareto_front", recorded)
    wide = place_segments(problem, assumed)
    assert max(labels) > _LATE_WIDTH
    labels.clear()
    late = place_segments(problem, assumed, is_late=lambda: True)
    assert violations(problem, late) == []
    assert max(labels) <= _LATE_WIDTH
    assert predict(problem, late).objective >= predict(problem, wide).objective * (1 - 1e-9)


# --- `choose` for several clusters, against the enumeration of all combinations

numbers = st.sampled_from([0.0, 0.5, 1.0, 2.0, 3.7, 5.0])


@st.composite
def candidates(draw: st.DrawFn) -> Candidates:
    count = draw(st.integers(1, 5))

    def column(values: st.SearchStrategy[float] = numbers) -> np.ndarray:
        return np.array(draw(st.lists(values, min_size=count, max_size=count)))

    num_micro_batches = column(st.sampled_from([1.0, 2.0, 4.0]))
    return Candidates(
        delay_cost=column(),
        bottleneck_price=column(),
        bottleneck=column(),
        load_price=column(),
        last_seconds=0.7 + 1.0 / num_micro_batches,
        summed_cost=column(),
        head_load=0.7 * num_micro_batches + 1.0,
        uses=column()[None, :],
    )


def worth(clusters: list[Candidates], plans: tuple[int, ...]) -> float:
    chosen = list(zip(clusters, plans, strict=True))
    load = sum(float(one.head_load[i]) for one, i in chosen)
    times = [float(one.delay_costs(load)[i]) for one, i in chosen]
    return max(times) + sum(float(one.summed_cost[i]) for one, i in chosen)


def is_allowed(clusters: list[Candidates], plans: tuple[int, ...], limit: float) -> bool:
    return sum(one.uses[0, i] for one, i in zip(clusters, plans, strict=True)) <= limit


def combinations(columns: list[np.ndarray]) -> Iterator[tuple[int, ...]]:
    return itertools.product(*(range(len(column)) for column in columns))


@given(st.lists(candidates(), min_size=1, max_size=3), st.sampled_from([1.0, 4.0, math.inf]))
def test_choice_is_the_best_of_all_combinations_within_the_limit(
    clusters: list[Candidates], limit: float
) -> None:
    every = combinations([one.summed_cost for one in clusters])
    allowed = [plans for plans in every if is_allowed(clusters, plans, limit)]
    chosen = choose(clusters, np.array([limit]), math.inf)
    if not allowed:
        assert chosen is None
        return
    best = min(worth(clusters, plans) for plans in allowed)
    assert chosen is not None
    assert chosen.plans in allowed
    assert math.isclose(worth(clusters, chosen.plans), best, rel_tol=1e-9)
    assert choose(clusters, np.array([limit]), best * (1 - 1e-9)) is None
    # Of many loads, only some are tried.
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(joint_clusters, "_MOST_LOADS", 4)
        some = choose(clusters, np.array([limit]), math.inf)
    if some is not None:
        assert is_allowed(clusters, some.plans, limit)
        assert math.isclose(some.value, worth(clusters, some.plans), rel_tol=1e-9)
        assert some.value >= best * (1 - 1e-9)


def test_choice_finds_plans_that_leave_the_edge_server_idle() -> None:
    none, loads = np.zeros(3), np.array([1.8, 1.4, 0.0])

    def cluster(*delay_costs: float) -> Candidates:
        return Candidates(
            np.array(delay_costs), none, none, none + 4.0, loads, none, loads, none[None, :]
        )

    # The sum of all changes of the load is not quite 0.
    chosen = choose([cluster(10, 12, 15), cluster(11, 16, 17)], np.array([math.inf]), math.inf)
    assert chosen is not None
    assert (chosen.plans, chosen.value) == ((2, 2), 17.0)


@given(st.lists(candidates(), min_size=1, max_size=3))
def test_fair_weights_bound_every_combination_and_no_even_split_bounds_better(
    clusters: list[Candidates],
) -> None:
    fronts = [(one.delay_cost, one.summed_cost) for one in clusters]
    weights = fair_weights(fronts)

    def bound(shares: list[float]) -> float:
        return sum(
            float(np.min(w * time + cost)) for w, (time, cost) in zip(shares, fronts, strict=True)
        )

    assert math.isclose(sum(weights), 1.0, rel_tol=1e-9)
    assert min(weights) >= 0
    best = math.inf
    for plans in combinations([time for time, _ in fronts]):
        chosen = [(time[i], cost[i]) for (time, cost), i in zip(fronts, plans, strict=True)]
        best = min(best, max(time for time, _ in chosen) + sum(cost for _, cost in chosen))
    assert bound(weights) <= best + 1e-9
    assert bound(weights) >= bound([1 / len(fronts)] * len(fronts)) - 1e-9
