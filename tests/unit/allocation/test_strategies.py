import itertools
from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from collapipe.allocation import (
    RoundProblem,
    Segment,
    WiredLink,
    decide_round,
    reference_seconds,
    violations,
)
from collapipe.errors import InfeasibleError, InvalidInputError

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
    with pytest.raises(
        InvalidInputError,
        match=r"'fastest'.*dssra, pipeline, titanic, titanic_best, vanilla_fl, centralized, proportional, manual",
    ):
        strategy("fastest")(problem())


# --- all placements


@given(problems())
def test_segments_of_every_placement_are_contiguous_and_cover_all_blocks(
    given_problem: RoundProblem,
) -> None:
    for strategy in (place_equally, place_proportionally):
        try:
            placed = segments_of(given_problem, strategy)
        except InfeasibleError:
            continue
        segments = list(placed.values())
        assert segments[0].start_block == 0
        assert segments[-1].stop_block == given_problem.model.num_blocks
        assert all(a.stop_block == b.start_block for a, b in itertools.pairwise(segments))
        assert all(segment.num_blocks > 0 for segment in segments)
        order = [device.host_id for device in given_problem.clusters[0].devices]
        positions = [order.index(host_id) for host_id in placed]
        assert positions == sorted(positions)


def test_window_without_measured_transfers_counts_the_stages_to_the_head_and_the_slack() -> None:
    (plan,) = place_equally(problem(speeds=[1, 1, 1], num_micro_batches=8))
    assert [stage.in_flight for stage in plan.stages] == [5 + 2, 4 + 2, 3 + 2, 2 + 2, 1]
    assert plan.num_micro_batches == 8


def test_window_never_exceeds_the_micro_batches() -> None:
    (plan,) = place_equally(problem(speeds=[1, 1, 1], num_micro_batches=3))
    assert [stage.in_flight for stage in plan.stages] == [3, 3, 3, 3, 1]


@pytest.mark.parametrize(("in_flight", "expected"), [(1, 1), (6, 6), (99, 8)])
def test_window_of_the_job_replaces_the_default(in_flight: int, expected: int) -> None:
    (plan,) = place_equally(problem(speeds=[1, 1], num_micro_batches=8, in_flight=in_flight))
    assert [stage.in_flight for stage in plan.stages[1:-1]] == [expected, expected]


# --- pipeline


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


def test_equal_segments_beyond_a_memory_name_device_need_and_limit() -> None:
    # The second device has 3 blocks of 10 bytes. Each holds 2 micro-batches of 1 byte.
    given_problem = problem(speeds=[1, 1], num_blocks=6, memory=[None, 35])
    with pytest.raises(
        InfeasibleError, match=r"device-1 would run 3 of 6.*36 B .*has 35 B:.*proportional"
    ):
        place_equally(given_problem)


def test_equal_segments_that_fill_a_memory_are_feasible() -> None:
    given_problem = problem(speeds=[1, 1], num_blocks=6, memory=[None, 36])
    segments = segments_of(given_problem, place_equally)
    assert list(segments.values()) == [Segment(0, 3), Segment(3, 6)]


@pytest.mark.parametrize("strategy", [place_equally, place_proportionally])
def test_no_devices_are_infeasible(strategy: Strategy) -> None:
    with pytest.raises(InfeasibleError, match="no devices"):
        strategy(problem(speeds=[]))


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


# --- proportional


@given(problems())
def test_proportional_is_as_fast_as_the_best_of_all_splits(given_problem: RoundProblem) -> None:
    splits = list(every_feasible_split(given_problem))
    if not splits:
        with pytest.raises(InfeasibleError):
            place_proportionally(given_problem)
        return
    split = split_of(given_problem, place_proportionally(given_problem))
    assert split in splits  # It fits into memory with the windows of this split.
    best = min(slowest(given_problem, other) for other in splits)
    assert slowest(given_problem, split) == best
    equally_fast = [other for other in splits if slowest(given_problem, other) == best]
    fewest = min(sum(map(bool, other)) for other in equally_fast)
    assert sum(map(bool, split)) == fewest


