"""Explains in plain words why the scheduler decided as it did."""

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping

from collapipe.allocation import ClusterPlan, RadioLink, StagePlan, predict
from collapipe.allocation.round_model.prediction import stage_memory_bytes
from collapipe.errors import InfeasibleError
from collapipe.evaluation import evaluation_delay
from collapipe.planning.advice import LEAST_SHARE, advise, equal_plan, lasting_seconds
from collapipe.planning.decisions import RoundDecision, num_moved_blocks
from collapipe.planning.round_sum import EVALUATION, round_sum
from collapipe.v1 import plan_pb2, scheduler_pb2

_KEPT_BECAUSE = {
    "hysteresis": "no other plan is better by more than schedule.hysteresis",
    "telemetry_missing": "there was no recent telemetry of some host",
    "solver_failed": "the solver failed",
    "solver_slow": "the solver took too long",
    "evaluation": "the round only evaluated the model",
}
_FAR_OFF = 0.3
"""A prediction that differs from the measured time by more than this share of it is far off."""

_NAME_WIDTH = 46
"""Columns of the names of the parts of a round."""

_NEARLY_FULL = 0.95
"""A host that needs more than this part of its memory is reported."""

_NEARLY_FULL_POWER = 0.99
"""A host that sends with less than this part of its largest power is reported."""

_HOPELESS_BACKLOG = 10.0
"""With a larger backlog, in round budgets, the energy budget counts as not met."""


def explain(
    decision: RoundDecision, committed: scheduler_pb2.RoundCommitted | None = None
) -> list[str]:
    """Explains a round under headings: its time as a sum, why the plan is as it is, and what would help.

    Args:
        committed: What the round has measured; `None` before its commit.

    Returns:
        Lines. Those under a heading are indented. Lines with a number at their end fit into 80 columns.
    """
    lines = ["The round in seconds", *_indented(_sum_lines(decision, committed))]
    lines += ["Why this plan", *_indented(_reasons(decision))]
    lines += [
        f"What would make a round shorter, at least by {LEAST_SHARE:.0%}, each alone",
        *_indented(_advice_lines(decision, committed)),
    ]
    return lines


def _indented(lines: Iterable[str]) -> Iterator[str]:
    return (f"  {line}" for line in lines)


def _sum_lines(
    decision: RoundDecision, committed: scheduler_pb2.RoundCommitted | None
) -> Iterator[str]:
    if decision.guessed:
        yield (
            f"not predicted: when this round was planned, nobody had measured how fast {', '.join(decision.guessed)} "
            f"{'is' if len(decision.guessed) == 1 else 'are'}; the next round is predicted from this one"
        )
    divided = round_sum(decision, committed)
    if divided is None:
        if not decision.guessed:
            yield "not predicted: the plan needs a link that is missing or does not answer"
        return
    if len(decision.plans) > 1:
        yield f"cluster {divided.cluster_index} takes longest:"
    yield f"{'':{_NAME_WIDTH}}{'predicted':>12}{'measured':>12}"
    whole = divided.parts[-1]
    largest = max(whole.predicted or 0.0, whole.measured or 0.0)
    digits = next((d for limit, d in ((1, 4), (10, 3), (1000, 2)) if largest < limit), 1)
    for part in divided.parts:
        name = f"{'  ' * max(part.level - 1, 0)}{part.name}"
        values = (
            "-" if value is None else f"{value:.{digits}f} s"
            for value in (part.predicted, part.measured)
        )
        yield f"{name:{_NAME_WIDTH}}" + "".join(f"{value:>12}" for value in values)
    if whole.predicted is not None and whole.measured is not None:
        missing = whole.measured - whole.predicted
        evaluation = sum(p.measured or 0.0 for p in divided.parts if p.name == EVALUATION)
        late = f"; no prediction counts the {evaluation:.{digits}f} s that evaluate the model" * (
            evaluation > 0
        )
        yield (
            f"the round took {abs(missing):.{digits}f} s {'more' if missing > 0 else 'less'} than predicted"
            + late
        )
        if abs(missing - evaluation) > _FAR_OFF * (whole.measured - evaluation):
            yield "the prediction is far off, so take the seconds below as rough"
    if whole.measured is None:
        yield "not measured: the round is not committed yet"


