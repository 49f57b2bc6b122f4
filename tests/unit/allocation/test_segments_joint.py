"""`choose` for several clusters, against the enumeration of all combinations."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from collapipe.allocation.search import joint_clusters
from collapipe.allocation.search.joint_clusters import Candidates, choose, fair_weights

numbers = st.sampled_from([0.0, 0.5, 1.0, 2.0, 3.7, 5.0])


@st.composite
def candidates(draw: st.DrawFn) -> Candidates:
    count = draw(st.integers(1, 5))

    def column() -> np.ndarray:
        return np.array(draw(st.lists(numbers, min_size=count, max_size=count)))

    num_micro_batches = np.array(
        draw(st.lists(st.sampled_from([1, 2, 4]), min_size=count, max_size=count))
    )
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
    load = sum(float(one.head_load[i]) for one, i in zip(clusters, plans, strict=True))
    times = [one.delay_costs(load)[i] for one, i in zip(clusters, plans, strict=True)]
    return float(max(times)) + sum(
        float(one.summed_cost[i]) for one, i in zip(clusters, plans, strict=True)
    )


@given(st.lists(candidates(), min_size=1, max_size=3), st.sampled_from([1.0, 4.0, math.inf]))
def test_choice_is_the_best_of_all_combinations_within_the_limit(
    clusters: list[Candidates], limit: float
) -> None:
    allowed = [
        plans
        for plans in itertools.product(*(range(len(one.summed_cost)) for one in clusters))
        if sum(one.uses[0, i] for one, i in zip(clusters, plans, strict=True)) <= limit
    ]
    chosen = choose(clusters, np.array([limit]), math.inf)
    if not allowed:
        assert chosen is None
        return
    best = min(worth(clusters, plans) for plans in allowed)
    assert chosen is not None
    assert chosen.plans in allowed
    assert math.isclose(worth(clusters, chosen.plans), best, rel_tol=1e-9)
    assert choose(clusters, np.array([limit]), best * (1 - 1e-9)) is None


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


@given(st.lists(candidates(), min_size=2, max_size=3), st.sampled_from([4.0, math.inf]))
def test_choice_among_some_loads_is_within_the_limit_and_worth_what_it_says(
    clusters: list[Candidates], limit: float
) -> None:
    exact = choose(clusters, np.array([limit]), math.inf)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(joint_clusters, "_MOST_LOADS", 4)
        some = choose(clusters, np.array([limit]), math.inf)
    if some is None:
        return
    assert exact is not None
    assert sum(one.uses[0, i] for one, i in zip(clusters, some.plans, strict=True)) <= limit
    assert math.isclose(some.value, worth(clusters, some.plans), rel_tol=1e-9)
    assert some.value >= exact.value * (1 - 1e-9)


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
    best = min(
        max(time[i] for (time, _), i in zip(fronts, plans, strict=True))
        + sum(cost[i] for (_, cost), i in zip(fronts, plans, strict=True))
        for plans in itertools.product(*(range(len(time)) for time, _ in fronts))
    )
    assert bound(weights) <= best + 1e-9
    assert bound(weights) >= bound([1 / len(fronts)] * len(fronts)) - 1e-9
