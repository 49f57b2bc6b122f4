from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from collapipe.allocation import (
    ClusterPlan,
    RoundProblem,
    WiredLink,
    decide_round,
    reference_seconds,
    violations,
)
from collapipe.errors import InfeasibleError, InvalidInputError

from .changes import with_cluster, with_devices
from .problems import (
    HALVES,
    Strategy,
    every_feasible_split,
    problem,
    problems,
    segments_of,
    slowest,
    split_of,
)


def strategy(name: str, segments: Sequence[Sequence[int]] = ()) -> Strategy:
    return lambda problem: decide_round(problem, name, segments=segments).plans


place_equally = strategy("pipeline")
place_proportionally = strategy("proportional")
place_on_the_fewest = strategy("titanic")
place_on_the_best_number = strategy("titanic_best")


def test_unknown_strategy_lists_the_known_ones() -> None:
    with pytest.raises(InvalidInputError, match="'fastest'.*dssra, pipeline"):
        strategy("fastest")(problem())


def units_of(plan: ClusterPlan) -> list[tuple[str, int, int]]:
    return [(stage.host_id, stage.start_unit, stage.stop_unit) for stage in plan.stages]


def windows_of(given_problem: RoundProblem) -> list[int]:
    (plan,) = place_equally(given_problem)
    return [stage.in_flight for stage in plan.stages]


def with_round_trips(given_problem: RoundProblem, seconds: float) -> RoundProblem:
    links = dict.fromkeys(given_problem.clusters[0].links, WiredLink(1e12, seconds))
    return with_cluster(given_problem, links=links)


def with_slow_links(given_problem: RoundProblem, seconds: float) -> RoundProblem:
    """Makes every link take some time for each micro-batch in each direction."""
    links = dict.fromkeys(given_problem.clusters[0].links, WiredLink(8.0, seconds))
    model = replace(given_problem.model, activation_bytes=seconds)
    return with_cluster(replace(given_problem, model=model), links=links)


@pytest.mark.parametrize(
    ("place", "given_problem", "split"),
    [
        # The second device has 3 blocks of 10 bytes. Each holds 2 micro-batches of 1 byte.
        (place_equally, problem([1, 1], memory=[None, 36]), (3, 3)),
        (place_proportionally, problem([1, 2, 4], 7), (1, 2, 4)),
        (place_proportionally, problem([0.1, 2, 2]), (0, 3, 3)),
        # Those that were registered first are preferred.
        (place_proportionally, problem([1, 1, 1], 4), (2, 2, 0)),
        # With both devices, the window of the first is 3. Then 3 of its blocks, of 5 + 18 bytes, fit into 89 bytes,
        # and 1 block fits on the second. Alone the first has a window of 2, and all 5 blocks of 5 + 12 bytes fit.
        (
            place_proportionally,
            problem([1, 3], 5, memory=[89, 28], cost=(5, 6), num_micro_batches=8),
            (5, 0),
        ),
        (place_proportionally, problem([1, 1, 1]), (2, 2, 2)),
        (place_on_the_fewest, problem([1, 1, 1]), (6, 0, 0)),
        (place_on_the_best_number, problem([1, 1, 1]), (2, 2, 2)),
        (place_on_the_best_number, problem([1, 1, 1], 2), (1, 1, 0)),
        (place_on_the_best_number, with_slow_links(problem([1, 1]), 0.1), (3, 3)),
        (place_on_the_best_number, with_slow_links(problem([1, 1]), 10.0), (6, 0)),
        # 2 blocks of 10 bytes, each with 4 micro-batches of 1 byte, need 28 bytes on the first device.
        (place_on_the_fewest, problem([1, 2, 3], memory=[28, 28, 28]), (2, 2, 2)),
        (place_on_the_best_number, problem([1, 2, 3], memory=[28, 28, 28]), (2, 2, 2)),
    ],
)
def test_split_follows_speed_links_and_memory(
    place: Strategy, given_problem: RoundProblem, split: tuple[int, ...]
) -> None:
    assert split_of(given_problem, place(given_problem)) == split


@given(problems())
def test_segments_of_every_placement_are_contiguous_and_cover_all_blocks(
    given_problem: RoundProblem,
) -> None:
    for strategy in (place_equally, place_proportionally):
        try:
            placed = segments_of(given_problem, strategy)
        except InfeasibleError:
            continue
        edges = [0, *(segment.stop_block for segment in placed.values())]
        assert [segment.start_block for segment in placed.values()] == edges[:-1]
        assert edges == sorted(set(edges))
        assert edges[-1] == given_problem.model.num_blocks
        order = [device.host_id for device in given_problem.clusters[0].devices]
        assert list(placed) == [host_id for host_id in order if host_id in placed]


