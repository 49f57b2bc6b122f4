"""Explains in plain words why the scheduler decided as it did."""

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

from collapipe.allocation import ClusterProblem, RadioLink, StagePlan, WiredLink, predict
from collapipe.scheduler.decisions import RoundDecision, num_moved_blocks
from collapipe.v1 import plan_pb2

_KEPT_BECAUSE = {
    "hysteresis": "no other plan is better by more than schedule.hysteresis",
    "telemetry_missing": "there was no recent telemetry of some host",
    "solver_failed": "the solver failed",
    "solver_slow": "the solver took too long",
    "evaluation": "the round only evaluated the model",
}
_BETTER = 0.9
"""The time of an improved processor or link, as a part of its present time."""

_NEARLY_FULL = 0.95
"""A host that needs more than this part of its memory is reported."""

_NEARLY_FULL_POWER = 0.99
"""A host that sends with less than this part of its largest power is reported."""

_HOPELESS_BACKLOG = 10.0
"""With a larger backlog, in round budgets, the energy budget counts as not met."""


def explain(decision: RoundDecision) -> list[str]:
    """Returns statements about the choices, bottlenecks, binding limits and the most useful improvement."""
    problem, prediction = decision.question.problem, decision.prediction
    lines = [
        f"{decision.question.strategy} predicts {prediction.round_seconds:.3g} s for the round, decided in "
        f"{decision.solve_seconds * 1000:.0f} ms"
    ]
    if decision.kept_because:
        reason = _KEPT_BECAUSE[decision.kept_because]
        lines.append(f"the plans of the previous round were kept: {reason}")
    for index in range(len(problem.clusters)):
        lines += [f"cluster {index}: {line}" for line in _explain_cluster(decision, index)]
    if math.isfinite(problem.convergence.limit):
        lines.append(
            f"the convergence term is {prediction.convergence_term:.4g}, its limit "
            f"{problem.convergence.limit:.4g}"
        )
    lines += [*_energy_queues(decision), *decision.notes, *_best_improvement(decision)]
    estimates = decision.estimates
    if estimates is not None:
        lines += [f"implausible telemetry was rejected: {reason}" for reason in estimates.rejected]
        if estimates.missing:
            lines.append(f"no recent telemetry from {', '.join(estimates.missing)}")
    measured = estimates.hosts.values() if estimates is not None else ()
    if not any(host.seconds_per_sample for host in measured):
        lines.append(
            "the decision rests on profiles and earlier rounds: there were no new measurements"
        )
    return lines


def _explain_cluster(decision: RoundDecision, index: int) -> Iterator[str]:
    problem, plan = decision.question.problem, decision.plans[index]
    cluster, predicted = problem.clusters[index], decision.prediction.clusters[index]
    placed = ", ".join(
        f"{host} runs {segment.num_blocks} block{'s' * (segment.num_blocks != 1)}"
        for host, segment in plan.segments.items()
    )
    slices = f", each cut into {plan.num_slices} slices" if plan.num_slices > 1 else ""
    yield (
        f"{placed}; {plan.num_micro_batches} micro-batches of "
        f"{problem.mini_batch / plan.num_micro_batches:g} samples{slices}; {predicted.mini_batch_seconds:.3g} s for a "
        f"mini-batch; the stages are idle {predicted.bubble_ratio:.0%} of the time"
    )
    if repeating := [stage.host_id for stage in plan.stages if stage.recompute]:
        yield f"{', '.join(repeating)} repeat their forward passes, which needs less memory and a third more computing"
    for device in cluster.devices:
        if device.host_id not in plan.segments:
            if decision.question.strategy != "dssra":
                reason = ""
            elif device.backlog:
                reason = ": to save its energy"
            else:
                reason = ": the round is no faster with it"
            yield f"{device.host_id} is not used{reason}"
    if moved := num_moved_blocks(cluster.previous, plan):
        verb = "block moves" if moved == 1 else "blocks move"
        yield f"{moved} {verb} to another host, which takes {predicted.migrate_seconds:.3g} s once"
    back = f", and {predicted.fetch_seconds:.3g} s back" if len(problem.clusters) > 1 else ""
    yield (
        f"weights take {predicted.push_seconds:.3g} s to the edge server with the codec {plan.upload_codec}{back}"
    )
    limiting = say_bottleneck(predicted.bottleneck, predicted.bottleneck_seconds, plan.stages)
    yield f"bottleneck is {limiting}"
    yield from _binding_limits(decision, index)


def say_bottleneck(
    name: str, seconds: float, stages: Sequence[StagePlan] | Sequence[plan_pb2.Stage]
) -> str:
    """Names the part of a pipeline that limits it.

    Args:
        name, seconds: As in `ClusterPrediction`.
        stages: In pipeline order.
    """
    kind, _, number = name.rpartition(" ")
    time = f"{seconds:.3g} s for a micro-batch"
    if kind == "stage":
        return f"the processor of {stages[int(number)].host_id}: {time}"
    if kind == "link":
        sender, receiver = stages[int(number)].host_id, stages[int(number) + 1].host_id
        return f"the link from {sender} to {receiver}: {time}"
    if kind == "window":
        stage = stages[int(number)]
        return f"the in-flight window of {stage.host_id}, {stage.in_flight} micro-batches: {time}"
    return f"the edge server, which serves every cluster: {time}"


