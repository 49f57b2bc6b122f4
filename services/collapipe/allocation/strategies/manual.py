"""A placement that the job file spells out, one a round: for experiments, and to pin what is known to be good."""

from collections.abc import Sequence

from collapipe.allocation.placement import Placement, PlacementProblem, place
from collapipe.errors import InvalidInputError


def place_manually(problem: PlacementProblem, segments: Sequence[Sequence[int]]) -> Placement:
    """Gives every device the blocks listed for this round; the lists repeat when they are used up.

    Raises:
        InvalidInputError: A list does not fit the devices or the blocks.
        InfeasibleError: A device is too small for its blocks.
    """
    blocks = list(segments[problem.round_index % len(segments)])
    if len(blocks) != len(problem.devices):
        raise InvalidInputError(
            f"schedule.segments lists {len(blocks)} numbers ({blocks}) for {len(problem.devices)} devices: give one "
            "number a device, 0 to leave it out"
        )
    if sum(blocks) != problem.num_blocks or min(blocks) < 0:
        raise InvalidInputError(
            f"schedule.segments lists {blocks}, {sum(blocks)} blocks in all, for a model of {problem.num_blocks}: they "
            f"must be at least 0 and sum to {problem.num_blocks}"
        )
    return place(problem, blocks)