def test_proportional_follows_speeds_of_one_to_two_to_four() -> None:
    given_problem = problem(speeds=[1, 2, 4], num_blocks=7)
    fastest = [
        split for split in every_feasible_split(given_problem) if slowest(given_problem, split) == 1
    ]
    assert fastest == [(1, 2, 4)]
    assert split_of(given_problem, place_proportionally(given_problem)) == (1, 2, 4)


def test_proportional_leaves_out_a_device_that_would_be_the_slowest() -> None:
    segments = segments_of(problem(speeds=[0.1, 2, 2], num_blocks=6), place_proportionally)
    assert list(segments) == ["device-1", "device-2"]


def test_proportional_among_equals_prefers_those_registered_first() -> None:
    segments = segments_of(problem(speeds=[1, 1, 1], num_blocks=4), place_proportionally)
    assert segments == {"device-0": Segment(0, 2), "device-1": Segment(2, 4)}


def test_proportional_counts_only_the_windows_of_devices_that_take_part() -> None:
    # With both devices, the window of the first is 3. Then 3 of its blocks, of 5 + 18 bytes, fit into 89 bytes,
    # and 1 block fits on the second. Alone the first has a window of 2, and all 5 blocks of 5 + 12 bytes fit.
    given_problem = problem(
        speeds=[1, 3], num_blocks=5, memory=[89, 28], cost=(5, 6), num_micro_batches=8
    )
    assert split_of(given_problem, place_proportionally(given_problem)) == (5, 0)


def test_proportional_without_room_for_a_block_names_the_largest_device() -> None:
    given_problem = problem(speeds=[1, 1, 1], memory=[9, 11, 10], num_micro_batches=8)
    with pytest.raises(InfeasibleError, match=r"one needs 12 B .*device-1, may use 11 B: raise"):
        place_proportionally(given_problem)


def test_proportional_without_room_for_the_model_says_how_many_blocks_fit() -> None:
    given_problem = problem(
        speeds=[1, 1], num_blocks=6, memory=[30, 25], num_micro_batches=1, cost=(9, 1)
    )
    with pytest.raises(InfeasibleError, match=r"2 devices can hold 5 of 6 blocks: add devices"):
        place_proportionally(given_problem)


# --- manual


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
        ([6], r"lists 1 numbers \(\[6\]\) for 2 devices"),
        ([2, 3, 1], r"lists 3 numbers .* for 2 devices"),
        ([1, 1, 1, 1, 2], r"lists 5 numbers .* for 2 devices"),
        ([1, 2, 3, 1], r"7 blocks in all, for a model of 6"),
        ([2, 3], r"5 blocks in all, for a model of 6"),
        ([7, -1], r"at least 0 and their sum must be 6"),
    ],
)
def test_manual_list_that_does_not_fit_is_refused(segments: list[int], message: str) -> None:
    with pytest.raises(InvalidInputError, match=message):
        strategy("manual", [segments])(problem(speeds=[1, 1], num_blocks=6))


def test_manual_list_with_two_more_numbers_places_blocks_on_both_ends() -> None:
    given_problem = problem(speeds=[1, 1], num_blocks=6)
    (plan,) = strategy("manual", [[1, 0, 3, 2]])(given_problem)
    units = [(stage.host_id, stage.start_unit, stage.stop_unit) for stage in plan.stages]
    ends = given_problem.clusters[0]
    assert units == [
        (ends.control_unit.host_id, 0, 2),
        ("device-1", 2, 5),
        (ends.edge_server.host_id, 5, 8),
    ]


def test_manual_segment_beyond_a_memory_is_infeasible() -> None:
    with pytest.raises(InfeasibleError, match=r"device-0 would run 6 of 6.*72 B .*has 71 B:"):
        strategy("manual", [[6, 0]])(problem(speeds=[1, 1], num_blocks=6, memory=[71, None]))


# --- titanic