@pytest.mark.parametrize(
    ("num_micro_batches", "in_flight", "windows"),
    [
        (8, None, [5 + 2, 4 + 2, 3 + 2, 2 + 2, 1]),  # the stages to the head, and the slack
        (3, None, [3, 3, 3, 3, 1]),
        (8, 1, [1, 1, 1, 1, 1]),
        (8, 6, [6, 6, 6, 6, 1]),
        (8, 99, [8, 8, 8, 8, 1]),
    ],
)
def test_window_without_measured_transfers_is_the_limit_or_counts_the_stages_to_the_head(
    num_micro_batches: int, in_flight: int | None, windows: list[int]
) -> None:
    sizes = {"num_micro_batches": num_micro_batches, "in_flight": in_flight}
    assert windows_of(problem(speeds=[1, 1, 1], **sizes)) == windows


@given(st.integers(1, 12), st.integers(0, 12))
def test_equal_segments_differ_by_at_most_one_block(num_devices: int, more: int) -> None:
    num_blocks = num_devices + more
    given_problem = problem(speeds=[1.0] * num_devices, num_blocks=num_blocks)
    sizes = [s.num_blocks for s in segments_of(given_problem, place_equally).values()]
    assert len(sizes) == num_devices
    assert sum(sizes) == num_blocks
    assert max(sizes) - min(sizes) <= 1


def test_equal_segments_with_more_devices_than_blocks_are_infeasible() -> None:
    with pytest.raises(
        InfeasibleError, match=r"^3 devices cannot share 2 blocks.*devices_per_cluster"
    ):
        place_equally(problem(speeds=[1, 1, 1], num_blocks=2))


@pytest.mark.parametrize(
    ("place", "given_problem", "message"),
    [
        (place_equally, problem([]), "no devices"),
        (place_proportionally, problem([]), "no devices"),
        (place_equally, problem([1, 1], memory=[None, 35]), r"device-1 .*3 of 6.*36 B .* 35 B"),
        (
            place_proportionally,
            problem([1, 1, 1], memory=[9, 11, 10], num_micro_batches=8),
            r"12 B .*device-1, .* 11 B",
        ),
        (
            place_proportionally,
            problem([1, 1], memory=[30, 25], num_micro_batches=1, cost=(9, 1)),
            r"\b2 devices .*5 of 6 blocks",
        ),
        (
            strategy("manual", [[6, 0]]),
            problem([1, 1], memory=[71, None]),
            r"device-0 .*6 of 6.*72 B .* 71 B",
        ),
        (strategy("vanilla_fl"), problem([1, 1], memory=[9, 65]), r"66 B.*device-1, .* 65 B"),
    ],
)
def test_placement_without_enough_memory_names_device_need_and_limit(
    place: Strategy, given_problem: RoundProblem, message: str
) -> None:
    with pytest.raises(InfeasibleError, match=message):
        place(given_problem)


@pytest.mark.parametrize(("memory", "recomputes"), [(36, False), (33, True)])
def test_baseline_recomputes_where_it_would_have_no_plan_otherwise(
    memory: int, recomputes: bool
) -> None:
    # 3 blocks of 10 bytes, and 3 bytes for each of 2 micro-batches, or for one of them with recomputation.
    allowed = replace(
        problem(speeds=[1, 1], num_blocks=6, memory=[None, memory]),
        recompute_options=(False, True),
    )
    (plan,) = place_equally(allowed)
    assert [stage.recompute for stage in plan.stages] == [recomputes] * 3 + [False]


@given(problems())
def test_proportional_and_titanic_are_the_best_of_all_splits(given_problem: RoundProblem) -> None:
    splits = list(every_feasible_split(given_problem))
    if not splits:
        for strategy in (place_proportionally, place_on_the_fewest):
            with pytest.raises(InfeasibleError):
                strategy(given_problem)
        return

    def count(split: tuple[int, ...]) -> int:
        return sum(map(bool, split))

    def seconds(split: tuple[int, ...]) -> float:
        return slowest(given_problem, split)

    # They fit into memory with the windows of these splits.
    fast = split_of(given_problem, place_proportionally(given_problem))
    small = split_of(given_problem, place_on_the_fewest(given_problem))
    assert {fast, small} <= set(splits)
    assert (seconds(fast), count(fast)) == min((seconds(one), count(one)) for one in splits)
    assert (count(small), seconds(small)) == min((count(one), seconds(one)) for one in splits)


def test_manual_cycles_over_its_lists_and_leaves_out_zeros() -> None:
    place = strategy("manual", [[2, 4], [6, 0]])
    splits = []
    for round_index in range(4):
        given_problem = problem(speeds=[1, 1], round_index=round_index)
        splits.append(split_of(given_problem, place(given_problem)))
    assert splits == [(2, 4), (6, 0), (2, 4), (6, 0)]


@pytest.mark.parametrize(
    ("segments", "message"),
    [
        ([6], r"1 .*\[6\].* 2 devices"),
        ([2, 3, 1], r"\b3 .* 2 devices"),
        ([1, 1, 1, 1, 2], r"\b5 .* 2 devices"),
        ([1, 2, 3, 1], r"7 blocks.* 6$"),
        ([2, 3], r"5 blocks.* 6$"),
        ([7, -1], r"\b0 .* 6$"),
    ],
)
def test_manual_list_that_does_not_fit_is_refused(segments: list[int], message: str) -> None:
    with pytest.raises(InvalidInputError, match=message):
        strategy("manual", [segments])(problem(speeds=[1, 1], num_blocks=6))


