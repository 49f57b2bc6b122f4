"""`place_segments` against the exhaustive enumeration of all plans."""

import math
import random
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from collapipe.allocation import (
    BlockShare,
    ClusterProblem,
    Convergence,
    Host,
    LinkPlan,
    ModelCost,
    RoundPlan,
    RoundProblem,
    Segment,
    WiredLink,
    predict,
    violations,
)
from collapipe.allocation.round_model.in_flight_windows import WINDOW_SLACK, window_slack
from collapipe.allocation.search import joint_search
from collapipe.allocation.search.link_tables import AssumedLinks
from collapipe.allocation.search.segments import place_segments
from collapipe.errors import InfeasibleError, InvalidInputError

from .changes import with_cluster, with_devices, with_hosts
from .enumeration import best_plan
from .rounds import Round, rounds

EVERY_HOST = {"blocks_on_control_unit": True, "blocks_on_edge_server": True}


def check(
    problem: RoundProblem,
    assumed: Sequence[AssumedLinks],
    *,
    all_windows: bool = False,
    rel_tol: float = 1e-9,
) -> RoundPlan | None:
    """Fails if the plan of `place_segments` is not feasible or not as good as the best of all plans; returns it."""
    best = best_plan(problem, assumed, all_windows=all_windows)
    if best is None:
        with pytest.raises(InfeasibleError):
            place_segments(problem, assumed)
        return None
    found = place_segments(problem, assumed)
    assert violations(problem, found) == []
    expected = predict(problem, best).objective
    assert math.isclose(predict(problem, found).objective, expected, rel_tol=rel_tol, abs_tol=1e-12)
    most = problem.in_flight_limit or math.inf
    assert all(stage.in_flight <= most for plan in found for stage in plan.stages)
    again = place_segments(problem, assumed, starts=[found])
    assert math.isclose(predict(problem, again).objective, expected, rel_tol=rel_tol, abs_tol=1e-12)
    return found


HALVES = (BlockShare(0.7, 0.6, 1.2), BlockShare(1.3, 1.4, 0.8))
SMALL = {"devices": (1, 2), "blocks": (3, 4)}
ROUNDS = {
    "few clusters": rounds(clusters=(1, 2)),
    "one cluster": rounds(clusters=(1, 1), devices=(2, 4), blocks=(3, 5), max_options=3),
    "three clusters": rounds(clusters=(3, 3), **SMALL),
    "lossy codecs": rounds(clusters=(1, 2), codecs=3, **SMALL),
    "lossy uploads": rounds(clusters=(1, 2), upload_codecs=3, **SMALL),
    "blocks on every host": rounds((2, 2), (1, 2), (2, 2), max_options=1, **EVERY_HOST),
    "half blocks": rounds(clusters=(1, 2), blocks=(3, 5), pattern=HALVES),
    "half blocks on every host": rounds((1, 1), (1, 3), (2, 4), pattern=HALVES, **EVERY_HOST),
}


@pytest.mark.parametrize("kind", ROUNDS)
@given(data=st.data())
def test_plan_is_the_best_of_all(kind: str, data: st.DataObject) -> None:
    check(*data.draw(ROUNDS[kind]))


@given(rounds(clusters=(1, 2), codecs=2, **SMALL))
def test_plan_with_a_frozen_embedding_is_the_best_of_all(drawn: Round) -> None:
    given, assumed = drawn
    check(replace(given, model=replace(given.model, first_trained_unit=1)), assumed)


@given(rounds(clusters=(1, 2), devices=(1, 2), blocks=(2, 3), **EVERY_HOST), st.data())
def test_plan_with_split_backward_passes_is_the_best_of_all(
    drawn: Round, data: st.DataObject
) -> None:
    # Windows are wide enough. For narrow ones, the search assumes that whole backward passes are waited for.
    shares: dict[str, float] = {}

    def splits(host: Host) -> Host:
        if host.host_id not in shares:
            shares[host.host_id] = data.draw(st.sampled_from([0.0, 0.25, 1 / 3]))
        return replace(host, deferred_share=shares[host.host_id], memory_bytes=None)

    problem, assumed = drawn
    check(replace(with_hosts(problem, splits), in_flight_limit=None), assumed)


@given(
    rounds(clusters=(1, 1), devices=(1, 3), blocks=(2, 4)),
    st.booleans(),
    st.booleans(),
)
def test_plan_with_blocks_on_other_hosts_is_the_best_of_all(
    drawn: Round, first: bool, last: bool
) -> None:
    problem, assumed = drawn
    check(replace(problem, blocks_on_control_unit=first, blocks_on_edge_server=last), assumed)


@given(rounds(clusters=(4, 4), devices=(1, 2), blocks=(2, 3)))
def test_plan_of_four_clusters_is_nearly_the_best_of_all_and_late_ones_are_possible(
    drawn: Round,
) -> None:
    problem, _ = drawn
    best = check(*drawn, rel_tol=0.02)
    if best is not None:
        found = place_segments(*drawn, is_late=lambda: True)
        assert violations(problem, found) == []
        objective = predict(problem, best).objective
        assert predict(problem, found).objective >= objective * (1 - 1e-9)


