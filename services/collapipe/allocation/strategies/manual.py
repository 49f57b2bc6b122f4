"""`manual`: the job file lists the blocks of each device, one list for each round."""

from collections.abc import Sequence

from collapipe.allocation.round_model.problem import ClusterProblem, RoundProblem
from collapipe.allocation.strategies.complete_plan import Stages, place_blocks
from collapipe.errors import InvalidInputError


def place_manually(
    problem: RoundProblem, cluster: ClusterProblem, segments: Sequence[Sequence[int]]
) -> Stages:
    """Places the blocks as listed for this round. After the last list, the first one is used again.

    Raises:
        InvalidInputError: A list does not match the devices or the blocks.
        InfeasibleError: The segment of a device does not fit into its memory.
    """
    blocks = segments[problem.round_index % len(segments)]
    num_blocks = problem.model.num_blocks
    if len(blocks) != len(cluster.devices):
        raise InvalidInputError(
            f"schedule.segments lists {len(blocks)} numbers ({list(blocks)}) for {len(cluster.devices)} devices: give "
            "one number for each device, 0 to leave it out"
        )
    if sum(blocks) != num_blocks or min(blocks) < 0:
        raise InvalidInputError(
            f"schedule.segments lists {list(blocks)}, {sum(blocks)} blocks in all, for a model of {num_blocks}: the "
            f"numbers must be at least 0 and their sum must be {num_blocks}"
        )
    return place_blocks(problem, cluster, blocks)
