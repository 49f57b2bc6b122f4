"""From blocks a device to a whole plan: what every strategy but `dssra` leaves undecided is decided here, alike for all."""

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import replace

from collapipe.allocation.round_model.prediction import WINDOW_SLACK, link_seconds
from collapipe.allocation.round_model.problem import (
    ClusterPlan,
    ClusterProblem,
    Host,
    LinkPlan,
    RoundPlan,
    RoundProblem,
    StagePlan,
)
from collapipe.errors import InfeasibleError

Stages = tuple[StagePlan, ...]
PlaceCluster = Callable[[RoundProblem, ClusterProblem], Stages]


def num_micro_batches(cluster: ClusterProblem) -> int:
    """M of a strategy that does not choose: the first option, which for them is the only one."""
    return cluster.micro_batch_options[0]


def classical_window(
    problem: RoundProblem, cluster: ClusterProblem, segments_from_here: int
) -> int:
    """Forward micro-batches that 1F1B needs at a stage, given the segments from its own on; the head follows them."""
    limit = problem.in_flight_limit or segments_from_here + 1
    return min(num_micro_batches(cluster), limit)


def place_blocks(
    problem: RoundProblem, cluster: ClusterProblem, blocks: Sequence[int]
) -> tuple[StagePlan, ...]:
    """Gives each device a number of blocks, in order; devices with none are left out.

    Raises:
        InfeasibleError: A device's memory cannot hold its segment.
    """
    active = [
        (device, count) for device, count in zip(cluster.devices, blocks, strict=True) if count
    ]
    num_blocks = problem.model.num_blocks
    window = classical_window(problem, cluster, len(active) + 1)
    stages = [StagePlan(cluster.control_unit.host_id, 0, 1, window)]
    start = 1
    for position, (device, count) in enumerate(active):
        window = classical_window(problem, cluster, len(active) - position)
        needed = needed_bytes(problem, cluster, device, start, start + count, window)
        if device.memory_bytes is not None and needed > device.memory_bytes:
            raise InfeasibleError(
                f"{device.host_id} would run {count} of {num_blocks} blocks, which need {needed:.0f} bytes with "
                f"{window} micro-batches in flight, but has {device.memory_bytes}: add devices, use more and smaller "
                'micro-batches, a smaller schedule.in_flight, or schedule.strategy = "dssra" or "proportional", which '
                "respect memory"
            )
        stages.append(StagePlan(device.host_id, start, start + count, window))
        start += count
    head = num_blocks + 1
    return (*stages, StagePlan(cluster.edge_server.host_id, head, head + 1, 1))


def needed_bytes(
    problem: RoundProblem,
    cluster: ClusterProblem,
    host: Host,
    start_unit: int,
    stop_unit: int,
    window: int,
) -> float:
    """Memory that a host needs for a range of units, its base included: design (10)."""
    size = problem.mini_batch / num_micro_batches(cluster)
    return host.base_bytes + problem.model.memory_bytes(start_unit, stop_unit, window, size)


def complete(problem: RoundProblem, placed: Sequence[Stages]) -> RoundPlan:
    """Gives every link an equal share of its channel, full power and the first codec, and windows that do not starve."""
    links_of: dict[str | None, int] = {}
    for cluster, stages in zip(problem.clusters, placed, strict=True):
        links_of[cluster.channel] = links_of.get(cluster.channel, 0) + len(stages) - 1
    plans = []
    for cluster, stages in zip(problem.clusters, placed, strict=True):
        share = math.inf
        if cluster.channel is not None and links_of[cluster.channel]:
            share = problem.channels[cluster.channel] / links_of[cluster.channel]
        hosts = cluster.hosts
        links = tuple(
            LinkPlan(
                problem.codecs[0],
                share,
                hosts[sender.host_id].max_transmit_watts,
                hosts[receiver.host_id].max_transmit_watts,
            )
            for sender, receiver in itertools.pairwise(stages)
        )
        plan = ClusterPlan(stages, num_micro_batches(cluster), links)
        plans.append(_widen_windows(problem, cluster, plan))
    return tuple(plans)


def _widen_windows(
    problem: RoundProblem, cluster: ClusterProblem, plan: ClusterPlan
) -> ClusterPlan:
    """Widens each window as far as its latency loop asks for, memory permitting: design (4)."""
    hosts, model = cluster.hosts, problem.model
    size = problem.mini_batch / plan.num_micro_batches
    computes = [
        hosts[stage.host_id].compute_seconds(size, model.work(stage.start_unit, stage.stop_unit))
        for stage in plan.stages
    ]
    links = [
        link_seconds(problem, cluster, sender.host_id, receiver.host_id, link, size)
        for sender, receiver, link in zip(plan.stages, plan.stages[1:], plan.links, strict=False)
    ]
    bottleneck = max([*computes, *(link.load_seconds for link in links)])
    if not math.isfinite(bottleneck) or not bottleneck:
        return plan
    limit = min(plan.num_micro_batches, problem.in_flight_limit or plan.num_micro_batches)
    stages, loop = list(plan.stages), 0.0
    for k in reversed(range(len(stages) - 1)):
        stage, link = stages[k], links[k]
        if k == len(stages) - 2:
            loop = computes[k + 1]
        loop += link.forward_seconds + link.backward_seconds + link.round_trip_seconds
        loop += computes[k]
        asked = math.ceil(loop / bottleneck - 1e-9)
        roomy = asked + WINDOW_SLACK if asked >= stage.in_flight else stage.in_flight
        window = min(limit, roomy)
        memory = hosts[stage.host_id].memory_bytes
        while window > stage.in_flight and memory is not None:
            needed = hosts[stage.host_id].base_bytes + model.memory_bytes(
                stage.start_unit, stage.stop_unit, window, size
            )
            if needed <= memory:
                break
            window -= 1
        stages[k] = replace(stage, in_flight=window)
    return replace(plan, stages=tuple(stages))