def _reasons(decision: RoundDecision) -> Iterator[str]:
    problem, prediction = decision.question.problem, decision.prediction
    yield (
        f"{decision.question.strategy} decided it in {say_seconds(decision.solve_seconds)}"
        + f", and predicts {say_seconds(prediction.full_round_seconds)} for the round"
        * (not decision.guessed)
    )
    if decision.kept_because:
        reason = _KEPT_BECAUSE[decision.kept_because]
        yield f"the plans of the previous round were kept: {reason}"
    if not decision.guessed:
        yield _against_equal_segments(decision)
    idle = idle_reasons(decision)
    for index in range(len(problem.clusters)):
        yield from (f"cluster {index}: {line}" for line in _explain_cluster(decision, index, idle))
    if math.isfinite(problem.convergence.limit):
        yield (
            f"the convergence term is {prediction.convergence_term:.4g}, its limit "
            f"{problem.convergence.limit:.4g}"
        )
    yield from _energy_queues(decision)
    yield from decision.notes
    estimates = decision.estimates
    if estimates is not None:
        yield from (
            f"implausible telemetry was rejected: {reason}" for reason in estimates.rejected
        )
        if estimates.missing:
            yield f"no recent telemetry from {', '.join(estimates.missing)}"
    measured = estimates.hosts.values() if estimates is not None else ()
    if not any(host.seconds_per_sample for host in measured):
        yield "the decision rests on profiles and earlier rounds: there were no new measurements"


def _against_equal_segments(decision: RoundDecision) -> str:
    """Says what a round would take with equal segments."""
    problem, strategy = decision.question.problem, decision.question.strategy
    now = lasting_seconds(problem, decision.prediction)
    try:
        equal = equal_plan(decision)
    except InfeasibleError as error:
        return f"equal segments do not fit: {error}"
    if _sizes(equal) == _sizes(decision.plans):
        reason = (
            ", as this strategy always plans"
            if strategy == "pipeline"
            else ": no other split is shorter"
        )
        return f"all devices have equally many blocks{reason if strategy in ('pipeline', 'dssra') else ''}"
    predicted = predict(problem, equal)
    seconds = lasting_seconds(problem, predicted)
    slowest = max(range(len(equal)), key=lambda i: predicted.clusters[i].round_seconds)
    one = predicted.clusters[slowest]
    limit = say_bottleneck(one.bottleneck, one.bottleneck_seconds, equal[slowest])
    return (
        f"equal segments would take {say_seconds(seconds)} a round, and this plan takes {say_seconds(now)} (moves of units left out); what would "
        f"limit them is {limit}"
    )


def _sizes(plans: Iterable[ClusterPlan]) -> list[dict[str, int]]:
    """Returns the number of blocks of each host, cluster by cluster. The order of the hosts does not matter."""
    return [{host: each.num_blocks for host, each in plan.segments.items()} for plan in plans]


def _advice_lines(
    decision: RoundDecision, committed: scheduler_pb2.RoundCommitted | None
) -> Iterator[str]:
    without_evaluation = list(_evaluation_advice(committed))
    yield from without_evaluation
    if decision.guessed:
        yield "the speeds are not measured yet: ask about the next round"
        return
    now = lasting_seconds(decision.question.problem, decision.prediction)
    advice = advise(decision)
    for number, one in enumerate(advice, start=1):
        yield (
            f"{number}. {one.text}: saves {say_seconds(one.saved_seconds)} of "
            f"{say_seconds(now)} ({one.saved_seconds / now:.0%})"
        )
    if not advice and not without_evaluation:
        tie = " (the slowest clusters take about equally long, so one alone does not help)"
        seconds = sorted(cluster.round_seconds for cluster in decision.prediction.clusters)
        is_tie = len(seconds) > 1 and seconds[-1] - seconds[-2] < LEAST_SHARE * now
        yield "no single change of a link, a device or a setting" + tie * is_tie


def _evaluation_advice(committed: scheduler_pb2.RoundCommitted | None) -> Iterator[str]:
    """Says what a round without its evaluation would save. No plan changes that."""
    if committed is None:
        return
    late = set(committed.late_clusters)
    saved = evaluation_delay([s for i, s in enumerate(committed.summaries) if i not in late])
    if saved >= LEAST_SHARE * committed.round_seconds > 0:
        yield (
            f"evaluate fewer rounds, with a larger training.evaluate_every: saves {say_seconds(saved)} of "
            f"{say_seconds(committed.round_seconds)} ({saved / committed.round_seconds:.0%}) in each round that does not evaluate"
        )


