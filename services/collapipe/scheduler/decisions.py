"""A decision and everything that it rests on, so that it can be explained, and made again."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import ConfigDict, TypeAdapter, ValidationError

from collapipe.allocation import (
    ClusterPlan,
    RoundPlan,
    RoundPrediction,
    RoundProblem,
    predict,
    strategy_for,
)
from collapipe.errors import InvalidInputError
from collapipe.telemetry.estimates import Estimates

TIME_LIMIT_SECONDS = 5.0
"""A decision that takes longer keeps the plan in force: rounds do not wait for the scheduler."""


@dataclass(frozen=True)
class Question:
    """What is asked of a strategy.

    Args:
        strategy: As in the job file.
        segments: Of the strategy `manual`.
        hysteresis: Of the strategy `dssra`.
        problem: The round.
    """

    strategy: str
    segments: Sequence[Sequence[int]]
    hysteresis: float
    problem: RoundProblem

    @property
    def in_force(self) -> RoundPlan | None:
        """The plan of the round before, if there is one for every cluster."""
        plans = tuple(c.previous for c in self.problem.clusters if c.previous is not None)
        return plans if len(plans) == len(self.problem.clusters) else None


@dataclass(frozen=True)
class RoundDecision:
    """The answer.

    Args:
        question: What was asked.
        estimates: What telemetry had said by then; the problem is built on it and on what was known before.
        plans: What was decided.
        prediction: What the plans lead to.
        kept: Why the plan in force was kept; empty when it was not.
        notes: What else is worth telling, in words.
        solve_seconds: Time to decide.
    """

    __pydantic_config__ = ConfigDict(extra="forbid", ser_json_inf_nan="constants")

    question: Question
    estimates: Estimates | None
    plans: RoundPlan
    prediction: RoundPrediction
    kept: str = ""
    notes: tuple[str, ...] = ()
    solve_seconds: float = 0.0

    def to_json(self) -> dict[str, Any]:
        """Returns a JSON document; `from_json` gives back an equal object."""
        document: dict[str, Any] = _ADAPTER.dump_python(self, mode="json")
        for stored, cluster in zip(
            document["question"]["problem"]["clusters"],
            self.question.problem.clusters,
            strict=True,
        ):
            # JSON has no pairs as keys
            stored["links"] = {
                f"{sender}>{receiver}": link
                for (sender, receiver), link in zip(
                    cluster.links, stored["links"].values(), strict=True
                )
            }
        return document

    @classmethod
    def from_json(cls, document: Any) -> "RoundDecision":
        """Reads what `to_json` returned; raises `InvalidInputError`."""
        try:
            clusters = [
                {
                    **stored,
                    "links": {tuple(k.split(">", 1)): v for k, v in stored["links"].items()},
                }
                for stored in document["question"]["problem"]["clusters"]
            ]
            problem = {**document["question"]["problem"], "clusters": clusters}
            question = {**document["question"], "problem": problem}
            return _ADAPTER.validate_python({**document, "question": question})
        except (ValidationError, TypeError, KeyError, AttributeError) as error:
            raise InvalidInputError(f"the stored decision cannot be used: {error}") from None


_ADAPTER = TypeAdapter(RoundDecision)


def decide(
    question: Question,
    estimates: Estimates | None = None,
    time_limit_seconds: float | None = TIME_LIMIT_SECONDS,
) -> RoundDecision:
    """Asks the strategy.

    Args:
        question: What is to be decided.
        estimates: What the problem rests on, to be kept with the answer.
        time_limit_seconds: Of the strategy `dssra`; `None` lets it take its time.

    Raises:
        InfeasibleError: No plan satisfies the limits; says which, and what would be needed.
    """
    started = time.perf_counter()
    kept = ""
    notes: tuple[str, ...] = ()
    if question.strategy == "dssra":
        # cvxpy takes a second to import: only who needs it waits
        from collapipe.allocation.search.dssra import decide as decide_jointly

        decision = decide_jointly(
            question.problem,
            question.in_force,
            hysteresis=question.hysteresis,
            time_limit_seconds=time_limit_seconds,
        )
        plans, prediction = decision.plans, decision.prediction
        kept, notes = decision.kept, decision.notes
    else:
        plans = strategy_for(question.strategy, question.segments)(question.problem)
        prediction = predict(question.problem, plans)
    seconds = time.perf_counter() - started
    return RoundDecision(question, estimates, plans, prediction, kept, notes, seconds)


def keep(question: Question, reason: str, estimates: Estimates | None) -> RoundDecision | None:
    """Keeps the plan in force without asking; `None` when there is none."""
    plans = question.in_force
    if plans is None:
        return None
    return RoundDecision(question, estimates, plans, predict(question.problem, plans), reason)


def decide_again(decision: RoundDecision) -> RoundDecision:
    """Makes a decision again from what it rested on; one that nobody was asked for, or that failed, stands."""
    if decision.kept in ("telemetry_missing", "evaluation", "solver_failed", "solver_slow"):
        return decision
    return decide(decision.question, decision.estimates, None)


def full_round_seconds(decision: RoundDecision) -> float:
    """The round as it will be observed: with all of the migration, of which the objective counts a horizon's part."""
    problem = decision.question.problem
    horizon = problem.migration_horizon_rounds
    return problem.fixed_seconds + max(
        cluster.round_seconds + cluster.migrate_seconds * (1 - 1 / horizon)
        for cluster in decision.prediction.clusters
    )


def moved(before: ClusterPlan | None, after: ClusterPlan) -> int:
    """Blocks that change hands."""
    if before is None:
        return 0
    owners = [
        {
            block: host
            for host, segment in plan.segments.items()
            for block in range(segment.start_block, segment.stop_block)
        }
        for plan in (before, after)
    ]
    return sum(owners[0].get(block) != host for block, host in owners[1].items())
