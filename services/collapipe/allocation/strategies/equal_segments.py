"""`pipeline` (PipeLine): equal segments in registration order, without regard to speed or memory."""

from collapipe.allocation.round_model.problem import ClusterProblem, RoundProblem
from collapipe.allocation.strategies.complete_plan import Stages, place_blocks
from collapipe.errors import InfeasibleError


def place_equally(problem: RoundProblem, cluster: ClusterProblem) -> Stages:
    """Gives every device the same number of blocks. If blocks remain, the first devices get one more.

    Raises:
        InfeasibleError: There are no devices, there are more devices than blocks, or a segment does not fit.
    """
    num_devices, num_blocks = len(cluster.devices), problem.model.num_blocks
    if num_devices == 0:
        raise InfeasibleError("the cluster has no devices: a pipeline needs at least 1")
    if num_devices > num_blocks:
        raise InfeasibleError(
            f"{num_devices} devices cannot share {num_blocks} blocks equally: set devices_per_cluster to at "
            f'most {num_blocks}, or schedule.strategy = "proportional", which leaves devices out'
        )
    share, rest = divmod(num_blocks, num_devices)
    return place_blocks(problem, cluster, [share + (index < rest) for index in range(num_devices)])