def _binding_limits(decision: RoundDecision, index: int) -> Iterator[str]:
    problem, plan = decision.question.problem, decision.plans[index]
    cluster = problem.clusters[index]
    for stage in decision.prediction.clusters[index].stages:
        limit = cluster.hosts[stage.host_id].memory_bytes
        if limit is not None and stage.memory_bytes > _NEARLY_FULL * limit:
            yield (
                f"the memory of {stage.host_id} is nearly full: {stage.memory_bytes / 1e6:.0f} of "
                f"{limit / 1e6:.0f} MB"
            )
    hops = [
        (before.host_id, after.host_id, link)
        for (before, after), link in zip(itertools.pairwise(plan.stages), plan.links, strict=True)
    ]
    if cluster.channel is not None:
        on_radio = any(isinstance(link, RadioLink) for link in cluster.links.values())
        unit = "MHz" if on_radio else "Mbit/s"
        shares = ", ".join(f"{one} to {other} {link.share / 1e6:.3g}" for one, other, link in hops)
        total = problem.channels[cluster.channel] / 1e6
        yield f"its links share {total:.3g} {unit}: {shares}"
    sent: dict[str, float] = {}
    for one, other, link in hops:
        for host_id, watts in ((one, link.forward_watts), (other, link.backward_watts)):
            sent[host_id] = sent.get(host_id, 0.0) + watts
    for host_id, watts in sent.items():
        most = cluster.hosts[host_id].max_transmit_watts
        if 0 < watts < _NEARLY_FULL_POWER * most:
            yield f"{host_id} sends with {watts:.3g} of {most:.3g} W to save energy"


def _energy_queues(decision: RoundDecision) -> Iterator[str]:
    energy = decision.prediction.energy_joules
    for cluster in decision.question.problem.clusters:
        for device in cluster.devices:
            budget = device.energy_budget_joules
            if not budget or device.backlog <= 0:
                continue
            joules = energy.get(device.host_id, 0.0)
            yield (
                f"{device.host_id} has exceeded its energy budget by {device.backlog:.2g} rounds; this round needs "
                f"{joules:.3g} of {budget:.3g} J"
            )
            if device.backlog > _HOPELESS_BACKLOG and joules > budget:
                yield (
                    f"the budget of {device.host_id} is not met: it needs {joules:.3g} J a round, or a lower "
                    "schedule.penalty_weight, fewer local steps, or other devices that take its blocks"
                )


def _best_improvement(decision: RoundDecision) -> Iterator[str]:
    """Names the processor or link whose improvement would shorten the round most, with unchanged plans."""
    now = decision.prediction.round_seconds
    saved: list[tuple[float, str]] = []
    for index, cluster in enumerate(decision.question.problem.clusters):
        host_ids = [stage.host_id for stage in decision.plans[index].stages]
        improved = [(_faster_host(cluster, one), f"processor of {one}") for one in host_ids]
        improved += [
            (_better_link(cluster, one, other), f"link between {one} and {other}")
            for one, other in itertools.pairwise(host_ids)
        ]
        saved += [
            (now - _round_seconds(decision, index, better), name) for better, name in improved
        ]
    best, name = max(saved, default=(0.0, ""))
    if best > 0 and math.isfinite(now):
        yield f"what would help most: a 10 % faster {name} saves {best:.2g} s a round ({best / now:.0%})"


def _round_seconds(decision: RoundDecision, index: int, cluster: ClusterProblem) -> float:
    """Predicts the duration of the round with one cluster replaced."""
    problem = decision.question.problem
    clusters = (*problem.clusters[:index], cluster, *problem.clusters[index + 1 :])
    return predict(replace(problem, clusters=clusters), decision.plans).round_seconds


def _faster_host(cluster: ClusterProblem, host_id: str) -> ClusterProblem:
    host = cluster.hosts[host_id]
    faster = replace(
        host,
        seconds_per_sample=_BETTER * host.seconds_per_sample,
        seconds_per_micro_batch=_BETTER * host.seconds_per_micro_batch,
    )
    return replace(
        cluster,
        control_unit=faster if host == cluster.control_unit else cluster.control_unit,
        devices=tuple(faster if host == device else device for device in cluster.devices),
        edge_server=faster if host == cluster.edge_server else cluster.edge_server,
    )


def _better_link(cluster: ClusterProblem, one: str, other: str) -> ClusterProblem:
    links = dict(cluster.links)
    for pair in ((one, other), (other, one)):
        link = links.get(pair)
        if link is None:
            continue
        link = replace(link, round_trip_seconds=_BETTER * link.round_trip_seconds)
        if isinstance(link, WiredLink):
            links[pair] = replace(link, capacity_bps=link.capacity_bps / _BETTER)
        else:
            links[pair] = replace(link, efficiency=link.efficiency / _BETTER)
    return replace(cluster, links=links)
