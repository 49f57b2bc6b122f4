"""What is to be placed, on what, and the result."""

from collections.abc import Sequence
from dataclasses import dataclass

from collapipe.errors import InfeasibleError


@dataclass(frozen=True)
class Segment:
    """A range of blocks, half-open."""

    start_block: int
    stop_block: int

    @property
    def num_blocks(self) -> int:
        """Blocks in it."""
        return self.stop_block - self.start_block


@dataclass(frozen=True)
class Device:
    """A device that may run a segment.

    Args:
        host_id: Identity.
        speed: Samples that one block processes a second, forward and backward.
        memory_bytes: What it may use for training; `None` is no limit.
    """

    host_id: str
    speed: float
    memory_bytes: int | None


@dataclass(frozen=True)
class BlockCost:
    """Memory of one block.

    Args:
        state_bytes: Weights, gradients and optimizer state.
        stash_bytes: What it keeps of one micro-batch for the backward pass.
    """

    state_bytes: int
    stash_bytes: int

    def segment_bytes(self, num_blocks: int, in_flight: int) -> int:
        """Bytes that a segment needs with a full window: design (10)."""
        return num_blocks * (self.state_bytes + in_flight * self.stash_bytes)


@dataclass(frozen=True)
class PlacementProblem:
    """One cluster in one round.

    Args:
        devices: In registration order, which is pipeline order.
        num_blocks: Blocks of the model.
        block_cost: Memory of a block.
        num_micro_batches: Of a mini-batch.
        in_flight: Forward micro-batches that a stage may hold; `None` for as many as 1F1B needs.
        round_index: The round.
    """

    devices: Sequence[Device]
    num_blocks: int
    block_cost: BlockCost
    num_micro_batches: int
    in_flight: int | None
    round_index: int

    def window(self, segments_from_here: int) -> int:
        """Forward micro-batches that a stage holds, given the segments from its own on; the head follows them."""
        return min(self.num_micro_batches, self.in_flight or segments_from_here + 1)


@dataclass(frozen=True)
class PlacedSegment:
    """A segment and who runs it, with the window of its stage."""

    host_id: str
    segment: Segment
    in_flight: int


@dataclass(frozen=True)
class Placement:
    """A decision: the segments in pipeline order, and the micro-batches of a mini-batch."""

    segments: tuple[PlacedSegment, ...]
    num_micro_batches: int


def place(problem: PlacementProblem, blocks: Sequence[int]) -> Placement:
    """Gives each device a number of blocks, in order; devices with none are left out.

    Raises:
        InfeasibleError: A device's memory cannot hold its segment.
    """
    active = [
        (device, count) for device, count in zip(problem.devices, blocks, strict=True) if count
    ]
    placed, start = [], 0
    for position, (device, count) in enumerate(active):
        window = problem.window(len(active) - position)
        needed = problem.block_cost.segment_bytes(count, window)
        if device.memory_bytes is not None and needed > device.memory_bytes:
            raise InfeasibleError(
                f"{device.host_id} would run {count} of {problem.num_blocks} blocks, which need {needed} bytes with "
                f"{window} micro-batches in flight, but has {device.memory_bytes}: add devices, use more and smaller "
                'micro-batches, a smaller schedule.in_flight, or schedule.strategy = "proportional", which respects memory'
            )
        placed.append(PlacedSegment(device.host_id, Segment(start, start + count), window))
        start += count
    return Placement(tuple(placed), problem.num_micro_batches)