@given(problems())
def test_titanic_is_the_fastest_of_the_splits_with_the_fewest_devices(
    given_problem: RoundProblem,
) -> None:
    splits = list(every_feasible_split(given_problem))
    if not splits:
        with pytest.raises(InfeasibleError):
            place_on_the_fewest(given_problem)
        return
    split = split_of(given_problem, place_on_the_fewest(given_problem))
    fewest = min(sum(map(bool, other)) for other in splits)
    small = [other for other in splits if sum(map(bool, other)) == fewest]
    assert split in small
    assert slowest(given_problem, split) == min(slowest(given_problem, other) for other in small)


def test_titanic_leaves_out_devices_that_the_proportional_split_uses() -> None:
    given_problem = problem(speeds=[1, 1, 1], num_blocks=6)
    assert split_of(given_problem, place_on_the_fewest(given_problem)) == (6, 0, 0)
    assert split_of(given_problem, place_proportionally(given_problem)) == (2, 2, 2)


# --- titanic_best


def predicted_seconds(given_problem: RoundProblem, name: str) -> float:
    return decide_round(given_problem, name).prediction.round_seconds


def with_slow_links(given_problem: RoundProblem, seconds: float) -> RoundProblem:
    """Makes every link take some time for each micro-batch in each direction."""
    clusters = tuple(
        replace(
            cluster,
            links={pair: WiredLink(8.0, round_trip_seconds=seconds) for pair in cluster.links},
        )
        for cluster in given_problem.clusters
    )
    model = replace(given_problem.model, activation_bytes=seconds)
    return replace(given_problem, clusters=clusters, model=model)


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


def test_best_number_is_larger_than_the_fewest_where_more_devices_are_faster() -> None:
    given_problem = problem(speeds=[1, 1, 1], num_blocks=6)
    assert split_of(given_problem, place_on_the_fewest(given_problem)) == (6, 0, 0)
    assert split_of(given_problem, place_on_the_best_number(given_problem)) == (2, 2, 2)


@pytest.mark.parametrize(("link_seconds", "split"), [(0.1, (3, 3)), (10.0, (6, 0))])
def test_best_number_leaves_out_a_device_that_only_adds_a_slow_link(
    link_seconds: float, split: tuple[int, ...]
) -> None:
    given_problem = with_slow_links(problem(speeds=[1, 1], num_blocks=6), link_seconds)
    assert split_of(given_problem, place_on_the_best_number(given_problem)) == split


def test_best_number_is_the_fewest_where_memory_needs_all_devices() -> None:
    # 2 blocks of 10 bytes, each with 4 micro-batches of 1 byte, need 28 bytes on the first device.
    given_problem = problem(speeds=[1, 2, 3], num_blocks=6, memory=[28, 28, 28])
    assert split_of(given_problem, place_on_the_best_number(given_problem)) == (2, 2, 2)
    assert place_on_the_best_number(given_problem) == place_on_the_fewest(given_problem)


def test_best_number_is_at_most_the_number_of_blocks() -> None:
    given_problem = problem(speeds=[1, 1, 1], num_blocks=2)
    assert sorted(split_of(given_problem, place_on_the_best_number(given_problem))) == [0, 1, 1]


# --- the whole model on one host


def test_vanilla_fl_takes_the_fastest_device_that_holds_everything() -> None:
    # 6 blocks of 10 bytes, each with a stash of 1 byte, need 66 bytes.
    (plan,) = strategy("vanilla_fl")(problem(speeds=[1, 2, 3], memory=[None, 66, 65]))
    units = [(stage.host_id, stage.start_unit, stage.stop_unit) for stage in plan.stages]
    assert units == [("control-unit", 0, 0), ("device-1", 0, 8)]
    assert len(plan.links) == 1


def test_vanilla_fl_without_a_device_for_everything_says_what_is_needed() -> None:
    with pytest.raises(InfeasibleError, match=r"needs 66 B:.*device-1, may use 65 B;.*splits"):
        strategy("vanilla_fl")(problem(speeds=[1, 1], memory=[9, 65]))


