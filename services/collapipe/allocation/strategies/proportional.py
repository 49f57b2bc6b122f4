"""Segments in proportion to profiled speed, as far as memory allows."""

from bisect import bisect_left
from collections.abc import Sequence

from collapipe.allocation.placement import Device, Placement, PlacementProblem, place
from collapipe.errors import InfeasibleError


def place_proportionally(problem: PlacementProblem) -> Placement:
    """Makes the slowest segment as fast as it can be, within every device's memory.

    A device's window, and thereby what its memory holds, depends on how many devices behind it take part. So
    first it is decided who does, exactly: the fewest that reach the best time of the slowest segment, because
    each device more is a hop more. Then blocks are handed out one by one, each to the device that is least
    slow with it; that is optimal, because a device's time grows with its blocks. Ties go to the device that
    registered first.

    Raises:
        InfeasibleError: There are no devices, or their memory cannot hold the model.
    """
    devices, num_blocks = problem.devices, problem.num_blocks
    if not devices:
        raise InfeasibleError("the cluster has no devices: a pipeline needs at least 1")
    capacities = [
        [_capacity(problem, device, active) for active in range(1, len(devices) - index + 1)]
        for index, device in enumerate(devices)
    ]
    most = max(blocks for blocks, _ in _strongest(capacities).values())
    if most == 0:
        raise InfeasibleError(_none_holds_a_block(problem))
    if most < num_blocks:
        raise InfeasibleError(
            f"the {len(devices)} devices can hold {most} of {num_blocks} blocks: add devices or memory, use more "
            "and smaller micro-batches, a smaller schedule.in_flight, or a smaller model"
        )

    def taking_part(seconds: float) -> tuple[int, ...]:
        """The fewest devices that hold the model with no segment slower than that; none if it cannot be."""
        within = [
            [min(capacity, _blocks_within(device, num_blocks, seconds)) for capacity in row]
            for device, row in zip(devices, capacities, strict=True)
        ]
        strongest = _strongest(within)
        fits = [active for active, (blocks, _) in strongest.items() if blocks >= num_blocks]
        return strongest[min(fits)][1] if fits else ()

    times = sorted({n / device.speed for device in devices for n in range(1, num_blocks + 1)})
    best = bisect_left(times, True, key=lambda seconds: bool(taking_part(seconds)))
    return place(problem, _hand_out(problem, capacities, taking_part(times[best])))


def _capacity(problem: PlacementProblem, device: Device, active: int) -> int:
    """Blocks that a device can hold when so many devices, from it on, take part."""
    needed = problem.block_cost.segment_bytes(1, problem.window(active))
    if device.memory_bytes is None or not needed:
        return problem.num_blocks
    return min(problem.num_blocks, device.memory_bytes // needed)


def _blocks_within(device: Device, num_blocks: int, seconds: float) -> int:
    return sum(n / device.speed <= seconds for n in range(1, num_blocks + 1))


def _strongest(capacities: Sequence[Sequence[int]]) -> dict[int, tuple[int, tuple[int, ...]]]:
    """For each number of devices: the most blocks that so many can hold, and which devices those are.

    Args:
        capacities: `capacities[k][n - 1]` blocks fit on device k when n devices, from k on, take part.
    """
    strongest: dict[int, tuple[int, tuple[int, ...]]] = {0: (0, ())}
    for index in reversed(range(len(capacities))):
        for active in range(len(capacities) - index, 0, -1):
            held = capacities[index][active - 1]
            if not held or active - 1 not in strongest:
                continue
            behind, others = strongest[active - 1]
            if active not in strongest or held + behind >= strongest[active][0]:
                strongest[active] = (held + behind, (index, *others))
    return strongest


def _hand_out(
    problem: PlacementProblem, capacities: Sequence[Sequence[int]], chosen: Sequence[int]
) -> list[int]:
    """Blocks of each device: at least one for each that was chosen."""
    limits = {k: capacities[k][len(chosen) - position - 1] for position, k in enumerate(chosen)}
    blocks = [int(k in limits) for k in range(len(problem.devices))]
    for _ in range(problem.num_blocks - len(chosen)):
        least_slow = min(
            (k for k in chosen if blocks[k] < limits[k]),
            key=lambda k: (blocks[k] + 1) / problem.devices[k].speed,
        )
        blocks[least_slow] += 1
    return blocks


def _none_holds_a_block(problem: PlacementProblem) -> str:
    largest = max(problem.devices, key=lambda device: device.memory_bytes or 0)
    needed = problem.block_cost.segment_bytes(1, problem.window(1))
    return (
        f"no device can hold a block: one needs {needed} bytes with {problem.window(1)} micro-batches in flight, and "
        f"the largest device, {largest.host_id}, may use {largest.memory_bytes}: raise its --memory-bytes, use more "
        "and smaller micro-batches, a smaller schedule.in_flight, or a smaller model"
    )