def test_manual_list_with_two_more_numbers_places_blocks_on_both_ends() -> None:
    (plan,) = strategy("manual", [[1, 0, 3, 2]])(problem(speeds=[1, 1], num_blocks=6))
    assert units_of(plan) == [("control-unit", 0, 2), ("device-1", 2, 5), ("edge-server", 5, 8)]


def predicted_seconds(given_problem: RoundProblem, name: str) -> float:
    return decide_round(given_problem, name).prediction.round_seconds


# If the first device may take as long as the second one, the second one holds all half blocks.
@example(
    problem([1.0, 0.7], 2, memory=[1, None], cost=(1, 0), num_micro_batches=1, pattern=HALVES), 0.0
)
@given(problems(), st.sampled_from([0.0, 0.1, 1.0, 10.0]))
def test_best_number_is_never_predicted_slower_than_the_fewest_or_the_proportional(
    given_problem: RoundProblem, link_seconds: float
) -> None:
    given_problem = with_slow_links(given_problem, link_seconds)
    try:
        best = predicted_seconds(given_problem, "titanic_best")
    except InfeasibleError:
        with pytest.raises(InfeasibleError):
            place_on_the_fewest(given_problem)
        return
    assert best <= predicted_seconds(given_problem, "titanic")
    assert best <= predicted_seconds(given_problem, "proportional")


@given(problems(), problems(), st.sampled_from([1.0, 10.0, 100.0]))
def test_best_numbers_of_clusters_with_a_shared_channel_are_not_predicted_slower_than_the_fewest(
    one: RoundProblem, other: RoundProblem, capacity: float
) -> None:
    both = (*one.clusters, replace(other.clusters[0], micro_batch_options=(1,)))
    shared = replace(
        one,
        clusters=tuple(replace(cluster, channel="air") for cluster in both),
        channels={"air": capacity},
        model=replace(one.model, activation_bytes=1.0),
    )
    try:
        fewest = predicted_seconds(shared, "titanic")
    except InfeasibleError:
        return
    assert predicted_seconds(shared, "titanic_best") <= fewest


def test_vanilla_fl_takes_the_fastest_device_that_holds_everything() -> None:
    # 6 blocks of 10 bytes, each with a stash of 1 byte, need 66 bytes.
    (plan,) = strategy("vanilla_fl")(problem(speeds=[1, 2, 3], memory=[None, 66, 65]))
    assert units_of(plan) == [("control-unit", 0, 0), ("device-1", 0, 8)]
    assert len(plan.links) == 1


def test_centralized_leaves_everything_with_the_control_unit() -> None:
    (plan,) = strategy("centralized")(problem(speeds=[1, 2]))
    assert units_of(plan) == [("control-unit", 0, 8)]
    assert plan.links == ()


@pytest.mark.parametrize(
    "name", ["pipeline", "titanic", "titanic_best", "vanilla_fl", "centralized"]
)
def test_every_baseline_keeps_the_limits_of_the_round(name: str) -> None:
    given_problem = problem(speeds=[1, 2, 3], memory=[None, 80, 70])
    assert violations(given_problem, strategy(name)(given_problem)) == []


def test_links_share_their_channel_and_senders_their_power_equally() -> None:
    given_problem = with_devices(problem(speeds=[1, 1]), "device-0", max_transmit_watts=0.1)
    given_problem = with_cluster(given_problem, channel="air")
    clusters = given_problem.clusters * 2
    plans = place_equally(replace(given_problem, clusters=clusters, channels={"air": 12e6}))
    assert [link.share for plan in plans for link in plan.links] == [2e6] * 6
    # The device sends to both neighbours.
    assert [link.forward_watts for link in plans[0].links] == [0.0, 0.05, 0.0]
    assert [link.backward_watts for link in plans[0].links] == [0.05, 0.0, 0.0]


def test_window_has_slack_beyond_the_need_of_its_loop_as_far_as_memory_allows() -> None:
    fast = with_round_trips(problem(speeds=[1, 1], num_micro_batches=8), 1e-3)
    # Two equal devices, and an embedding and a head that take no time: loops of 2 and 1 micro-batches, and a bit.
    assert windows_of(fast) == [3 + 2, 3 + 2, 2 + 2, 1]
    slow = problem(speeds=[1], num_blocks=1, num_micro_batches=8, cost=(10, 1))
    slow = with_round_trips(slow, 2.5)
    # The loop of the embedding takes 6 s: 1 s on the device and 2.5 s on each of two links.
    assert windows_of(slow) == [6 + 2, 4 + 2, 1]
    assert windows_of(with_devices(slow, memory_bytes=13)) == [6 + 2, 3, 1]


@pytest.mark.parametrize(
    ("memory", "name"),
    [([None, None], "pipeline"), ([None, 35], "proportional"), ([9, 9], None)],
)
def test_reference_time_is_that_of_equal_or_else_proportional_segments(
    memory: list[int | None], name: str | None
) -> None:
    given_problem = problem(speeds=[1, 1], memory=memory)
    expected = None if name is None else predicted_seconds(given_problem, name)
    assert reference_seconds(lambda name: given_problem) == expected