def test_centralized_leaves_everything_with_the_control_unit() -> None:
    (plan,) = strategy("centralized")(problem(speeds=[1, 2]))
    units = [(stage.host_id, stage.start_unit, stage.stop_unit) for stage in plan.stages]
    assert units == [("control-unit", 0, 8)]
    assert plan.links == ()


# --- the rules that all baselines share


@pytest.mark.parametrize(
    "name", ["pipeline", "titanic", "titanic_best", "vanilla_fl", "centralized"]
)
def test_every_baseline_keeps_the_limits_of_the_round(name: str) -> None:
    given_problem = problem(speeds=[1, 2, 3], memory=[None, 80, 70])
    assert violations(given_problem, strategy(name)(given_problem)) == []


def test_links_share_their_channel_and_senders_their_power_equally() -> None:
    given_problem = problem(speeds=[1, 1])
    device = replace(given_problem.clusters[0].devices[0], max_transmit_watts=0.1)
    cluster = replace(
        given_problem.clusters[0],
        channel="air",
        devices=(device, given_problem.clusters[0].devices[1]),
    )
    shared = replace(given_problem, clusters=(cluster, cluster), channels={"air": 12e6})
    plans = place_equally(shared)
    assert [link.share for plan in plans for link in plan.links] == [2e6] * 6
    # The device sends to both neighbours.
    assert [link.forward_watts for link in plans[0].links] == [0.0, 0.05, 0.0]
    assert [link.backward_watts for link in plans[0].links] == [0.05, 0.0, 0.0]


def test_window_has_slack_beyond_the_need_of_its_loop_even_if_that_is_the_window_of_1f1b() -> None:
    given_problem = problem(speeds=[1, 1], num_micro_batches=8)
    cluster = given_problem.clusters[0]
    links = {pair: WiredLink(1e12, round_trip_seconds=1e-3) for pair in cluster.links}
    (plan,) = place_equally(replace(given_problem, clusters=(replace(cluster, links=links),)))
    # Two equal devices, and an embedding and a head that take no time: loops of 2 and 1 micro-batches, and a bit.
    assert [stage.in_flight for stage in plan.stages] == [3 + 2, 3 + 2, 2 + 2, 1]


def test_window_grows_with_a_slow_link_as_far_as_memory_allows() -> None:
    given_problem = problem(speeds=[1], num_blocks=1, num_micro_batches=8, cost=(10, 1))
    cluster = given_problem.clusters[0]
    slow = {pair: WiredLink(1e12, round_trip_seconds=2.5) for pair in cluster.links}
    starved = replace(given_problem, clusters=(replace(cluster, links=slow),))
    # The loop of the embedding takes 6 s: 1 s on the device and 2.5 s on each of two links.
    (plan,) = place_equally(starved)
    assert [stage.in_flight for stage in plan.stages] == [6 + 2, 4 + 2, 1]
    small = replace(cluster.devices[0], memory_bytes=13)
    tight = replace(starved, clusters=(replace(cluster, links=slow, devices=(small,)),))
    (plan,) = place_equally(tight)
    assert [stage.in_flight for stage in plan.stages] == [6 + 2, 3, 1]


# --- the reference time of the objective


def test_reference_time_is_the_prediction_of_equal_segments() -> None:
    given_problem = problem(speeds=[1, 1])
    expected = decide_round(given_problem, "pipeline").prediction.round_seconds
    assert reference_seconds(lambda name: given_problem) == expected


def test_proportional_segments_stand_in_for_equal_ones_that_do_not_fit() -> None:
    given_problem = problem(speeds=[1, 1], num_blocks=6, memory=[None, 35])
    expected = decide_round(given_problem, "proportional").prediction.round_seconds
    assert reference_seconds(lambda name: given_problem) == expected


def test_reference_time_is_none_without_any_placement() -> None:
    given_problem = problem(speeds=[1, 1], memory=[9, 9])
    assert reference_seconds(lambda name: given_problem) is None
