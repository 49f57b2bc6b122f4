"""Says in plain words why the scheduler chose what it chose."""

import math
from collections.abc import Iterator
from dataclasses import replace

from collapipe.allocation import ClusterProblem, RoundProblem, predict
from collapipe.allocation.round_model.prediction import ClusterPrediction
from collapipe.allocation.round_model.problem import RadioLink, WiredLink
from collapipe.scheduler.decisions import RoundDecision, moved

_KEPT = {
    "hysteresis": "no other is better by more than schedule.hysteresis, so nothing moves",
    "telemetry_missing": "there was no fresh telemetry of some host",
    "solver_failed": "the solver failed",
    "solver_slow": "the solver took too long",
    "evaluation": "the round only measured the model",
}
_BETTER = 0.9
"""What is tried to find what would help: a tenth less time."""

_NEARLY_FULL = 0.95

_HOPELESS_BACKLOG = 10.0
"""Rounds' budgets that a queue is over when its budget is said not to be met."""


def explain(decision: RoundDecision) -> list[str]:
    """Explains a decision, one line a statement: what was chosen, what holds the round up, which limits bind, what would help."""
    problem, prediction = decision.question.problem, decision.prediction
    lines = [
        f"{decision.question.strategy} predicts {prediction.round_seconds:.3g} s for the round, decided in "
        f"{decision.solve_seconds * 1000:.0f} ms"
    ]
    if decision.kept:
        lines.append(f"the plan in force was kept: {_KEPT.get(decision.kept, decision.kept)}")
    for index, cluster in enumerate(problem.clusters):
        lines += _explain_cluster(decision, index, cluster)
    lines += [*_queues(decision), *decision.notes, *_what_would_help(decision)]
    if decision.estimates is not None:
        lines += [f"telemetry not believed: {words}" for words in decision.estimates.rejected]
        if decision.estimates.missing:
            lines.append(f"no telemetry of {', '.join(decision.estimates.missing)}")
    seen = decision.estimates.hosts.values() if decision.estimates is not None else ()
    if not any(host.seconds_per_sample for host in seen):
        lines.append("it rests on profiles and on earlier rounds: nothing new was measured")
    return lines


def _explain_cluster(decision: RoundDecision, index: int, cluster: ClusterProblem) -> list[str]:
    problem, plan = decision.question.problem, decision.plans[index]
    predicted = decision.prediction.clusters[index]
    placed = ", ".join(
        f"{host} runs {segment.num_blocks} block{'s' * (segment.num_blocks != 1)}"
        for host, segment in plan.segments.items()
    )
    unused = [d for d in cluster.devices if d.host_id not in plan.segments]
    lines = [
        f"cluster {index}: {placed}; {plan.num_micro_batches} micro-batches of "
        f"{problem.mini_batch / plan.num_micro_batches:g}; {predicted.mini_batch_seconds:.3g} s a mini-batch, "
        f"{predicted.bubble_ratio:.0%} of the stages' time idle"
    ]
    for device in unused:
        why = ""
        if decision.question.strategy == "dssra":
            why = ": to save its energy" if device.backlog else ": the round is no faster with it"
        lines.append(f"cluster {index}: {device.host_id} is left out{why}")
    if blocks := moved(cluster.previous, plan):
        lines.append(
            f"cluster {index}: {blocks} block{'s' * (blocks != 1)} change hands, which takes "
            f"{predicted.migrate_seconds:.3g} s once"
        )
    lines.append(f"cluster {index}: bottleneck is {_bottleneck(decision, index, predicted)}")
    lines += _binding_limits(problem, index, decision)
    return lines


def _bottleneck(decision: RoundDecision, index: int, predicted: ClusterPrediction) -> str:
    plan, seconds = decision.plans[index], predicted.bottleneck_seconds
    kind, _, number = predicted.bottleneck.rpartition(" ")
    each = f"{seconds:.3g} s a micro-batch"
    if kind == "stage":
        host = plan.stages[int(number)].host_id
        return f"the processor of {host}: {each}"
    if kind == "link":
        sender, receiver = plan.stages[int(number)].host_id, plan.stages[int(number) + 1].host_id
        return f"the link from {sender} to {receiver}: {each}"
    if kind == "window":
        stage = plan.stages[int(number)]
        return f"the window of {stage.host_id}, {stage.in_flight} in flight: {each}"
    return f"the edge server, which serves every cluster: {each}"


