"""Placement problems for the tests, and a search over all splits for their best answer."""

import itertools
from collections.abc import Callable, Iterator, Sequence

from hypothesis import strategies as st

from collapipe.allocation import (
    BlockShare,
    ClusterProblem,
    Host,
    ModelCost,
    RoundPlan,
    RoundProblem,
    Segment,
    WiredLink,
)

Strategy = Callable[[RoundProblem], RoundPlan]

HALVES = (BlockShare(0.75, 0.5, 1.25), BlockShare(1.25, 1.5, 0.75))
"""Shares of half blocks. They are sums of powers of two, so that no sum of them is rounded."""

CONTROL_UNIT, EDGE_SERVER = Host("control-unit", 0.0), Host("edge-server", 0.0)


def problem(
    speeds: Sequence[float] = (1.0,),
    num_blocks: int = 6,
    memory: Sequence[int | None] | None = None,
    cost: tuple[int, int] = (10, 1),
    num_micro_batches: int = 4,
    in_flight: int | None = None,
    round_index: int = 0,
    pattern: tuple[BlockShare, ...] = (BlockShare(),),
) -> RoundProblem:
    """Returns one cluster with fast links. A micro-batch is one sample.

    Args:
        cost: Bytes of the state of a block, and of its stash for a micro-batch.
    """
    limits = memory if memory is not None else [None] * len(speeds)
    devices = tuple(
        Host(f"device-{index}", 1 / speed, memory_bytes=limit)
        for index, (speed, limit) in enumerate(zip(speeds, limits, strict=True))
    )
    hosts = [host.host_id for host in (CONTROL_UNIT, *devices, EDGE_SERVER)]
    cluster = ClusterProblem(
        CONTROL_UNIT,
        devices,
        EDGE_SERVER,
        links={pair: WiredLink(1e12) for pair in itertools.permutations(hosts, 2)},
        micro_batch_options=(num_micro_batches,),
    )
    return RoundProblem(
        clusters=(cluster,),
        model=ModelCost(num_blocks, *cost, pattern=pattern),
        mini_batch=num_micro_batches,
        in_flight_limit=in_flight,
        round_index=round_index,
    )


@st.composite
def problems(draw: st.DrawFn) -> RoundProblem:
    """Draws problems with at most 5 devices and 8 blocks. Memory is tight, loose or unlimited."""
    speed = st.sampled_from([1.0, 2.0, 3.0, 4.0, 0.7])
    memory = st.one_of(st.none(), st.integers(1, 150))
    devices = draw(st.lists(st.tuples(speed, memory), min_size=1, max_size=5))
    return problem(
        speeds=[speed for speed, _ in devices],
        num_blocks=draw(st.integers(1, 8)),
        memory=[limit for _, limit in devices],
        cost=(draw(st.integers(1, 10)), draw(st.integers(0, 10))),
        num_micro_batches=draw(st.sampled_from([1, 2, 4, 8])),
        in_flight=draw(st.one_of(st.none(), st.integers(1, 4))),
        pattern=draw(st.sampled_from([(BlockShare(),), HALVES])),
    )


def every_feasible_split(given: RoundProblem) -> Iterator[tuple[int, ...]]:
    """Yields every split that fits, by an independent computation of docs/scheduling.md (10)."""
    model, devices = given.model, given.clusters[0].devices
    sizes = range(model.num_blocks + 1)
    for split in itertools.product(sizes, repeat=len(devices)):
        if sum(split) != model.num_blocks:
            continue
        stages_to_head, fits, stop = 1, True, model.num_blocks
        for device, blocks in zip(reversed(devices), reversed(split), strict=True):
            stages_to_head += bool(blocks)
            window = min(given.mini_batch, given.in_flight_limit or stages_to_head)
            needed = sum(
                share.state * model.block_state_bytes
                + window * share.stash * model.block_stash_bytes
                for share in _shares(model, stop - blocks, stop)
            )
            stop -= blocks
            fits = fits and (device.memory_bytes is None or needed <= device.memory_bytes)
        if fits:
            yield split


def slowest(given: RoundProblem, split: Sequence[int]) -> float:
    """Returns the time of the slowest segment for one sample."""
    times, start = [], 0
    for device, blocks in zip(given.clusters[0].devices, split, strict=True):
        work = sum(share.work for share in _shares(given.model, start, start + blocks))
        times.append(device.compute_seconds(1, work))
        start += blocks
    return max(times)


def _shares(model: ModelCost, start: int, stop: int) -> list[BlockShare]:
    return [model.pattern[block % len(model.pattern)] for block in range(start, stop)]


def segments_of(given: RoundProblem, strategy: Strategy) -> dict[str, Segment]:
    """Returns the segment of each device, in pipeline order."""
    (plan,) = strategy(given)
    return plan.segments


def split_of(given: RoundProblem, plan: RoundPlan) -> tuple[int, ...]:
    """Returns the blocks of each device, 0 for a device that takes no part."""
    segments, none = plan[0].segments, Segment(0, 0)
    devices = given.clusters[0].devices
    return tuple(segments.get(device.host_id, none).num_blocks for device in devices)
