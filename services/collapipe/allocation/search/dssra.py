"""DSSRA: decides segments, order, micro-batches, windows, codecs, shares and powers of a round together: design (13).

Segments for given shares and powers (`place_segments`) and shares and powers for given segments (`allocate`) are each
solved to the optimum. They take turns: what links that do not exist yet would be given follows from prices.
"""

import math
import time
from collections.abc import Callable, Hashable
from dataclasses import dataclass, replace
from itertools import pairwise

from collapipe.allocation.round_model.prediction import RoundPrediction, predict, violations
from collapipe.allocation.round_model.problem import RoundPlan, RoundProblem
from collapipe.allocation.search.assumed_links import (
    LinkOffers,
    equal_offers,
    offered,
    priced_offers,
    with_bandwidth_charged,
)
from collapipe.allocation.search.bandwidth import Allocation, SolverFailedError
from collapipe.allocation.search.local_changes import neighbours, with_largest_windows
from collapipe.allocation.search.power import allocate
from collapipe.allocation.search.segments import place_segments, with_least_windows

_MAX_TURNS = 4
_MAX_NEIGHBOURS = 3
"""Of the most promising ones a turn solves so many."""
_NO_PROMISE = 1.3
"""A neighbour worth this much more before its shares are solved for is not looked at."""
_SHARES_HYSTERESIS = 0.2
"""Part of the hysteresis that new shares and powers have to gain: they cost no migration, but reconfigure links."""


@dataclass(frozen=True)
class Decision:
    """What is decided, and why.

    Args:
        plans: The decision.
        prediction: What it leads to.
        kept: Why the plan in force, or what was found so far, is decided for: "hysteresis", "solver_failed",
            "solver_slow"; empty for the best one.
        notes: What else to log, in words.
    """

    plans: RoundPlan
    prediction: RoundPrediction
    kept: str
    notes: tuple[str, ...]


class _SlowError(Exception):
    """Time is up."""


