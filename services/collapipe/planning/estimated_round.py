"""What a plan costs each host and link of an estimate, in bytes and seconds."""

from collections.abc import Mapping
from dataclasses import replace

from collapipe.allocation import (
    ClusterPlan,
    ClusterPrediction,
    ClusterProblem,
    RoundPlan,
    RoundProblem,
    predict,
)
from collapipe.allocation.round_model.problem import LinkPlan, StagePlan, WiredLink
from collapipe.allocation.round_model.weights_transfer import push_bits, transfer_seconds
from collapipe.codec_table import CODECS
from collapipe.emulation.boxes import Box
from collapipe.planning.estimate_documents import (
    PROCESS_BYTES,
    ClusterEstimate,
    HostEstimate,
    LinkEstimate,
)
from collapipe.planning.explanation import say_bottleneck
from collapipe.unit_costs import ModelCosts


def estimate_clusters(
    problem: RoundProblem, plans: RoundPlan, costs: ModelCosts, boxes: Mapping[str, Box]
) -> list[ClusterEstimate]:
    """Returns what the plans cost. `boxes` has the box of each host."""
    clusters = tuple(
        replace(cluster, step_seconds=_update_seconds(plan, costs, boxes))
        for cluster, plan in zip(problem.clusters, plans, strict=True)
    )
    problem = replace(problem, clusters=clusters)
    prediction = predict(problem, plans)
    return [
        _cluster(problem, *each, boxes)
        for each in zip(clusters, plans, prediction.clusters, strict=True)
    ]


def _update_seconds(plan: ClusterPlan, costs: ModelCosts, boxes: Mapping[str, Box]) -> float:
    """Returns T_step of docs/scheduling.md (5): the slowest stage moves its states."""
    return max(
        sum(unit.update_bytes for unit in costs.units[stage.start_unit : stage.stop_unit])
        / boxes[stage.host_id].device.memory_bytes_per_second
        for stage in plan.stages
    )


def _cluster(
    problem: RoundProblem,
    cluster: ClusterProblem,
    plan: ClusterPlan,
    predicted: ClusterPrediction,
    boxes: Mapping[str, Box],
) -> ClusterEstimate:
    hosts = [
        _host(problem, cluster, plan, stage, told.compute_seconds, boxes[stage.host_id])
        for stage, told in zip(plan.stages, predicted.stages, strict=True)
    ]
    links = [
        LinkEstimate(
            sender=one.host_id,
            receiver=other.host_id,
            codec=link.codec,
            forward_bytes=_step_bytes(problem, link, carries=one.stop_unit > 0),
            backward_bytes=_step_bytes(
                problem, link, carries=one.stop_unit > problem.model.first_trained_unit
            ),
            forward_seconds=told.forward_seconds,
            backward_seconds=told.backward_seconds,
        )
        for one, other, link, told in zip(
            plan.stages, plan.stages[1:], plan.links, predicted.links, strict=False
        )
    ]
    edge = cluster.edge_server.host_id
    push = _weights_seconds(problem, cluster, {(h.host_id, edge): h.pushed_bytes for h in hosts})
    fetch = _weights_seconds(problem, cluster, {(edge, h.host_id): h.fetched_bytes for h in hosts})
    first = {(edge, h.host_id): h.first_fetched_bytes for h in hosts}
    training = problem.local_steps * predicted.mini_batch_seconds
    return ClusterEstimate(
        hosts=tuple(hosts),
        links=tuple(links),
        num_micro_batches=plan.num_micro_batches,
        num_slices=plan.num_slices,
        num_steps=problem.local_steps,
        bottleneck=predicted.bottleneck,
        limit=say_bottleneck(predicted.bottleneck, predicted.bottleneck_seconds, plan),
        step_seconds=predicted.mini_batch_seconds,
        push_seconds=push,
        fetch_seconds=fetch,
        first_fetch_seconds=_weights_seconds(problem, cluster, first),
        round_seconds=training + push + fetch,
    )


def _host(
    problem: RoundProblem,
    cluster: ClusterProblem,
    plan: ClusterPlan,
    stage: StagePlan,
    micro_batch_seconds: float,
    box: Box,
) -> HostEstimate:
    model, units = problem.model, (stage.start_unit, stage.stop_unit)
    size = problem.mini_batch / plan.num_micro_batches
    is_edge_server = stage.host_id == cluster.edge_server.host_id
    copies = len(problem.clusters) if is_edge_server else 1  # It holds a head for each cluster.
    weights, frozen = model.weights_bytes(*units), model.frozen_memory_bytes(*units)
    state = model.state_bytes(*units)
    memory = model.memory_bytes(
        *units, stage.in_flight, size, num_slices=plan.num_slices, recompute=stage.recompute
    )
    moved = 0.0 if is_edge_server else weights
    segment = plan.segments.get(stage.host_id)
    return HostEstimate(
        host_id=stage.host_id,
        profile=box.device.short_name,
        start_unit=stage.start_unit,
        stop_unit=stage.stop_unit,
        num_blocks=segment.num_blocks if segment else 0,
        recompute=stage.recompute,
        needed_bytes=copies * memory,
        given_bytes=box.training_bytes if cluster.hosts[stage.host_id].memory_bytes else None,
        weights_bytes=copies * weights,
        frozen_bytes=copies * frozen,
        optimizer_bytes=copies * (state - weights - frozen),
        activation_bytes=copies * (memory - state),
        process_bytes=PROCESS_BYTES,
        micro_batch_seconds=micro_batch_seconds,
        pushed_bytes=0.0 if is_edge_server else push_bits(problem, plan.upload_codec, *units) / 8,
        fetched_bytes=moved if len(problem.clusters) > 1 else 0.0,
        first_fetched_bytes=0.0 if is_edge_server else weights + model.frozen_bytes(*units),
    )


def _step_bytes(problem: RoundProblem, link: LinkPlan, *, carries: bool) -> float:
    """Returns the bytes of a mini-batch in one direction of a link."""
    raw_bytes = problem.mini_batch * problem.model.activation_bytes
    return CODECS[link.codec].bytes_ratio * raw_bytes if carries else 0.0


def _weights_seconds(
    problem: RoundProblem, cluster: ClusterProblem, moved: Mapping[tuple[str, str], float]
) -> float:
    """Returns the time in which weights move, all at once: the slowest host counts, or the channel that all share."""
    seconds = [
        transfer_seconds(8 * num_bytes, link.capacity_bps)
        for pair, num_bytes in moved.items()
        if isinstance(link := cluster.links.get(pair), WiredLink)
    ]
    if cluster.channel is not None:
        seconds.append(8 * sum(moved.values()) / problem.channels[cluster.channel])
    return max(seconds, default=0.0)
