"""Turns a number of blocks for each device into a whole plan. All baselines share these rules."""

import math
from collections.abc import Callable, Sequence

from collapipe.allocation.round_model.in_flight_windows import classical_window, widen_windows
from collapipe.allocation.round_model.prediction import stage_memory_bytes
from collapipe.allocation.round_model.problem import (
    ClusterPlan,
    ClusterProblem,
    LinkPlan,
    RadioLink,
    RoundPlan,
    RoundProblem,
    StagePlan,
)
from collapipe.allocation.round_model.uploads import with_soonest_uploads
from collapipe.byte_sizes import say_bytes
from collapipe.errors import InfeasibleError

Stages = tuple[StagePlan, ...]
PlaceCluster = Callable[[RoundProblem, ClusterProblem], Stages]


def num_micro_batches(cluster: ClusterProblem) -> int:
    """Returns M of a baseline. A baseline does not choose M, so its problem has only one option."""
    return cluster.micro_batch_options[0]


def num_slices(cluster: ClusterProblem) -> int:
    """Returns sigma of a baseline, which does not choose it."""
    return cluster.slice_options[0]


def place_blocks(
    problem: RoundProblem, cluster: ClusterProblem, blocks: Sequence[int], before: int = 0
) -> Stages:
    """Gives each device its number of blocks, in registration order. Devices with 0 blocks are left out.

    The control unit runs the blocks `before` them, and the edge server those that remain after them.

    Raises:
        InfeasibleError: The segment of a device does not fit into its memory.
    """
    active = [
        (device, count) for device, count in zip(cluster.devices, blocks, strict=True) if count
    ]
    num_blocks, micro_batches = problem.model.num_blocks, num_micro_batches(cluster)
    window = classical_window(problem, micro_batches, len(active) + 1)
    start = 1 + before
    recompute = problem.recomputes_by_default
    stages = [StagePlan(cluster.control_unit.host_id, 0, start, window, recompute)]
    for position, (device, count) in enumerate(active):
        window = classical_window(problem, micro_batches, len(active) - position)
        stage = StagePlan(device.host_id, start, start + count, window, recompute)
        needed = stage_memory_bytes(problem, device, stage, micro_batches, num_slices(cluster))
        if device.memory_bytes is not None and needed > device.memory_bytes:
            raise InfeasibleError(
                f"{device.host_id} would run {count} of {num_blocks} blocks, which need {say_bytes(needed)} with "
                f"{window} micro-batches in flight, but has {say_bytes(device.memory_bytes)}: add devices, use more and smaller "
                'micro-batches, a smaller schedule.in_flight, or schedule.strategy = "dssra" or "proportional", which '
                "respect memory"
            )
        stages.append(stage)
        start += count
    return (*stages, StagePlan(cluster.edge_server.host_id, start, num_blocks + 2, 1))


def complete(problem: RoundProblem, placed: Sequence[Stages]) -> RoundPlan:
    """Adds windows, and gives every link an equal share of its channel, full power and the first codec, also for uploads.

    A device that sends to both neighbours has half of its power for each. Uploads over radios end together; see
    `with_soonest_uploads`. No radio has more power than its highest modulation needs.

    `placed` has the stages of each cluster.
    """
    num_links: dict[str | None, int] = {}
    for cluster, stages in zip(problem.clusters, placed, strict=True):
        num_links[cluster.channel] = num_links.get(cluster.channel, 0) + len(stages) - 1
    plans = []
    for cluster, stages in zip(problem.clusters, placed, strict=True):
        share = math.inf
        if cluster.channel is not None and num_links[cluster.channel]:
            share = problem.channels[cluster.channel] / num_links[cluster.channel]
        watts = [cluster.hosts[stage.host_id].max_transmit_watts for stage in stages]
        watts[1:-1] = [limit / 2 for limit in watts[1:-1]]
        links = []
        for i in range(len(stages) - 1):
            one, other = stages[i].host_id, stages[i + 1].host_id
            there = _useful_watts(cluster, one, other, share, watts[i])
            back = _useful_watts(cluster, other, one, share, watts[i + 1])
            links.append(LinkPlan(problem.codecs[0], share, there, back))
        plan = ClusterPlan(
            stages,
            num_micro_batches(cluster),
            tuple(links),
            cluster.upload_codecs[0],
            num_slices=num_slices(cluster),
        )
        plans.append(widen_windows(problem, cluster, plan))
    return with_soonest_uploads(problem, tuple(plans))


def _useful_watts(
    cluster: ClusterProblem, sender: str, receiver: str, share: float, limit: float
) -> float:
    link = cluster.links.get((sender, receiver))
    return min(limit, link.useful_watts(share)) if isinstance(link, RadioLink) else limit
