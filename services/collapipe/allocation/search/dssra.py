"""DSSRA decides a round: segments, order, micro-batches, windows, codecs, shares and powers of all clusters.

It minimises docs/scheduling.md (13). Two solvers take turns. `place_segments` finds the best segments for
given shares and powers, and `allocate` finds the best shares and powers for given segments. `place_segments`
also needs the shares and powers of links that the plan does not use yet. They follow from the dual prices of
the last allocation.
"""

import math
import time
from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from itertools import pairwise

from collapipe.allocation.round_model.decision import Decision
from collapipe.allocation.round_model.limits import violations
from collapipe.allocation.round_model.prediction import predict
from collapipe.allocation.round_model.problem import RoundPlan, RoundProblem
from collapipe.allocation.search.assumed_links import (
    links_at_equal_shares,
    links_at_prices,
    with_assumed_links,
    with_assumed_uploads,
    with_bandwidth_charged,
)
from collapipe.allocation.search.bandwidth import Allocation, SolverFailedError
from collapipe.allocation.search.joint_search import EXACT_CLUSTERS
from collapipe.allocation.search.labels import compile_search
from collapipe.allocation.search.link_tables import AssumedLinks
from collapipe.allocation.search.local_changes import local_changes, with_largest_windows
from collapipe.allocation.search.power import allocate, with_rough_shares
from collapipe.allocation.search.segments import place_segments, with_least_windows

_MAX_TURNS = 4
_MAX_LOCAL_CHANGES = 3
"""In each turn, shares and powers are solved for this number of the most promising local changes."""
_PROMISING = 1.3
"""A local change is ignored if its objective with assumed links is larger than the best by this factor."""
_HYSTERESIS_WEIGHT = 100.0
"""The largest V with which the hysteresis grows: docs/scheduling.md, "How a round is solved", 4."""
_ALLOCATION_HYSTERESIS = 0.2
"""New shares and powers must gain this part of the hysteresis. They move no blocks, but reconfigure links."""


class _TimeIsUpError(Exception):
    pass


