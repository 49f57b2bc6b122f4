"""Placement problems for the tests, and what their best answer is, found by trying every split."""

import itertools
from collections.abc import Iterator, Sequence

from hypothesis import strategies as st

from collapipe.allocation import BlockCost, Device, Placement, PlacementProblem


def problem(
    speeds: Sequence[float] = (1.0,),
    num_blocks: int = 6,
    memory: Sequence[int | None] | None = None,
    cost: BlockCost | None = None,
    num_micro_batches: int = 4,
    in_flight: int | None = None,
    round_index: int = 0,
) -> PlacementProblem:
    limits = memory if memory is not None else [None] * len(speeds)
    devices = [
        Device(f"device-{index}", speed, limit)
        for index, (speed, limit) in enumerate(zip(speeds, limits, strict=True))
    ]
    return PlacementProblem(
        devices, num_blocks, cost or BlockCost(10, 1), num_micro_batches, in_flight, round_index
    )


@st.composite
def problems(draw: st.DrawFn) -> PlacementProblem:
    """At most 5 devices and 8 blocks; memory is tight, loose or unlimited."""
    num_devices = draw(st.integers(1, 5))
    memory = st.one_of(st.none(), st.integers(1, 150))
    return problem(
        speeds=draw(
            st.lists(
                st.sampled_from([1.0, 2.0, 3.0, 4.0, 0.7]),
                min_size=num_devices,
                max_size=num_devices,
            )
        ),
        num_blocks=draw(st.integers(1, 8)),
        memory=draw(st.lists(memory, min_size=num_devices, max_size=num_devices)),
        cost=BlockCost(draw(st.integers(1, 10)), draw(st.integers(0, 10))),
        num_micro_batches=draw(st.sampled_from([1, 2, 4, 8])),
        in_flight=draw(st.one_of(st.none(), st.integers(1, 4))),
    )


def every_feasible_split(given: PlacementProblem) -> Iterator[tuple[int, ...]]:
    """Design (10) written out anew: windows from the back of the pipeline, memory of each active device."""
    sizes = range(given.num_blocks + 1)
    for split in itertools.product(sizes, repeat=len(given.devices)):
        if sum(split) != given.num_blocks:
            continue
        stages_to_head, fits = 1, True
        for device, blocks in zip(reversed(given.devices), reversed(split), strict=True):
            if not blocks:
                continue
            stages_to_head += 1
            window = min(given.num_micro_batches, given.in_flight or stages_to_head)
            needed = blocks * (given.block_cost.state_bytes + window * given.block_cost.stash_bytes)
            fits = fits and (device.memory_bytes is None or needed <= device.memory_bytes)
        if fits:
            yield split


def slowest(given: PlacementProblem, split: Sequence[int]) -> float:
    """Seconds a sample of the slowest segment."""
    return max(blocks / device.speed for blocks, device in zip(split, given.devices, strict=True))


def split_of(given: PlacementProblem, placement: Placement) -> tuple[int, ...]:
    """Blocks of each device, 0 for those left out."""
    sizes = {placed.host_id: placed.segment.num_blocks for placed in placement.segments}
    return tuple(sizes.get(device.host_id, 0) for device in given.devices)
