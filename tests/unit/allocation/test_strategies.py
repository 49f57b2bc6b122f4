import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from collapipe.allocation import BlockCost, PlacementProblem, Segment, strategy_for
from collapipe.allocation.strategies import Strategy
from collapipe.errors import InfeasibleError, InvalidInputError

from .problems import (
    every_feasible_split,
    problem,
    problems,
    slowest,
    split_of,
)

place_equally = strategy_for("pipeline")
place_proportionally = strategy_for("proportional")


def test_strategy_for_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(InvalidInputError, match=r"'fastest'.*pipeline, proportional, manual"):
        strategy_for("fastest")


# --- what every placement has in common


@given(problems())
def test_segments_of_every_placement_are_contiguous_and_cover_all_blocks(
    given_problem: PlacementProblem,
) -> None:
    for strategy in (place_equally, place_proportionally):
        try:
            placement = strategy(given_problem)
        except InfeasibleError:
            continue
        segments = [placed.segment for placed in placement.segments]
        assert segments[0].start_block == 0
        assert segments[-1].stop_block == given_problem.num_blocks
        assert all(a.stop_block == b.start_block for a, b in itertools.pairwise(segments))
        assert all(segment.num_blocks > 0 for segment in segments)
        order = [device.host_id for device in given_problem.devices]
        positions = [order.index(placed.host_id) for placed in placement.segments]
        assert positions == sorted(positions)


def test_window_by_default_counts_the_stages_to_the_head() -> None:
    placement = place_equally(problem(speeds=[1, 1, 1], num_micro_batches=8))
    assert [placed.in_flight for placed in placement.segments] == [4, 3, 2]
    assert placement.num_micro_batches == 8


def test_window_never_exceeds_the_micro_batches() -> None:
    placement = place_equally(problem(speeds=[1, 1, 1], num_micro_batches=3))
    assert [placed.in_flight for placed in placement.segments] == [3, 3, 2]


@pytest.mark.parametrize(("in_flight", "expected"), [(1, 1), (6, 6), (99, 8)])
def test_window_of_the_job_replaces_the_default(in_flight: int, expected: int) -> None:
    placement = place_equally(problem(speeds=[1, 1], num_micro_batches=8, in_flight=in_flight))
    assert [placed.in_flight for placed in placement.segments] == [expected, expected]


# --- pipeline


@given(st.integers(1, 12), st.integers(0, 12))
def test_equal_segments_differ_by_at_most_one_block(num_devices: int, more: int) -> None:
    num_blocks = num_devices + more
    placement = place_equally(problem(speeds=[1.0] * num_devices, num_blocks=num_blocks))
    sizes = [placed.segment.num_blocks for placed in placement.segments]
    assert len(sizes) == num_devices
    assert sum(sizes) == num_blocks
    assert max(sizes) - min(sizes) <= 1


def test_equal_segments_with_more_devices_than_blocks_are_infeasible() -> None:
    with pytest.raises(
        InfeasibleError, match=r"^3 devices cannot share 2 blocks.*devices_per_cluster"
    ):
        place_equally(problem(speeds=[1, 1, 1], num_blocks=2))


def test_equal_segments_beyond_a_memory_name_device_need_and_limit() -> None:
    # 3 blocks of 10 bytes, each with 2 micro-batches of 1 byte in flight, on the second device
    given_problem = problem(speeds=[1, 1], num_blocks=6, memory=[None, 35])
    with pytest.raises(
        InfeasibleError, match=r"device-1 would run 3 of 6.*36 bytes.*has 35.*proportional"
    ):
        place_equally(given_problem)


def test_equal_segments_that_fill_a_memory_are_feasible() -> None:
    placement = place_equally(problem(speeds=[1, 1], num_blocks=6, memory=[None, 36]))
    assert [placed.segment for placed in placement.segments] == [Segment(0, 3), Segment(3, 6)]


@pytest.mark.parametrize("strategy", [place_equally, place_proportionally])
def test_no_devices_are_infeasible(strategy: Strategy) -> None:
    with pytest.raises(InfeasibleError, match="no devices"):
        strategy(problem(speeds=[]))


