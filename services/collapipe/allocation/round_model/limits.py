"""Checks plans against the limits of a round: docs/scheduling.md (13)."""

import math

from collapipe.allocation.round_model.prediction import RoundPrediction, predict
from collapipe.allocation.round_model.problem import (
    ClusterPlan,
    ClusterProblem,
    LinkPlan,
    RoundPlan,
    RoundProblem,
)
from collapipe.byte_sizes import say_bytes

_TOLERANCE = 1e-9
"""Relative excess that is taken for a rounding error."""
_SHARE_TOLERANCE = 1e-6
"""Relative excess of a sum of shares that is accepted, because a numerical solver computes them."""


def violations(problem: RoundProblem, plans: RoundPlan) -> list[str]:
    """Returns the limits that plans break, one sentence each. The list is empty if the plans are feasible."""
    prediction = predict(problem, plans)
    found = []
    for index, (cluster, plan) in enumerate(zip(problem.clusters, plans, strict=True)):
        units = [(stage.start_unit, stage.stop_unit) for stage in plan.stages]
        if [start for start, _ in units] != [0, *(stop for _, stop in units[:-1])] or (
            units[-1][1] != problem.model.num_blocks + 2
        ):
            found.append(f"cluster {index} does not run every unit once, in order: {units}")
        if plan.num_micro_batches not in cluster.micro_batch_options:
            found.append(
                f"cluster {index} has {plan.num_micro_batches} micro-batches: allowed are "
                f"{cluster.micro_batch_options}"
            )
        if plan.num_slices not in cluster.slice_options:
            found.append(
                f"cluster {index} has {plan.num_slices} slices: allowed are {cluster.slice_options}"
            )
        found += [
            f"{stage.host_id} recomputes: stages with the head never do, and others only if the job allows it"
            for stage in plan.stages
            if stage.recompute
            and (
                True not in problem.recompute_options
                or stage.stop_unit > problem.model.num_blocks + 1
            )
        ]
        if plan.upload_codec not in cluster.upload_codecs:
            found.append(
                f"cluster {index} uploads with codec {plan.upload_codec}: allowed are "
                f"{', '.join(cluster.upload_codecs)}"
            )
        if not math.isfinite(prediction.clusters[index].round_seconds):
            found.append(f"cluster {index} has a link that is missing or has a rate of 0")
        found += _link_violations(problem, cluster, plan)
        found += _upload_violations(problem, cluster, plan)
    found += _memory_violations(problem, prediction)
    found += _share_violations(problem, plans)
    limit = problem.convergence.limit
    if math.isfinite(limit) and prediction.convergence_term > limit * (1 + _TOLERANCE):
        found.append(
            f"the convergence term is {prediction.convergence_term:g}, and the limit is {limit:g}"
        )
    return found


def _link_violations(
    problem: RoundProblem, cluster: ClusterProblem, plan: ClusterPlan
) -> list[str]:
    hosts, found = cluster.hosts, []
    silent = LinkPlan()
    for stage, after, before in zip(
        plan.stages, (*plan.links, silent), (silent, *plan.links), strict=True
    ):
        # A stage sends activations and their gradients at the same time.
        watts, limit = (
            (after.forward_watts, before.backward_watts),
            hosts[stage.host_id].max_transmit_watts,
        )
        if not (min(watts) >= 0 and sum(watts) <= limit * (1 + _SHARE_TOLERANCE)):
            found.append(
                f"{stage.host_id} transmits with {watts[0]:g} + {watts[1]:g} W, and its limit is {limit:g} W"
            )
    for link in plan.links:
        if link.codec not in problem.codecs:
            found.append(
                f"codec {link.codec} is not allowed: use one of {', '.join(problem.codecs)}"
            )
    return found


def _upload_violations(
    problem: RoundProblem, cluster: ClusterProblem, plan: ClusterPlan
) -> list[str]:
    if not plan.uploads:
        return []
    found, total = [], sum(upload.share for upload in plan.uploads)
    channel = problem.channels.get(cluster.channel or "", math.inf)
    if total > channel * (1 + _SHARE_TOLERANCE):
        found.append(
            f"uploads were given {total:g} Hz, and channel {cluster.channel} has {channel:g}"
        )
    for stage, upload in zip(plan.stages, plan.uploads, strict=True):
        limit = cluster.hosts[stage.host_id].max_transmit_watts
        if not 0 <= upload.watts <= limit * (1 + _TOLERANCE):
            found.append(
                f"{stage.host_id} uploads with {upload.watts} W, and its limit is {limit} W"
            )
    return found


def _memory_violations(problem: RoundProblem, prediction: RoundPrediction) -> list[str]:
    # The memory of a host is summed over the clusters, because the edge server holds a head for each of them.
    hosts = problem.hosts
    needed: dict[str, float] = {}
    for cluster in prediction.clusters:
        for stage in cluster.stages:
            base = hosts[stage.host_id].base_bytes
            others = needed[stage.host_id] - base if stage.host_id in needed else 0.0
            needed[stage.host_id] = stage.memory_bytes + others
    found = []
    for host_id, num_bytes in needed.items():
        limit = hosts[host_id].memory_bytes
        if limit is not None and num_bytes > limit:
            found.append(
                f"{host_id} needs {say_bytes(num_bytes)} of memory and has {say_bytes(limit)}"
            )
    return found


def _share_violations(problem: RoundProblem, plans: RoundPlan) -> list[str]:
    totals: dict[str, float] = {}
    for cluster, plan in zip(problem.clusters, plans, strict=True):
        if cluster.channel is not None:
            for link in plan.links:
                totals[cluster.channel] = totals.get(cluster.channel, 0.0) + link.share
    return [
        f"channel {channel} has {problem.channels[channel]:g} to share, and its links were given {total:g}"
        for channel, total in totals.items()
        if total > problem.channels[channel] * (1 + _SHARE_TOLERANCE)
    ]
