"""A placement that the job file spells out, one a round: for experiments, and to pin what is known to be good."""

from collections.abc import Sequence

from collapipe.allocation.round_model.problem import ClusterProblem, RoundProblem
from collapipe.allocation.strategies.complete_plan import Stages, place_blocks
from collapipe.errors import InvalidInputError


def place_manually(
    problem: RoundProblem, cluster: ClusterProblem, segments: Sequence[Sequence[int]]
) -> Stages:
    """Gives every device the blocks listed for this round; the lists repeat when they are used up.

    Raises:
        InvalidInputError: A list does not fit the devices or the blocks.
        InfeasibleError: A device is too small for its blocks.
    """
    blocks, num_blocks = (
        list(segments[problem.round_index % len(segments)]),
        problem.model.num_blocks,
    )
    if len(blocks) != len(cluster.devices):
        raise InvalidInputError(
            f"schedule.segments lists {len(blocks)} numbers ({blocks}) for {len(cluster.devices)} devices: give one "
            "number a device, 0 to leave it out"
        )
    if sum(blocks) != num_blocks or min(blocks) < 0:
        raise InvalidInputError(
            f"schedule.segments lists {blocks}, {sum(blocks)} blocks in all, for a model of {num_blocks}: they "
            f"must be at least 0 and sum to {num_blocks}"
        )
    return place_blocks(problem, cluster, blocks)