def _binding_limits(problem: RoundProblem, index: int, decision: RoundDecision) -> Iterator[str]:
    cluster, plan = problem.clusters[index], decision.plans[index]
    hosts = cluster.hosts
    for stage in decision.prediction.clusters[index].stages:
        limit = hosts[stage.host_id].memory_bytes
        if limit is not None and stage.memory_bytes > _NEARLY_FULL * limit:
            yield (
                f"cluster {index}: memory binds at {stage.host_id}: {stage.memory_bytes / 1e6:.0f} of "
                f"{limit / 1e6:.0f} MB"
            )
    if cluster.channel is not None:
        total, unit = problem.channels[cluster.channel], _unit(cluster)
        shares = ", ".join(
            f"{plan.stages[i].host_id} to {plan.stages[i + 1].host_id} {link.share / 1e6:.3g}"
            for i, link in enumerate(plan.links)
        )
        yield f"cluster {index}: the channel's {total / 1e6:.3g} M{unit} are shared: {shares}"
    for i, link in enumerate(plan.links):
        ends = plan.stages[i].host_id, plan.stages[i + 1].host_id
        for host_id, watts in zip(ends, (link.forward_watts, link.backward_watts), strict=True):
            most = hosts[host_id].max_transmit_watts
            if 0 < watts < 0.99 * most:
                yield f"cluster {index}: {host_id} sends with {watts:.3g} of {most:.3g} W to save energy"
    if math.isfinite(problem.convergence.limit) and index == 0:
        yield (
            f"the convergence term is {decision.prediction.convergence_term:.4g} of at most "
            f"{problem.convergence.limit:.4g}"
        )


def _queues(decision: RoundDecision) -> Iterator[str]:
    energy = decision.prediction.energy_joules
    for cluster in decision.question.problem.clusters:
        for device in cluster.devices:
            budget = device.energy_budget_joules
            if budget and device.backlog > 0:
                joules = energy.get(device.host_id, 0.0)
                yield (
                    f"{device.host_id} is {device.backlog:.2g} rounds' energy over its budget of {budget:.3g} J; this "
                    f"round costs it {joules:.3g} J"
                )
                if device.backlog > _HOPELESS_BACKLOG and joules > budget:
                    yield (
                        f"the budget of {device.host_id} is not met: it needs {joules:.3g} J a round, or a lower "
                        "schedule.penalty_weight, fewer local steps, or other devices that take its blocks"
                    )


def _what_would_help(decision: RoundDecision) -> Iterator[str]:
    """Tries every processor and link a tenth better, with the plan as it is."""
    problem, plans = decision.question.problem, decision.plans
    now = decision.prediction.round_seconds
    saved: list[tuple[float, str]] = []
    for index, cluster in enumerate(problem.clusters):
        stages = plans[index].stages
        for position, stage in enumerate(stages):
            faster = _faster_host(cluster, stage.host_id)
            saved.append((now - _seconds(decision, index, faster), f"processor of {stage.host_id}"))
            if position + 1 < len(stages):
                pair = stage.host_id, stages[position + 1].host_id
                better = _better_link(cluster, *pair)
                name = f"link between {pair[0]} and {pair[1]}"
                saved.append((now - _seconds(decision, index, better), name))
    best, name = max(saved, default=(0.0, ""))
    if best > 0 and math.isfinite(now):
        yield f"what would help most: a 10 % faster {name} saves {best:.2g} s a round ({best / now:.0%})"


def _seconds(decision: RoundDecision, index: int, cluster: ClusterProblem) -> float:
    problem = decision.question.problem
    clusters = [*problem.clusters[:index], cluster, *problem.clusters[index + 1 :]]
    return predict(replace(problem, clusters=tuple(clusters)), decision.plans).round_seconds


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
        if isinstance(link, WiredLink):
            links[pair] = replace(
                link,
                capacity_bps=link.capacity_bps / _BETTER,
                round_trip_seconds=_BETTER * link.round_trip_seconds,
            )
        elif isinstance(link, RadioLink):
            links[pair] = replace(
                link,
                efficiency=link.efficiency / _BETTER,
                round_trip_seconds=_BETTER * link.round_trip_seconds,
            )
    return replace(cluster, links=links)


def _unit(cluster: ClusterProblem) -> str:
    return "Hz" if any(isinstance(link, RadioLink) for link in cluster.links.values()) else "bit/s"
