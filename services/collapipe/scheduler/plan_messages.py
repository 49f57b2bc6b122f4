"""Converts plans to the messages that hosts receive, and repeats a recorded decision."""

import hashlib
import itertools
import math
from collections.abc import Mapping, Sequence

from collapipe.allocation import ClusterPlan, LinkPlan, RadioLink, RoundPlan, RoundProblem
from collapipe.codec_numbers import CODECS_BY_NAME
from collapipe.planning.decisions import RoundDecision, decide_again
from collapipe.planning.job_hosts import JobHosts
from collapipe.v1 import plan_pb2


def to_messages(
    addresses: Mapping[str, str], problem: RoundProblem, plans: RoundPlan
) -> list[plan_pb2.Plan]:
    """Returns the plan of each cluster as its hosts receive it.

    Args:
        addresses: gRPC address of each host, by host id.
        problem: It says which links are radio links.
    """
    return [_plan_message(addresses, problem, index, plan) for index, plan in enumerate(plans)]


def replay(decision: RoundDecision, recorded: Sequence[plan_pb2.Plan]) -> list[plan_pb2.Plan]:
    """Repeats a decision from its recorded input. The addresses come from the recorded plans."""
    addresses = {stage.host_id: stage.address for plan in recorded for stage in plan.stages}
    return to_messages(addresses, decision.question.problem, decide_again(decision).plans)


def with_addresses(plan: plan_pb2.Plan, addresses: Mapping[str, str]) -> plan_pb2.Plan:
    """Returns a plan with the present addresses of its hosts, by host id."""
    present = plan_pb2.Plan()
    present.CopyFrom(plan)
    for stage in present.stages:
        stage.address = addresses[stage.host_id]
    return _with_id(present)


def equal_plan(
    hosts: JobHosts, most_devices: int | None, num_blocks: int, num_micro_batches: int
) -> plan_pb2.Plan:
    """Returns a plan with equal segments for cluster 0, for a model that is used and not trained.

    Args:
        most_devices: `None` means all.
    """
    cluster = hosts.clusters[0]
    devices = cluster.devices[: min(most_devices or num_blocks, num_blocks)]
    share, rest = divmod(num_blocks, len(devices))
    sizes = [1, *(share + (index < rest) for index in range(len(devices))), 1]
    plan = plan_pb2.Plan(
        num_micro_batches=num_micro_batches,
        links=[plan_pb2.LinkPlan(codec=CODECS_BY_NAME["fp32"])] * (len(sizes) - 1),
    )
    start = 0
    listed = [cluster.control_unit, *devices, hosts.edge_server]
    for host, size in zip(listed, sizes, strict=True):
        plan.stages.add(
            host_id=host.host_id,
            address=host.address,
            start_unit=start,
            stop_unit=start + size,
            in_flight=len(listed) - len(plan.stages),
        )
        start += size
    return _with_id(plan)


def _plan_message(
    addresses: Mapping[str, str], problem: RoundProblem, cluster_index: int, decided: ClusterPlan
) -> plan_pb2.Plan:
    plan = plan_pb2.Plan(
        cluster_index=cluster_index,
        num_micro_batches=decided.num_micro_batches,
        # An uncut micro-batch leaves the field out, so that its plan has the digest of older versions.
        num_slices=decided.num_slices if decided.num_slices > 1 else 0,
        stages=[
            plan_pb2.Stage(
                host_id=stage.host_id,
                address=addresses[stage.host_id],
                start_unit=stage.start_unit,
                stop_unit=stage.stop_unit,
                in_flight=stage.in_flight,
                recompute=stage.recompute,
            )
            for stage in decided.stages
        ],
        upload_codec="" if decided.upload_codec == "fp32" else decided.upload_codec,
    )
    for stage, upload in zip(plan.stages, decided.uploads, strict=False):
        stage.upload_bandwidth_hz = upload.share
        stage.upload_transmit_power_watts = upload.watts
    links = problem.clusters[cluster_index].links
    for (before, after), link in zip(
        itertools.pairwise(decided.stages), decided.links, strict=True
    ):
        between = links.get((before.host_id, after.host_id))
        plan.links.append(_link_message(link, is_radio=isinstance(between, RadioLink)))
    return _with_id(plan)


def _with_id(plan: plan_pb2.Plan) -> plan_pb2.Plan:
    """Gives a plan the digest of its content as its identity."""
    plan.ClearField("plan_id")
    content = plan.SerializeToString(deterministic=True)
    plan.plan_id = hashlib.sha256(content).hexdigest()[:16]
    return plan


def _link_message(link: LinkPlan, *, is_radio: bool) -> plan_pb2.LinkPlan:
    message = plan_pb2.LinkPlan(codec=CODECS_BY_NAME[link.codec])
    if is_radio:
        message.bandwidth_hz = link.share if math.isfinite(link.share) else 0.0
        message.transmit_power_watts = link.forward_watts
        message.return_transmit_power_watts = link.backward_watts
    elif math.isfinite(link.share):
        message.rate_limit_bps = max(1, round(link.share))
    return message