@given(rounds(clusters=(1, 1), devices=(1, 2), blocks=(3, 4), micro_batches=(2, 4)))
def test_plan_is_the_best_of_all_with_any_windows(drawn: Round) -> None:
    check(*drawn, all_windows=True)


@given(rounds(clusters=(2, 3), devices=(1, 3), blocks=(3, 4)))
def test_plan_is_the_best_of_all_where_the_first_search_finds_a_bad_one(drawn: Round) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(joint_search, "FIRST_WIDTH", 1)
        check(*drawn)


def test_slow_device_gets_the_smaller_half_of_a_layer() -> None:
    # The fast device takes 1 s for a block of mean work, and the slow one 2 s.
    problem, assumed = line(seconds=(2.0, 1.0), bps=1e12, options=(8,), mini_batch=32)
    halves = replace(problem.model, num_blocks=2, pattern=HALVES)
    (plan,) = place_segments(replace(problem, model=halves), assumed)
    assert plan.segments == {"device-0": Segment(0, 1), "device-1": Segment(1, 2)}


# --- small rounds with a known best plan


def line(
    seconds: tuple[float, ...] = (1.0, 1.0),
    memory: tuple[int | None, ...] | None = None,
    bps: float = 1e6,
    options: tuple[int, ...] = (4,),
    **changes: object,
) -> Round:
    """Builds one cluster in which all hosts are linked; `seconds` are those of one block for 4 samples."""
    limits = memory or (None,) * len(seconds)
    devices = tuple(
        Host(f"device-{k}", one / 4, memory_bytes=limit)
        for k, (one, limit) in enumerate(zip(seconds, limits, strict=True))
    )
    names = ["control", *(device.host_id for device in devices), "edge"]
    links = {(a, b): WiredLink(bps) for a in names for b in names if a != b}
    cluster = ClusterProblem(Host("control", 0.0), devices, Host("edge", 0.0), links, options)
    model = ModelCost(num_blocks=4, block_state_bytes=10, block_stash_bytes=1, activation_bytes=100)
    problem = RoundProblem((cluster,), model, mini_batch=4)
    return replace(problem, **changes), [{pair: LinkPlan(share=math.inf) for pair in links}]


def blocks_of(problem: RoundProblem, assumed: Sequence[AssumedLinks]) -> dict[str, int]:
    (plan,) = place_segments(problem, assumed)
    return {host: segment.num_blocks for host, segment in plan.segments.items()}


def test_blocks_follow_speed() -> None:
    assert blocks_of(*line(seconds=(1.0, 3.0), options=(4,))) == {"device-0": 3, "device-1": 1}
    assert blocks_of(*line(bps=100.0)) == {"device-0": 4}  # The links are too slow for more.


def test_limit_on_the_convergence_term_changes_codecs_and_segments() -> None:
    problem, assumed = line(bps=900.0, codecs=("fp32", "int8"))
    values = []
    for limit, codecs in (
        (math.inf, ["int8"] * 3),
        (2.5 * 2.0**-7, ["int8"] * 2),  # One device less costs less than fp32.
        (0.0, ["fp32"] * 2),
    ):
        convergence = Convergence((0.0, 0.0, 0.0, 1.0, 0.0), limit=limit)
        plans = place_segments(replace(problem, convergence=convergence), assumed)
        assert [link.codec for link in plans[0].links] == codecs
        values.append(predict(problem, plans).objective)
    assert values == sorted(set(values))


@pytest.mark.parametrize(
    ("push_bps", "limit", "price", "codec"),
    [
        (math.inf, math.inf, 10.0, "fp32"),
        (20.0, math.inf, 10.0, "int8"),
        (0.1, math.inf, 10.0, "top_k"),
        (0.1, math.inf, 0.0, "top_k"),
        (0.1, 0.5, 0.0, "int8"),
        (0.1, 2.0**-8, 0.0, "fp32"),
    ],
)
def test_codec_of_uploads_follows_the_rate_of_the_uplink_and_the_limit_or_price_of_its_error(
    push_bps: float, limit: float, price: float, codec: str
) -> None:
    constants = (0.0, 0.0, 0.0, 1.0, 0.0)
    problem, assumed = line(convergence=Convergence(constants, weight=price, limit=limit))
    problem = replace(problem, model=replace(problem.model, lossy_uploads=True))
    problem = with_devices(problem, push_bps=push_bps)
    problem = with_cluster(problem, upload_codecs=("fp32", "int8", "top_k"))
    (plan,) = place_segments(problem, assumed)
    assert violations(problem, (plan,)) == []
    assert plan.upload_codec == codec