def decide(
    problem: RoundProblem,
    in_force: RoundPlan | None,
    *,
    hysteresis: float = 0.05,
    time_limit_seconds: float | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> Decision:
    """Decides a round.

    Another placement, order or number of micro-batches replaces the plan in force only if it saves more than
    `hysteresis` of the penalty, against the plan in force with the best shares and powers for it. Those replace the old
    ones if they save a fifth of that.

    Args:
        problem: The round.
        in_force: The plan that runs; moves are counted from it.
        hysteresis: Part of the penalty V (tau / tau_ref + lambda Phi) of the plan in force.
        time_limit_seconds: Looked at between two steps, and given to the convex solver.
        clock: Seconds.

    Raises:
        InfeasibleError: No plan keeps within the limits.
    """
    if in_force is not None and not _is_known(problem, in_force):
        in_force = None
    if in_force is not None:
        problem = replace(
            problem,
            clusters=tuple(
                replace(cluster, previous=plan)
                for cluster, plan in zip(problem.clusters, in_force, strict=True)
            ),
        )
    search = _Search(problem, time_limit_seconds, clock)
    tuned: Allocation | None = None
    try:
        if in_force is not None:
            tuned = search.consider(in_force)
        search.start()
        search.improve(thoroughly=tuned is None)
    except (SolverFailedError, _SlowError) as error:
        return _without_solver(search, in_force, error)
    best = search.best
    assert best is not None  # place_segments finds a plan or says why there is none
    if tuned is None:
        return _decision(problem, with_least_windows(problem, best.plans), "", search.looked_at)
    assert in_force is not None
    usable = not violations(problem, in_force)
    now = predict(problem, in_force) if usable else tuned.prediction
    margin = hysteresis * now.penalty
    gain = tuned.prediction.objective - best.prediction.objective
    if gain > margin:
        return _decision(problem, with_least_windows(problem, best.plans), "", search.looked_at)
    held = (
        f"another placement would save {gain:g} of {now.penalty:g}, which is within the hysteresis of {hysteresis:g}"
        if gain > 0
        else "no better placement was found"
    )
    if not usable or now.objective - tuned.prediction.objective > _SHARES_HYSTERESIS * margin:
        plans = with_least_windows(problem, tuned.plans)
        return _decision(problem, plans, "", search.looked_at, held)
    kept = "hysteresis" if best.prediction.objective < now.objective else ""
    return _decision(problem, in_force, kept, search.looked_at, held)


class _Search:
    """What was looked at in one decision, and the best of it."""

    def __init__(
        self, problem: RoundProblem, time_limit_seconds: float | None, clock: Callable[[], float]
    ) -> None:
        self.problem = problem
        self.best: Allocation | None = None
        self._clock = clock
        self._limit = time_limit_seconds
        self._end = math.inf if time_limit_seconds is None else clock() + time_limit_seconds
        self._seen: set[Hashable] = set()

    @property
    def looked_at(self) -> str:
        """How much was done, in words."""
        return f"shares and powers were solved for {len(self._seen)} placements"

    def consider(self, plans: RoundPlan) -> Allocation | None:
        """Solves for shares and powers of a placement; `None` where it was seen before or is not feasible."""
        placement = tuple(
            (
                plan.num_micro_batches,
                tuple((stage.host_id, stage.start_unit, stage.stop_unit) for stage in plan.stages),
                tuple(link.codec for link in plan.links),
            )
            for plan in plans
        )
        if placement in self._seen:
            return None
        self._seen.add(placement)
        wide = with_largest_windows(self.problem, plans)
        found = allocate(self.problem, wide, time_limit_seconds=self._seconds_left())
        if violations(self.problem, found.plans):
            return None
        if self.best is None or found.prediction.objective < self.best.prediction.objective:
            self.best = found
        return found

    def start(self) -> None:
        """Looks at the placement for shares of a channel split equally among few links."""
        self._place(self.problem, equal_offers(self.problem, 1))

    def improve(self, *, thoroughly: bool) -> None:
        """Takes turns from the best until that stays the same."""
        for _ in range(_MAX_TURNS):
            best = self.best
            assert best is not None
            offers = priced_offers(self.problem, best)
            if (
                best.prices is None
            ):  # the offers are what every link gets, and the placement for them is the best
                self._place(self.problem, offers)
                return
            self._place(with_bandwidth_charged(self.problem, offers, best), offers)
            if thoroughly:
                self._place(self.problem, offers)
            self._look_around(best, offers)
            if self.best is best:
                return

    def _place(self, problem: RoundProblem, offers: LinkOffers) -> None:
        self._seconds_left()
        known = [] if self.best is None else [self.best.plans]
        self.consider(place_segments(problem, offers, starts=known))

    def _look_around(self, best: Allocation, offers: LinkOffers) -> None:
        """Looks at the neighbours that promise most with shares at the same prices."""
        self._seconds_left()
        promising: list[tuple[float, int, RoundPlan]] = []
        for other in neighbours(self.problem, best.plans):
            plans = offered(self.problem, offers, with_largest_windows(self.problem, other))
            if not violations(self.problem, plans):
                promising.append((predict(self.problem, plans).objective, len(promising), plans))
        for objective, _, plans in sorted(promising)[:_MAX_NEIGHBOURS]:
            if objective < _NO_PROMISE * best.prediction.objective:
                self.consider(plans)

    def _seconds_left(self) -> float | None:
        if self._limit is None:
            return None
        left = self._end - self._clock()
        if left <= 0:
            raise _SlowError(f"the solver took more than its {self._limit:g} s")
        return left

    @property
    def late(self) -> bool:
        """Whether time is up."""
        return self._clock() >= self._end


def _without_solver(
    search: _Search, in_force: RoundPlan | None, error: SolverFailedError | _SlowError
) -> Decision:
    """The plan in force where it still is feasible, else the best that was found, else an equal split."""
    kept = "solver_slow" if isinstance(error, _SlowError) or search.late else "solver_failed"
    problem = search.problem
    if in_force is not None and not violations(problem, in_force):
        return _decision(problem, in_force, kept, str(error))
    if search.best is not None:
        plans = search.best.plans
    else:
        offers = equal_offers(problem, 1)
        plans = offered(problem, offers, place_segments(problem, offers))
    return _decision(problem, with_least_windows(problem, plans), kept, str(error))


def _decision(problem: RoundProblem, plans: RoundPlan, kept: str, *notes: str) -> Decision:
    return Decision(plans, predict(problem, plans), kept, notes)


def _is_known(problem: RoundProblem, plans: RoundPlan) -> bool:
    """Whether every host and link of the plans is still there."""
    if len(plans) != len(problem.clusters):
        return False
    for cluster, plan in zip(problem.clusters, plans, strict=True):
        names = [stage.host_id for stage in plan.stages]
        if not cluster.hosts.keys() >= set(names) or any(
            pair not in cluster.links or pair[::-1] not in cluster.links for pair in pairwise(names)
        ):
            return False
    return True