def idle_reasons(decision: RoundDecision) -> dict[str, str]:
    """Returns why devices hold no blocks, by their ids."""
    problem, strategy = decision.question.problem, decision.question.strategy
    reasons = {}
    for cluster, plan in zip(problem.clusters, decision.plans, strict=True):
        for device in cluster.devices:
            if device.host_id in plan.segments:
                continue
            window = max(stage.in_flight for stage in plan.stages)
            block = StagePlan(device.host_id, 1, 2, window)
            needs = stage_memory_bytes(problem, device, block, plan.num_micro_batches)
            if device.memory_bytes is not None and needs > device.memory_bytes:
                reason = f"a block needs {needs / 1e6:.0f} MB there, and it may use {device.memory_bytes / 1e6:.0f} MB"
            elif strategy != "dssra":
                reason = f"the strategy {strategy} gives it no blocks"
            elif device.backlog:
                reason = "to save its energy"
            else:
                reason = "the round is no faster with it"
            reasons[device.host_id] = reason
    return reasons


def _explain_cluster(decision: RoundDecision, index: int, idle: Mapping[str, str]) -> Iterator[str]:
    problem, plan = decision.question.problem, decision.plans[index]
    cluster, predicted = problem.clusters[index], decision.prediction.clusters[index]
    placed = ", ".join(
        f"{host} runs {segment.num_blocks} block{'s' * (segment.num_blocks != 1)}"
        for host, segment in plan.segments.items()
    )
    size = problem.mini_batch / plan.num_micro_batches
    slices = f", each cut into {plan.num_slices} slices" if plan.num_slices > 1 else ""
    yield (
        f"{placed}; {plan.num_micro_batches} micro-batch{'es' * (plan.num_micro_batches != 1)} of "
        f"{size:g} sample{'s' * (size != 1)}{slices}"
    )
    if repeating := [stage.host_id for stage in plan.stages if stage.recompute]:
        repeat = "repeats its" if len(repeating) == 1 else "repeat their"
        yield f"{', '.join(repeating)} {repeat} forward passes, which needs less memory and a third more computing"
    for device in cluster.devices:
        if device.host_id in idle:
            yield f"{device.host_id} is not used: {idle[device.host_id]}"
    if moved := num_moved_blocks(cluster.previous, plan):
        verb = "block moves" if moved == 1 else "blocks move"
        yield f"{moved} {verb} to another host, which takes {say_seconds(predicted.migrate_seconds)} once"
    if decision.guessed:
        yield f"weights go to the edge server with the codec {plan.upload_codec}"
    else:
        back = (
            f", and {say_seconds(predicted.fetch_seconds)} back"
            if len(problem.clusters) > 1
            else ""
        )
        limiting = say_bottleneck(predicted.bottleneck, predicted.bottleneck_seconds, plan)
        yield (
            f"a mini-batch takes {say_seconds(predicted.mini_batch_seconds)}; the stages are idle {predicted.bubble_ratio:.0%} "
            "of the time"
        )
        yield (
            f"weights take {say_seconds(predicted.push_seconds)} to the edge server with the codec {plan.upload_codec}{back}"
        )
        yield f"the bottleneck is {limiting}"
    yield from _binding_limits(decision, index)


def say_seconds(seconds: float) -> str:
    """Writes a time in its unit."""
    return f"{1e3 * seconds:.3g} ms" if 0 < seconds < 0.1 else f"{seconds:.3g} s"


def say_bottleneck(name: str, seconds: float | None, plan: ClusterPlan | plan_pb2.Plan) -> str:
    """Names the part of a pipeline that limits it. `name` and `seconds` are those of `ClusterPrediction`.

    Without `seconds`, it names the part alone.
    """
    stages = plan.stages
    kind, _, number = name.rpartition(" ")
    if seconds is None:
        return say_bottleneck(name, 0.0, plan).partition(": ")[0]
    time = f"{say_seconds(seconds)} for a {'slice' if plan.num_slices > 1 else 'micro-batch'}"
    if kind == "stage":
        return f"the processor of {stages[int(number)].host_id}: {time}"
    if kind.endswith("link"):
        sender, receiver = stages[int(number)].host_id, stages[int(number) + 1].host_id
        if kind == "link":
            return f"the link between {sender} and {receiver}: {time}"
        if kind == "backward link":
            sender, receiver = receiver, sender
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
