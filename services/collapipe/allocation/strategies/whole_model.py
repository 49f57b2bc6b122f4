"""The strategies that run the whole model on one host: `vanilla_fl` (VanillaFL) and `centralized`."""

from collapipe.allocation.round_model.problem import ClusterProblem, Host, RoundProblem, StagePlan
from collapipe.allocation.strategies.complete_plan import Stages, num_micro_batches, num_slices
from collapipe.byte_sizes import say_bytes
from collapipe.errors import InfeasibleError


def place_on_one_device(problem: RoundProblem, cluster: ClusterProblem) -> Stages:
    """Places every unit on the fastest device that can hold them all. It gets token ids and labels.

    Raises:
        InfeasibleError: No device can hold the whole model.
    """
    fitting = [device for device in cluster.devices if _fits(problem, cluster, device)]
    if not fitting:
        largest = max(cluster.devices, key=lambda device: device.memory_bytes or 0, default=None)
        raise InfeasibleError(
            f"no device holds the whole model, which needs {say_bytes(_needed(problem, cluster))}: the largest, "
            f"{largest.host_id if largest else 'none'}, may use {say_bytes((largest and largest.memory_bytes) or 0)}; use a "
            "strategy that splits the model"
        )
    fastest = min(
        fitting, key=lambda device: device.compute_seconds(1, problem.model.num_blocks or 1)
    )
    # With a window of 2, the next token ids travel while the device computes.
    window = min(2, num_micro_batches(cluster), problem.in_flight_limit or 2)
    return (
        StagePlan(cluster.control_unit.host_id, 0, 0, window),
        StagePlan(fastest.host_id, 0, problem.model.num_blocks + 2, 1),
    )


def place_centrally(problem: RoundProblem, cluster: ClusterProblem) -> Stages:
    """Places every unit on the control unit, which owns the data. This is the numerical reference.

    Raises:
        InfeasibleError: The control unit cannot hold the whole model.
    """
    if not _fits(problem, cluster, cluster.control_unit):
        raise InfeasibleError(
            f"{cluster.control_unit.host_id} may use {say_bytes(cluster.control_unit.memory_bytes or 0)}, and the whole model "
            f"needs {say_bytes(_needed(problem, cluster))}: use a strategy that splits the model"
        )
    return (StagePlan(cluster.control_unit.host_id, 0, problem.model.num_blocks + 2, 1),)


def _needed(problem: RoundProblem, cluster: ClusterProblem) -> float:
    size = problem.mini_batch / num_micro_batches(cluster)
    return problem.model.memory_bytes(
        0, problem.model.num_blocks + 2, 1, size, num_slices=num_slices(cluster)
    )


def _fits(problem: RoundProblem, cluster: ClusterProblem, host: Host) -> bool:
    limit = host.memory_bytes
    return limit is None or host.base_bytes + _needed(problem, cluster) <= limit
