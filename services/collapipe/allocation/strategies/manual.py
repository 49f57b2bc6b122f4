"""`manual`: the job file lists the blocks of each host, one list for each round."""

from collections.abc import Sequence

from collapipe.allocation.round_model.problem import ClusterProblem, RoundProblem
from collapipe.allocation.strategies.complete_plan import Stages, place_blocks
from collapipe.errors import InvalidInputError


def place_manually(
    problem: RoundProblem, cluster: ClusterProblem, segments: Sequence[Sequence[int]]
) -> Stages:
    """Places the blocks as listed for this round. After the last list, the first one is used again.

    Raises:
        InvalidInputError: A list does not match the hosts or the blocks.
        InfeasibleError: The segment of a host does not fit into its memory.
    """
    blocks = segments[problem.round_index % len(segments)]
    num_blocks, num_devices = problem.model.num_blocks, len(cluster.devices)
    if len(blocks) not in (num_devices, num_devices + 2):
        raise InvalidInputError(
            f"schedule.segments lists {len(blocks)} numbers ({list(blocks)}) for {num_devices} devices: give one number "
            "for each device, 0 to leave it out; or 2 more, the first for the control unit and the last for the edge server"
        )
    if sum(blocks) != num_blocks or min(blocks) < 0:
        raise InvalidInputError(
            f"schedule.segments lists {list(blocks)}, {sum(blocks)} blocks in all, for a model of {num_blocks}: the "
            f"numbers must be at least 0 and their sum must be {num_blocks}"
        )
    if len(blocks) == num_devices:
        return place_blocks(problem, cluster, blocks)
    return place_blocks(problem, cluster, blocks[1:-1], before=blocks[0])
