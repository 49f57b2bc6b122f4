"""The time of a round as a sum, predicted and measured: what it was spent on in the cluster that took longest."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from collapipe.evaluation import measured_seconds
from collapipe.planning.decisions import RoundDecision
from collapipe.v1 import job_pb2, scheduler_pb2

EVALUATION = "evaluate the model"
"""A part that no prediction has."""


@dataclass(frozen=True)
class Part:
    """A part of the time of a round, in seconds. `None` if it is not predicted, or not measured.

    Args:
        level: 0 for the whole round, 1 for its parts, 2 for the parts of training.
    """

    level: int
    name: str
    predicted: float | None
    measured: float | None


@dataclass(frozen=True)
class RoundSum:
    """Parts whose times add up, level by level. The whole round is the last one."""

    cluster_index: int
    parts: tuple[Part, ...]


@dataclass(frozen=True)
class _Training:
    """The time of training, as the stage that computes most sees it."""

    whole: float
    computes: float
    other_stages: float
    links: float
    updates: float

    @classmethod
    def divide(
        cls, whole: float, computes: float, updates: float, other_stages: float
    ) -> "_Training":
        """Divides a time such that nothing is negative and the parts add up."""
        computes = min(computes, whole)
        updates = min(max(updates, 0.0), whole - computes)
        waits = max(whole - computes - updates, 0.0)
        other_stages = min(max(other_stages, 0.0), waits)
        return cls(whole, computes, other_stages, waits - other_stages, updates)


@dataclass(frozen=True)
class _Column:
    """The parts of a round, as predicted or as measured."""

    fetch: float
    training: _Training
    push: float
    rest: float
    plan: float | None = None
    evaluation: float | None = None

    @property
    def whole(self) -> float:
        return sum((self.plan or 0.0, self.fetch, self.training.whole, self.push, self.rest)) + (
            self.evaluation or 0.0
        )


def round_sum(
    decision: RoundDecision, committed: scheduler_pb2.RoundCommitted | None = None
) -> RoundSum | None:
    """Divides the time of a round.

    While a stage does not compute, it waits for other stages, because the pipeline fills and empties: that is the time
    which docs/scheduling.md (5) gives without links. It waits for links in the rest of its waiting time.

    Args:
        committed: What the round has measured; `None` before its commit.

    Returns:
        `None` if the round is neither predicted nor measured.
    """
    index, summary = _slowest(decision, committed)
    busy = _busiest(decision, index, summary)
    expected = _predicted(decision, index, busy)
    observed = None
    if committed is not None and summary is not None:
        observed = _measured(decision, index, busy, summary, committed.round_seconds)
    if expected is None and observed is None:
        return None
    problem = decision.question.problem
    steps = (summary.local_steps if summary is not None else 0) or problem.local_steps
    shared = " and the edge server" if len(problem.clusters) > 1 else ""
    rows: list[tuple[int, str, Callable[[_Column], float | None]]] = [
        (1, "plan the round", lambda one: one.plan),
        (1, "fetch weights, prepare the stages", lambda one: one.fetch),
        (1, f"train {steps} step{'s' * (steps != 1)}", lambda one: one.training.whole),
        (
            2,
            f"{decision.plans[index].stages[busy].host_id} computes",
            lambda one: one.training.computes,
        ),
        (2, "it waits for other stages", lambda one: one.training.other_stages),
        (2, f"it waits for links{shared}", lambda one: one.training.links),
        (2, "it updates its weights", lambda one: one.training.updates),
        (1, "push weights to the edge server", lambda one: one.push),
        (1, EVALUATION, lambda one: one.evaluation),
        (1, "average, commit, other work", lambda one: one.rest),
        (0, "whole round", lambda one: one.whole),
    ]
    parts = (
        Part(
            level,
            name,
            None if expected is None else read(expected),
            None if observed is None else read(observed),
        )
        for level, name, read in rows
    )
    return RoundSum(index, tuple(p for p in parts if (p.predicted, p.measured) != (None, None)))


def _predicted(decision: RoundDecision, index: int, busy: int) -> _Column | None:
    """Returns the predicted parts; `None` if they rest on guesses, or a link is missing."""
    prediction = decision.prediction
    if decision.guessed or not math.isfinite(prediction.full_round_seconds):
        return None
    one = prediction.clusters[index]
    return _Column(
        one.fetch_seconds + one.migrate_seconds,
        _predicted_training(decision, index, busy),
        one.push_seconds,
        decision.question.problem.fixed_seconds,
    )


def _measured(
    decision: RoundDecision,
    index: int,
    busy: int,
    summary: job_pb2.RoundSummary,
    round_seconds: float,
) -> _Column:
    column = _Column(
        summary.configure_seconds,
        _measured_training(decision, index, busy, summary),
        summary.gather_seconds,
        0.0,
        decision.solve_seconds,
        summary.evaluation_seconds or None,
    )
    return replace(column, rest=round_seconds - column.whole)


def _slowest(
    decision: RoundDecision, committed: scheduler_pb2.RoundCommitted | None
) -> tuple[int, job_pb2.RoundSummary | None]:
    """Returns the cluster that took longest, and what it measured. Before the commit, it is the one predicted to."""
    in_time: list[tuple[float, int]] = []
    if committed is not None:
        in_time = [
            (measured_seconds(s), index)
            for index, s in enumerate(committed.summaries)
            if index not in committed.late_clusters and index < len(decision.plans)
        ]
    if committed is not None and in_time:
        index = max(in_time)[1]
        return index, committed.summaries[index]
    later = 1 - 1 / decision.question.problem.migration_horizon_rounds
    clusters = decision.prediction.clusters
    return (
        max(
            range(len(clusters)),
            key=lambda i: clusters[i].round_seconds + later * clusters[i].migrate_seconds,
        ),
        None,
    )


def computing_seconds(summary: job_pb2.RoundSummary) -> dict[str, float]:
    """Returns the seconds that each host computed in a round, forward and backward, by its id."""
    return {
        report.host_id: report.times.forward_seconds + report.times.backward_seconds
        for report in summary.stages
    }


def _busiest(decision: RoundDecision, index: int, summary: job_pb2.RoundSummary | None) -> int:
    """Returns the stage that computes most: as measured, else as predicted."""
    stages = decision.plans[index].stages
    seconds = computing_seconds(summary) if summary else {}
    if not any(seconds.get(stage.host_id) for stage in stages):
        predicted = decision.prediction.clusters[index].stages
        return max(range(len(stages)), key=lambda k: predicted[k].compute_seconds)
    return max(range(len(stages)), key=lambda k: seconds.get(stages[k].host_id, 0.0))


def _predicted_training(decision: RoundDecision, index: int, busy: int) -> _Training:
    problem = decision.question.problem
    cluster, predicted = problem.clusters[index], decision.prediction.clusters[index]
    steps, num_parts = problem.local_steps, decision.plans[index].num_parts
    num_updates = num_parts if problem.update_per_micro_batch else 1
    computes = [stage.compute_seconds for stage in predicted.stages]
    deferred = sum(stage.deferred_seconds for stage in predicted.stages[1:])
    filling = _filling(computes, busy, num_parts, is_serial=problem.update_per_micro_batch)
    whole = steps * predicted.mini_batch_seconds
    own = steps * num_parts * computes[busy]
    updates = steps * num_updates * cluster.step_seconds
    return _Training.divide(whole, own, updates, steps * (filling - num_updates * deferred))


def _measured_training(
    decision: RoundDecision, index: int, busy: int, summary: job_pb2.RoundSummary
) -> _Training:
    problem, plan = decision.question.problem, decision.plans[index]
    seconds, host_id = computing_seconds(summary), plan.stages[busy].host_id
    passes = (summary.local_steps or problem.local_steps) * plan.num_parts
    computes = [seconds.get(stage.host_id, 0.0) / passes for stage in plan.stages]
    filling = _filling(computes, busy, plan.num_parts, is_serial=problem.update_per_micro_batch)
    # Between two steps, it waits for the others, too.
    others = sum(
        r.times.total_seconds - r.times.waiting_seconds
        for r in summary.stages
        if r.host_id == host_id
    )
    own = seconds.get(host_id, 0.0)
    other_stages = filling * passes / plan.num_parts
    return _Training.divide(summary.training_seconds, own, others - own, other_stages)


def _filling(computes: Sequence[float], stage: int, num_parts: int, *, is_serial: bool) -> float:
    """Returns how long a stage waits in a step for the others, if links take no time and nothing is deferred.

    Args:
        computes: Time of one micro-batch or slice on each stage.
        is_serial: Whether each passes the whole pipeline alone.
    """
    if is_serial:
        return num_parts * (sum(computes) - computes[stage])
    return sum(computes) + (num_parts - 1) * max(computes) - num_parts * computes[stage]