def decide(
    problem: RoundProblem,
    current: RoundPlan | None,
    *,
    hysteresis: float = 0.05,
    time_limit_seconds: float | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> Decision:
    """Decides a round.

    First the current plans get the best shares and powers for their placement. A plan with another placement,
    order or number of micro-batches replaces them only if it saves more than `hysteresis` of the penalty.
    Otherwise the placement stays. Then the new shares and powers replace the current ones only if they save
    more than a fifth of that amount.

    Args:
        current: The plans of the previous round. Moves of blocks are counted from them.
        hysteresis: Part of the penalty V (tau / tau_ref + lambda Phi) of the current plans, with V at most
            `_HYSTERESIS_WEIGHT`.
        time_limit_seconds: Checked between the steps of the search. The convex solver gets the rest of it. The
            time in which the search is compiled does not count; `compile_search` does so before.

    Raises:
        InfeasibleError: No plan keeps the limits.
    """
    compile_search()
    if current is not None and not _is_known(problem, current):
        current = None
    if current is not None:
        problem = replace(
            problem,
            clusters=tuple(
                replace(cluster, previous=plan)
                for cluster, plan in zip(problem.clusters, current, strict=True)
            ),
        )
    search = _Search(_with_idle_energy_as_time(problem), time_limit_seconds, clock)
    reallocated: Allocation | None = None
    try:
        if current is not None:
            reallocated = search.consider(current)
        search.start()
        search.improve(thorough=reallocated is None)
    except (SolverFailedError, _TimeIsUpError) as error:
        return _without_solver(problem, search, current, error)
    best = search.best
    assert best is not None  # Otherwise `place_segments` has raised an InfeasibleError.
    if reallocated is None:
        return _decision(problem, with_least_windows(problem, best.plans), "", search.effort)
    assert current is not None
    usable = not violations(problem, current)
    now = predict(problem, current) if usable else reallocated.prediction
    margin = hysteresis * now.penalty * min(1.0, _HYSTERESIS_WEIGHT / problem.penalty_weight)
    gain = reallocated.prediction.objective - best.prediction.objective
    if gain > margin:
        return _decision(problem, with_least_windows(problem, best.plans), "", search.effort)
    # What the objective pays for a second: docs/scheduling.md (13).
    second = problem.reference_seconds / problem.penalty_weight
    reason = (
        f"another placement is better by what {gain * second:.3g} s of a round are worth, but has to be by "
        f"{margin * second:.3g} s (schedule.hysteresis)"
        if gain > 0
        else "no better placement was found"
    )
    saved = now.objective - reallocated.prediction.objective
    if not usable or saved > _ALLOCATION_HYSTERESIS * margin:
        plans = with_least_windows(problem, reallocated.plans)
        return _decision(problem, plans, "", search.effort, reason)
    kept = "hysteresis" if best.prediction.objective < now.objective else ""
    return _decision(problem, current, kept, search.effort, reason)


class _Search:
    """The placements that one decision has considered, and the best of them."""

    def __init__(
        self, problem: RoundProblem, time_limit_seconds: float | None, clock: Callable[[], float]
    ) -> None:
        self.problem = problem
        self.best: Allocation | None = None
        self.placed: RoundPlan | None = None  # before shares and powers are allocated
        self._clock = clock
        self._limit = time_limit_seconds
        self._end = math.inf if time_limit_seconds is None else clock() + time_limit_seconds
        self._seen: set[Hashable] = set()

    @property
    def effort(self) -> str:
        return f"shares and powers were solved for {len(self._seen)} placements"

    @property
    def time_is_up(self) -> bool:
        return self._clock() >= self._end

    def consider(self, plans: RoundPlan) -> Allocation | None:
        """Allocates shares and powers to a placement, and keeps it if it is the best so far.

        Returns `None` if the placement was considered before or is not feasible.
        """
        placement = tuple(
            (
                (plan.num_micro_batches, plan.num_slices),
                tuple(replace(stage, in_flight=0) for stage in plan.stages),
                tuple(link.codec for link in plan.links),
                plan.upload_codec,
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
        """Considers the best placement for equal shares."""
        self._place(self.problem, links_at_equal_shares(self.problem))

    def improve(self, *, thorough: bool) -> None:
        """Takes turns between placement and allocation until the best plan stays the same, or time is up after a turn.

        If `thorough`, segments are also placed without a charge for bandwidth.
        """
        for _ in range(_MAX_TURNS):
            best = self.best
            assert best is not None
            if best.prices is None:
                return  # No channel is shared, so `start` has assumed the true rate of every link.
            assumed_links = links_at_prices(self.problem, best)
            assumed = with_assumed_uploads(self.problem, best)
            self._place(with_bandwidth_charged(assumed, assumed_links, best), assumed_links)
            if thorough and not self.time_is_up:
                self._place(assumed, assumed_links)
            self._try_local_changes(assumed, best, assumed_links)
            if self.best is best or self.time_is_up:
                return

    def _place(self, problem: RoundProblem, assumed_links: Sequence[AssumedLinks]) -> None:
        self._seconds_left()
        known = [] if self.best is None else [self.best.plans]
        self.placed = place_segments(
            problem, assumed_links, starts=known, is_late=lambda: self.time_is_up
        )
        self.consider(self.placed)

    def _try_local_changes(
        self, problem: RoundProblem, best: Allocation, assumed_links: Sequence[AssumedLinks]
    ) -> None:
        """Considers the local changes with the lowest objective, as predicted with rough shares, while there is time."""
        promising: list[tuple[float, int, RoundPlan]] = []
        for changed in local_changes(problem, best.plans, _worth_changing(problem, best)):
            if self.time_is_up:
                return
            plans = with_assumed_links(
                problem, assumed_links, with_largest_windows(problem, changed)
            )
            if not violations(problem, plans):
                plans = with_rough_shares(problem, plans)
                promising.append((predict(problem, plans).objective, len(promising), plans))
        for objective, _, plans in sorted(promising)[:_MAX_LOCAL_CHANGES]:
            if objective < _PROMISING * best.prediction.objective and not self.time_is_up:
                self.consider(plans)

    def _seconds_left(self) -> float | None:
        """Returns the rest of the time limit; raises `_TimeIsUpError` if there is none."""
        if self._limit is None:
            return None
        left = self._end - self._clock()
        if left <= 0:
            raise _TimeIsUpError(f"the solver took more than its {self._limit:g} s")
        return left


def _worth_changing(problem: RoundProblem, best: Allocation) -> list[int]:
    """Returns the clusters whose changes can improve the decision.

    If only delays count, and many clusters share no channel, that is the slowest one.
    """
    seconds = [cluster.round_seconds for cluster in best.prediction.clusters]
    channels = [cluster.channel for cluster in problem.clusters if cluster.channel is not None]
    costs = problem.convergence.weight or any(host.joule_weight for host in problem.hosts.values())
    few, shared = len(seconds) <= EXACT_CLUSTERS, len(set(channels)) < len(channels)
    if few or shared or costs or problem.blocks_on_edge_server:
        return list(range(len(seconds)))
    return [seconds.index(max(seconds))]


def _with_idle_energy_as_time(problem: RoundProblem) -> RoundProblem:
    """Returns the problem with the same objective and no idle power: docs/scheduling.md (13).

    Idle energy grows with the time of the round, so it changes the price of a second only.
    """
    if not problem.idle_price:
        return problem
    second_price = problem.penalty_weight / problem.reference_seconds + problem.idle_price
    clusters = tuple(
        replace(
            cluster,
            control_unit=replace(cluster.control_unit, idle_watts=0.0),
            devices=tuple(replace(device, idle_watts=0.0) for device in cluster.devices),
            edge_server=replace(cluster.edge_server, idle_watts=0.0),
        )
        for cluster in problem.clusters
    )
    reference_seconds = problem.penalty_weight / second_price
    return replace(problem, clusters=clusters, reference_seconds=reference_seconds)


def _without_solver(
    problem: RoundProblem,
    search: _Search,
    current: RoundPlan | None,
    error: SolverFailedError | _TimeIsUpError,
) -> Decision:
    """Returns the current plans if they are still feasible, else the best plans so far, else equal shares."""
    slow = isinstance(error, _TimeIsUpError) or search.time_is_up
    kept = "solver_slow" if slow else "solver_failed"
    if current is not None and not violations(problem, current):
        return _decision(problem, current, kept, str(error))
    if search.best is not None:
        plans = search.best.plans
    else:
        assumed_links = links_at_equal_shares(problem)
        placed = search.placed
        if placed is None:
            placed = place_segments(problem, assumed_links, is_late=lambda: True)
        plans = with_assumed_links(problem, assumed_links, placed)
    return _decision(problem, with_least_windows(problem, plans), kept, str(error))


def _decision(problem: RoundProblem, plans: RoundPlan, kept: str, *notes: str) -> Decision:
    return Decision(plans, predict(problem, plans), kept, notes)


def _is_known(problem: RoundProblem, plans: RoundPlan) -> bool:
    """Returns whether every host and every link of the plans still exists."""
    if len(plans) != len(problem.clusters):
        return False
    for cluster, plan in zip(problem.clusters, plans, strict=True):
        names = [stage.host_id for stage in plan.stages]
        if not cluster.hosts.keys() >= set(names) or any(
            pair not in cluster.links or pair[::-1] not in cluster.links for pair in pairwise(names)
        ):
            return False
    return True
