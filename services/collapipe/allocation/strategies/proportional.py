"""Segments in proportion to profiled speed, as far as memory allows."""

from collapipe.allocation.placement import Device, Placement, PlacementProblem, place
from collapipe.errors import InfeasibleError


def place_proportionally(problem: PlacementProblem) -> Placement:
    """Makes the slowest segment as fast as it can be, within every device's memory.

    Blocks are handed out one by one, each to the device that is least slow with it; that is optimal, because a
    device's time grows with its blocks. Memory is counted with the largest window that a device can get, the one
    for the case that every device behind it takes part.

    Raises:
        InfeasibleError: There are no devices, or their memory cannot hold the model.
    """
    devices = problem.devices
    if not devices:
        raise InfeasibleError("the cluster has no devices: a pipeline needs at least 1")
    capacities = [
        _capacity(problem, device, problem.window(len(devices) - position))
        for position, device in enumerate(devices)
    ]
    if sum(capacities) < problem.num_blocks:
        raise InfeasibleError(_too_small(problem, capacities))
    blocks = [0] * len(devices)
    for _ in range(problem.num_blocks):
        best = min(
            (k for k in range(len(devices)) if blocks[k] < capacities[k]),
            key=lambda k: (blocks[k] + 1) / devices[k].speed,
        )
        blocks[best] += 1
    return place(problem, blocks)


def _capacity(problem: PlacementProblem, device: Device, window: int) -> int:
    """Blocks that a device can hold."""
    needed = problem.block_cost.segment_bytes(1, window)
    if device.memory_bytes is None or not needed:
        return problem.num_blocks
    return min(problem.num_blocks, device.memory_bytes // needed)


def _too_small(problem: PlacementProblem, capacities: list[int]) -> str:
    needed = problem.block_cost.segment_bytes(1, problem.window(1))
    memory = ", ".join(
        f"{device.host_id}: {device.memory_bytes} bytes for {capacity}"
        for device, capacity in zip(problem.devices, capacities, strict=True)
    )
    return (
        f"the devices can hold {sum(capacities)} of {problem.num_blocks} blocks, and one block needs at least {needed} "
        f"bytes ({memory}): add devices or memory, use more and smaller micro-batches, or a smaller model"
    )