def test_windows_are_no_larger_than_their_delay_needs() -> None:
    problem, assumed = line(seconds=(1.0, 1.0, 1.0), bps=1e9, options=(16,), mini_batch=16)
    problem = replace(problem, model=replace(problem.model, num_blocks=3))
    (plan,) = place_segments(problem, assumed)
    needed = [4, 4, 3, 2, 1]  # The loops have 3, 3, 2, 1 and 0 blocks, and links.
    assert [stage.in_flight for stage in plan.stages] == [n + WINDOW_SLACK for n in needed]
    (after,) = place_segments(with_devices(problem, deferred_share=1 / 3), assumed)
    # A stage waits for two thirds of each block after its own, but holds its own until its last gradient.
    slack = [WINDOW_SLACK, *[window_slack(1.0)] * 3, WINDOW_SLACK]
    assert [stage.in_flight for stage in after.stages] == [
        n + more for n, more in zip([3, 3, 2, 2, 1], slack, strict=True)
    ]

    def seconds(stage: int, window: int) -> float:
        stages = list(plan.stages)
        stages[stage] = replace(stages[stage], in_flight=max(1, window))
        return predict(problem, (replace(plan, stages=tuple(stages)),)).round_seconds

    enough = predict(problem, (plan,)).round_seconds
    assert [seconds(i, n) for i, n in enumerate(needed)] == [enough] * 5
    assert all(seconds(i, n - 1) > enough for i, n in enumerate(needed[:-1]))


@pytest.mark.parametrize(
    ("memory", "window"), [(26, 1), (31, 1), (32, 2), (37, 2), (38, 3), (99, 3)]
)
def test_windows_of_heads_share_the_memory_of_the_edge_server(memory: int, window: int) -> None:
    problem, assumed = line(options=(4,))
    model = replace(problem.model, head_state_bytes=10, head_stash_bytes=1, activation_bytes=1)
    one = replace(problem.clusters[0], edge_server=Host("edge", 0.0, memory_bytes=memory))
    both = replace(problem, clusters=(one, one), model=model)
    plans = place_segments(both, assumed * 2)
    assert {plan.stages[-1].in_flight for plan in plans} == {window}
    assert violations(both, plans) == []


def test_start_with_better_links_of_its_own_is_kept() -> None:
    problem, assumed = line(bps=1000.0)
    slow = [{pair: replace(plan, share=500.0) for pair, plan in assumed[0].items()}]
    start = place_segments(problem, assumed)
    assert place_segments(problem, slow, starts=[start]) == start
    assert place_segments(problem, slow) != start


def test_start_that_is_not_possible_any_more_is_no_bound() -> None:
    problem, assumed = line()
    start = place_segments(problem, assumed)
    tight, _ = line(memory=(12, None))
    assert violations(tight, start)
    found = place_segments(tight, assumed, starts=[start])
    assert set(found[0].segments) == {"device-1"}
    less, fewer = line(seconds=(1.0,))
    assert set(place_segments(less, fewer, starts=[start])[0].segments) == {"device-0"}


def test_too_little_memory_says_how_many_blocks_fit() -> None:
    problem, assumed = line(memory=(209, 219))
    problem = replace(problem, model=replace(problem.model, block_stash_bytes=0))
    with pytest.raises(InfeasibleError, match=r"cluster 0: .*1 of 4 blocks .*210 B"):
        place_segments(problem, assumed)


# --- corners of the search


def chain(seed: int, num_devices: int = 8) -> Round:
    """Builds devices with memory for one block each, and few links: one chain of all of them, and some dead ends."""
    numbers = random.Random(seed)
    problem, assumed = line(
        seconds=tuple(numbers.uniform(1, 3) for _ in range(num_devices)),
        memory=(20,) * num_devices,
        model=ModelCost(num_blocks=num_devices, block_state_bytes=10, activation_bytes=1),
    )
    names = [device.host_id for device in problem.clusters[0].devices]
    numbers.shuffle(names)
    pairs = list(pairwise(["control", *names, "edge"]))
    pairs += [tuple(numbers.sample(names, 2)) for _ in range(num_devices)]
    links = {pair: WiredLink(1e6) for (a, b) in pairs for pair in ((a, b), (b, a))}
    return with_cluster(problem, links=links), [{pair: assumed[0][pair] for pair in links}]


@pytest.mark.parametrize("seed", range(6))
def test_late_search_goes_on_until_it_has_a_plan(seed: int) -> None:
    problem, assumed = chain(seed)
    found = place_segments(problem, assumed, is_late=lambda: True)
    assert violations(problem, found) == []


def test_cluster_without_devices_or_with_too_many_is_refused() -> None:
    with pytest.raises(InfeasibleError, match="cluster 0 .*no devices"):
        place_segments(*line(seconds=()))
    with pytest.raises(InvalidInputError, match=r"cluster 0 .*\b41\b.*\b40\b"):
        place_segments(*line(seconds=(1.0,) * 41))
    problem, assumed = line(seconds=(1.0,) * 40)
    assert violations(problem, place_segments(problem, assumed)) == []


def test_edge_server_without_own_work_may_share_blocks_among_clusters() -> None:
    problem, assumed = line(seconds=(1.0, 2.0), options=(1, 2, 4))
    edge = Host("edge", 0.6, seconds_per_micro_batch=0.3)
    clusters = tuple(replace(problem.clusters[0], edge_server=edge) for _ in range(3))
    problem = replace(problem, clusters=clusters, blocks_on_edge_server=True)
    assert violations(problem, place_segments(problem, assumed * 3)) == []
