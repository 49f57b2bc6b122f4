"""The decision about a round, with everything that it rests on, so that it can be explained and repeated."""

import copy
import dataclasses
import itertools
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import ConfigDict, TypeAdapter, ValidationError

from collapipe.allocation import (
    ClusterPlan,
    RoundPlan,
    RoundPrediction,
    RoundProblem,
    decide_round,
    predict,
)
from collapipe.errors import InvalidInputError
from collapipe.telemetry.estimates import Estimates

TIME_LIMIT_SECONDS = 5.0
"""Time limit of a decision. If a decision takes longer, the current plans are kept."""


@dataclass(frozen=True)
class Question:
    """The input of a strategy: the round to decide, and settings of the job file.

    Only the strategy `manual` uses `segments`, and only `dssra` uses `hysteresis`.
    """

    strategy: str
    segments: Sequence[Sequence[int]]
    hysteresis: float
    problem: RoundProblem


@dataclass(frozen=True)
class RoundDecision:
    """The plans of a round, and everything that they rest on.

    Args:
        estimates: The newest telemetry that went into the problem; `None` if there was none.
        kept_because: Why the current plans were kept; empty if they were not kept.
        notes: Remarks of the strategy, for the explanation.
        solve_seconds: Time that the strategy took.
        guessed: Ids of the hosts with blocks whose speed nobody had measured. The predicted seconds mean nothing with them.
    """

    __pydantic_config__ = ConfigDict(extra="forbid")

    question: Question
    estimates: Estimates | None
    plans: RoundPlan
    prediction: RoundPrediction
    kept_because: str = ""
    notes: tuple[str, ...] = ()
    solve_seconds: float = 0.0
    guessed: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Returns a JSON document that `from_json` reads."""
        document = dataclasses.asdict(self)
        for cluster in document["question"]["problem"]["clusters"]:
            # The keys of a JSON object are strings, so a pair of hosts becomes "sender>receiver".
            cluster["links"] = {">".join(pair): link for pair, link in cluster["links"].items()}
        return document

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> "RoundDecision":
        """Reads a document of `to_json`; raises `InvalidInputError` if it is damaged."""
        try:
            content = copy.deepcopy(document)
            for cluster in content["question"]["problem"]["clusters"]:
                links = cluster["links"]
                cluster["links"] = {tuple(key.split(">")): links[key] for key in links}
            return _ADAPTER.validate_python(content)
        except (ValidationError, TypeError, KeyError, AttributeError) as error:
            raise InvalidInputError(
                f"the stored decision cannot be used: {error}; run the job again to record a new one"
            ) from None


_ADAPTER = TypeAdapter(RoundDecision)


def decide(
    question: Question,
    estimates: Estimates | None = None,
    time_limit_seconds: float | None = TIME_LIMIT_SECONDS,
) -> RoundDecision:
    """Lets the strategy decide. The estimates are only stored with the decision.

    Args:
        time_limit_seconds: Limit for the strategy `dssra`; `None` is no limit.

    Raises:
        InfeasibleError: No plan satisfies the limits; the message names the limit and what would be needed.
    """
    started = time.perf_counter()
    decision = decide_round(
        question.problem,
        question.strategy,
        segments=question.segments,
        hysteresis=question.hysteresis,
        time_limit_seconds=time_limit_seconds,
    )
    return RoundDecision(
        question,
        estimates,
        decision.plans,
        decision.prediction,
        decision.kept,
        decision.notes,
        solve_seconds=time.perf_counter() - started,
    )


def keep_current(
    question: Question, reason: str, estimates: Estimates | None
) -> RoundDecision | None:
    """Keeps the current plans without asking the strategy; returns `None` if there are none."""
    plans = question.problem.previous
    if plans is None:
        return None
    return RoundDecision(question, estimates, plans, predict(question.problem, plans), reason)


def decide_again(decision: RoundDecision) -> RoundDecision:
    """Repeats a decision from its input.

    If the strategy was not asked, or failed, then the decision is returned unchanged.
    """
    if decision.kept_because in ("telemetry_missing", "evaluation", "solver_failed", "solver_slow"):
        return decision
    return decide(decision.question, decision.estimates, time_limit_seconds=None)


def hosts_of(plans: RoundPlan) -> set[str]:
    """Returns the ids of the hosts that run stages."""
    return {stage.host_id for plan in plans for stage in plan.stages}


def link_shares(plans: RoundPlan) -> dict[str, float]:
    """Returns the share of each link in the plans, by "sender>receiver", in both directions."""
    return {
        link: link_plan.share
        for plan in plans
        for (before, after), link_plan in zip(
            itertools.pairwise(plan.stages), plan.links, strict=True
        )
        for link in (f"{before.host_id}>{after.host_id}", f"{after.host_id}>{before.host_id}")
    }


def num_moved_blocks(before: ClusterPlan | None, after: ClusterPlan) -> int:
    """Returns how many blocks run on another host than before."""
    if before is None:
        return 0
    host_before, host_after = host_by_block(before), host_by_block(after)
    return sum(host_before.get(block) != host for block, host in host_after.items())


def host_by_block(plan: ClusterPlan) -> dict[int, str]:
    """Returns the host of each block."""
    return {
        block: host
        for host, segment in plan.segments.items()
        for block in range(segment.start_block, segment.stop_block)
    }