# --- proportional


@settings(max_examples=150, deadline=None)
@given(problems())
def test_proportional_is_as_fast_as_the_best_of_all_splits(given_problem: PlacementProblem) -> None:
    splits = list(every_feasible_split(given_problem))
    if not splits:
        with pytest.raises(InfeasibleError):
            place_proportionally(given_problem)
        return
    split = split_of(given_problem, place_proportionally(given_problem))
    assert split in splits  # memory holds, with the windows that this split leads to
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
    placement = place_proportionally(problem(speeds=[0.1, 2, 2], num_blocks=6))
    assert [placed.host_id for placed in placement.segments] == ["device-1", "device-2"]


def test_proportional_among_equals_prefers_those_registered_first() -> None:
    placement = place_proportionally(problem(speeds=[1, 1, 1], num_blocks=4))
    assert [(placed.host_id, placed.segment) for placed in placement.segments] == [
        ("device-0", Segment(0, 2)),
        ("device-1", Segment(2, 4)),
    ]


def test_proportional_counts_only_the_windows_of_those_who_take_part() -> None:
    # With both devices the first holds 3 micro-batches: 3 blocks of 5 + 18 bytes in 89, and the second 1.
    # Alone it holds 2, and all 5 blocks of 5 + 12 bytes fit.
    given_problem = problem(
        speeds=[1, 3], num_blocks=5, memory=[89, 28], cost=BlockCost(5, 6), num_micro_batches=8
    )
    assert split_of(given_problem, place_proportionally(given_problem)) == (5, 0)


def test_proportional_without_room_for_a_block_names_the_largest_device() -> None:
    given_problem = problem(speeds=[1, 1, 1], memory=[9, 11, 10], num_micro_batches=8)
    with pytest.raises(InfeasibleError, match=r"one needs 12 bytes.*device-1, may use 11: raise"):
        place_proportionally(given_problem)


def test_proportional_without_room_for_the_model_says_how_many_blocks_fit() -> None:
    given_problem = problem(
        speeds=[1, 1], num_blocks=6, memory=[30, 25], num_micro_batches=1, cost=BlockCost(9, 1)
    )
    with pytest.raises(InfeasibleError, match=r"2 devices can hold 5 of 6 blocks: add devices"):
        place_proportionally(given_problem)


# --- manual


def test_manual_cycles_over_its_lists_and_leaves_out_zeros() -> None:
    strategy = strategy_for("manual", [[2, 4], [6, 0]])
    splits = []
    for round_index in range(4):
        given_problem = problem(speeds=[1, 1], round_index=round_index)
        splits.append(split_of(given_problem, strategy(given_problem)))
    assert splits == [(2, 4), (6, 0), (2, 4), (6, 0)]


@pytest.mark.parametrize(
    ("segments", "message"),
    [
        ([6], r"lists 1 numbers \(\[6\]\) for 2 devices"),
        ([2, 3, 1], r"lists 3 numbers .* for 2 devices"),
        ([2, 3], r"5 blocks in all, for a model of 6"),
        ([7, -1], r"at least 0 and sum to 6"),
    ],
)
def test_manual_list_that_does_not_fit_is_refused(segments: list[int], message: str) -> None:
    with pytest.raises(InvalidInputError, match=message):
        strategy_for("manual", [segments])(problem(speeds=[1, 1], num_blocks=6))


def test_manual_segment_beyond_a_memory_is_infeasible() -> None:
    with pytest.raises(InfeasibleError, match=r"device-0 would run 6 of 6.*72 bytes.*has 71"):
        strategy_for("manual", [[6, 0]])(problem(speeds=[1, 1], num_blocks=6, memory=[71, None]))


def test_block_cost_counts_state_once_and_stash_for_each_micro_batch_in_flight() -> None:
    assert BlockCost(state_bytes=100, stash_bytes=7).segment_bytes(num_blocks=3, in_flight=4) == 384
