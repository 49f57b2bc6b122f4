"""Chooses one plan for each cluster, from candidates: docs/scheduling.md (13).

The objective takes the largest delay cost of all clusters and adds their summed costs. Clusters also share
the edge server: its processor, whose load depends on the number of micro-batches of every cluster, and its
memory. If the problem limits the convergence term, they share that limit as well.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Literal

import numpy as np

from collapipe.allocation.search.arrays import Floats, Ints

_ROUNDING = 1 + 1e-12
_MOST_LOADS = 100
"""If there are more possible loads of the edge server, `choose` does not try them all."""
_NUM_LOADS = 25
"""Number of loads that it tries then, in each of the refinements."""
_REFINEMENTS = 3
_MOST_COMBINED = 4
"""With more clusters, no combination gives up summed cost for a smaller load of the edge server."""


@dataclass(frozen=True)
class Candidates:
    """Plans of one cluster, one in each position of the arrays. `segment_costs` explains costs and prices.

    Args:
        delay_cost: Without the cost of the bottleneck.
        bottleneck: In seconds, without the load of the edge server.
        load_price: Price of a second for which the edge server computes for other clusters.
        summed_cost: Energy and convergence.
        last_seconds: Seconds of the edge server's processor for a micro-batch.
        head_load: Seconds of the edge server's processor for a mini-batch.
        uses: How much a plan uses of each resource that all clusters share. (resource, plan)
    """

    delay_cost: Floats
    bottleneck_price: Floats
    bottleneck: Floats
    load_price: Floats
    last_seconds: Floats
    summed_cost: Floats
    head_load: Floats
    uses: Floats

    def take(self, plans: Ints) -> "Candidates":
        return Candidates(*(getattr(self, field.name)[..., plans] for field in fields(self)))

    def delay_costs(self, head_load: float) -> Floats:
        """Returns the delay cost of each plan if the edge server's load, by all clusters, is `head_load`."""
        return self.delay_cost + np.maximum(
            self.bottleneck_price * self.bottleneck,
            self.load_price * (head_load - self.last_seconds),
        )


@dataclass(frozen=True)
class Chosen:
    """The index of each cluster's plan among its candidates, and the objective of these plans together."""

    value: float
    plans: tuple[int, ...]


class _Joint:
    """The candidates of all clusters, one cluster after another. A choice is an array of their positions.

    Args:
        owner: The cluster of each candidate.
        first: Position of each cluster's first candidate.
        rank: Place of each candidate in its cluster by summed cost, and then by load. A later cluster has higher
            ranks.
    """

    def __init__(self, clusters: Sequence[Candidates], limits: Floats) -> None:
        self.plans = Candidates(
            *(
                np.concatenate([getattr(one, field.name) for one in clusters], axis=-1)
                for field in fields(Candidates)
            )
        )
        sizes = [len(one.summed_cost) for one in clusters]
        self.owner = np.repeat(np.arange(len(clusters)), sizes)
        self.first = np.cumsum([0, *sizes[:-1]])
        self.limits = limits
        self.rank = np.empty(len(self.owner), np.int64)
        order = np.lexsort((self.plans.head_load, self.plans.summed_cost, self.owner))
        self.rank[order] = np.arange(len(order))
        most = np.maximum.reduceat(self.plans.uses, self.first, axis=1)
        self.binding = np.sum(most, axis=1) > limits

    def head_load(self, choice: Ints) -> float:
        return float(np.sum(self.plans.head_load[choice]))

    def worth(self, choice: Ints) -> float:
        """Returns the objective of a choice at its true load."""
        chosen = self.plans.take(choice)
        slowest = np.max(chosen.delay_costs(self.head_load(choice)))
        return float(slowest + np.sum(chosen.summed_cost))

    def chosen(self, choice: Ints) -> Chosen:
        return Chosen(self.worth(choice), tuple((choice - self.first).tolist()))


def choose(clusters: Sequence[Candidates], limits: Floats, upper_bound: float) -> Chosen | None:
    """Chooses the best plan for each cluster.

    The load of the edge server depends on the choice, and the delay costs depend on the load. So the function
    tries every possible total load in ascending order. A choice that needs less than the assumed load only
    looks slower than it is, and its true load is tried as well. The search ends when the best choice for a
    load, without a limit on the load, does not exceed that load. No higher load can then give a better
    choice.

    The choice is exact if there are at most `_MOST_LOADS` possible loads, or if the load does not matter.
    Otherwise only some loads are tried, and then more near the best one.

    Args:
        clusters: Every cluster has at least one plan.
        limits: Limit of each shared resource.
        upper_bound: Only a choice with a smaller objective counts. `None` is returned if there is none.
    """
    joint, load = _Joint(clusters, limits), [one.head_load for one in clusters]
    least, most = (float(sum(f(one) for one in load)) for f in (np.min, np.max))
    free = _best_at_load(joint, least, upper_bound, bounded=False)
    if free is None:
        return None
    worth = joint.worth(free[1])
    if worth <= free[0] * _ROUNDING:
        return joint.chosen(free[1])
    loads = _total_loads(clusters)
    if loads is not None:
        best = _best_of_loads(joint, loads, upper_bound)
        return None if best is None else joint.chosen(best)
    best = None
    for _ in range(_REFINEMENTS):
        loads = np.linspace(least, most, _NUM_LOADS)
        found = _best_of_loads(joint, loads, upper_bound)
        best = best if found is None else found
        if best is None:
            return None
        upper_bound = joint.worth(best)
        at = int(np.searchsorted(loads, joint.head_load(best)))
        least, most = loads[max(at - 1, 0)], loads[min(at + 1, _NUM_LOADS - 1)]
    return None if best is None else joint.chosen(best)


def _best_of_loads(joint: _Joint, loads: Floats, upper_bound: float) -> Ints | None:
    """Returns the best choice with one of these loads, which are in ascending order."""
    best: Ints | None = None
    first, last = 0, len(loads) - 1
    while first <= last:  # Bisection finds some load that its best choice does not exceed.
        middle = (first + last) // 2
        free = _best_at_load(joint, float(loads[middle]), upper_bound, bounded=False)
        if free is None:
            last = middle - 1
            continue
        worth = joint.worth(free[1])
        if worth < upper_bound:
            best, upper_bound = free[1], worth
        if joint.head_load(free[1]) <= loads[middle] * _ROUNDING:
            last = middle - 1
        else:
            first = middle + 1
    for load in loads:
        free = _best_at_load(joint, float(load), upper_bound, bounded=False)
        if free is None:
            return best
        if joint.head_load(free[1]) <= load * _ROUNDING:
            return free[1]
        chosen = _best_at_load(joint, float(load), upper_bound, bounded=True)
        if chosen is not None:
            best, upper_bound = chosen[1], joint.worth(chosen[1])
    return best


def least_other_loads(clusters: Sequence[Floats]) -> Floats:
    """Returns for each cluster the least load of the edge server by all other clusters.

    `clusters` has the loads of each cluster with each number of micro-batches, and blocks on the edge server.
    """
    least = np.array([np.min(loads, initial=math.inf) for loads in clusters])
    return np.array([np.sum(np.delete(least, n)) for n in range(len(least))])


def fair_weights(fronts: Sequence[tuple[Floats, Floats]]) -> list[float]:
    """Returns the time weights for which bounds on single clusters give the tightest bound on all clusters.

    A weighted mean of the delay costs is never larger than their maximum. So for weights that sum to 1, the
    sum of the clusters' least weighted costs is a lower bound on the objective. The best weights follow from
    the best common delay cost T, for convex fronts: the weight of a cluster is the slope with which its
    summed cost falls as T grows.

    `fronts` has the delay costs and the summed costs of each cluster's plans.
    """
    hulls = [_hull(time, cost) for time, cost in fronts]
    for slowest in sorted({float(t) for time, _ in hulls for t in time}):
        if any(slowest < time[0] for time, _ in hulls):
            continue
        after = [_slope(time, cost, slowest, "right") for time, cost in hulls]
        if sum(after) > 1:
            continue
        before = [min(_slope(time, cost, slowest, "left"), 1.0) for time, cost in hulls]
        more = sum(before) - sum(after)
        part = (1 - sum(after)) / more if more > 0 else 0.0
        return [b + min(part, 1.0) * (a - b) for a, b in zip(before, after, strict=True)]
    return [1 / len(fronts)] * len(fronts)


def _hull(time: Floats, cost: Floats) -> tuple[Floats, Floats]:
    """Returns the corners of the lower convex hull at which the cost still falls with time."""
    corners: list[tuple[float, float]] = []
    for i in np.lexsort((cost, time)):
        t, c = float(time[i]), float(cost[i])
        if corners and c >= corners[-1][1]:
            continue
        while len(corners) > 1 and (corners[-1][1] - corners[-2][1]) * (t - corners[-2][0]) >= (
            c - corners[-2][1]
        ) * (corners[-1][0] - corners[-2][0]):
            corners.pop()
        corners.append((t, c))
    return np.array([t for t, _ in corners]), np.array([c for _, c in corners])


def _slope(time: Floats, cost: Floats, at: float, side: Literal["left", "right"]) -> float:
    """Returns how fast the cost falls just before or after a time; infinite if every plan takes longer."""
    i = int(np.searchsorted(time, at, side=side))
    if i == 0:
        return math.inf
    return float((cost[i - 1] - cost[i]) / (time[i] - time[i - 1])) if i < len(time) else 0.0


def _total_loads(clusters: Sequence[Candidates]) -> Floats | None:
    """Returns all possible total loads of the edge server, ascending; nearly equal ones are merged.

    Returns `None` if there are more than `_MOST_LOADS`.
    """
    sums = np.zeros(1)
    for cluster in clusters:
        sums = np.unique(sums[:, None] + np.unique(cluster.head_load))
        step = np.diff(sums, prepend=-math.inf)
        sums = sums[step > 1e-12 * np.abs(sums)]
        if len(sums) > _MOST_LOADS:
            return None
    return sums


def _best_at_load(
    joint: _Joint, load: float, upper_bound: float, *, bounded: bool
) -> tuple[float, Ints] | None:
    """Finds the best choice for the delay costs of an assumed load, and its objective.

    `bounded` also makes the load a limit.
    """
    plans, first = joint.plans, joint.first
    times = plans.delay_costs(load)
    few = len(first) <= _MOST_COMBINED and bool(np.any(plans.summed_cost))
    if not np.any(joint.binding) and not (bounded and few):
        return _by_deadline(joint, times, load if bounded else math.inf, upper_bound)
    uses, limits = plans.uses[joint.binding], joint.limits[joint.binding]
    if bounded:
        limits = np.append(limits, load * _ROUNDING)
        uses = np.vstack([uses, plans.head_load])
    times_of, costs_of, uses_of = (
        np.split(table, first[1:], axis=-1) for table in (times, plans.summed_cost, uses)
    )
    found = _best_combination(times_of, costs_of, uses_of, limits, upper_bound)
    return found and (found[0], found[1] + first)


def _by_deadline(
    joint: _Joint, times: Floats, most_load: float, upper_bound: float
) -> tuple[float, Ints] | None:
    """Minimises the largest time plus the sum of costs, with a limit on the sum of loads.

    For each deadline, each cluster takes its cheapest plan in time, and of equally cheap ones that with the least
    load. This is exact if the load has no limit, or if nothing has a cost. The time is linear in the clusters, up to
    a logarithm.
    """
    order = np.lexsort((joint.rank, times, -joint.owner))
    # A plan stays if it is cheaper than all faster ones. The last cluster comes first and has the highest ranks.
    least = np.minimum.accumulate(joint.rank[order])
    kept = order[np.diff(least, prepend=len(order)) < 0]
    fastest = np.diff(joint.owner[kept], prepend=-1) != 0
    allowed_from = np.max(times[kept[fastest]])
    by_time = np.argsort(times[kept], kind="stable")
    deadlines = times[kept[by_time]]
    whole = np.searchsorted(deadlines, deadlines, side="right") - 1
    totals = []
    for table in (joint.plans.summed_cost, joint.plans.head_load):
        changes = np.diff(table[kept], prepend=0.0)
        changes[fastest] = table[kept[fastest]]
        totals.append(np.cumsum(changes[by_time])[whole])
    # Differences of loads add up, so that their rounding errors are those of the largest loads.
    largest = np.maximum.reduceat(joint.plans.head_load, joint.first)
    rounding = (_ROUNDING - 1) * float(np.sum(largest))
    allowed = (deadlines >= allowed_from) & (totals[1] <= most_load + rounding)
    value = np.where(allowed, deadlines + totals[0], math.inf)
    best = int(np.argmin(value))
    if not value[best] < upper_bound:
        return None
    in_time = kept[times[kept] <= deadlines[best]]
    choice = np.empty(len(joint.first), np.int64)
    # The last plan in time of each cluster is its cheapest one.
    choice[joint.owner[in_time]] = in_time
    return float(value[best]), choice


def _best_combination(
    times: list[Floats],
    costs: list[Floats],
    uses: list[Floats],
    limits: Floats,
    upper_bound: float,
) -> tuple[float, Ints] | None:
    """Minimises the largest time plus the sum of costs within the limits.

    This is dynamic programming over the clusters. After each cluster it keeps the combinations that no other
    one dominates in largest time, summed cost and uses.
    """
    count = len(times)
    least_time = max(float(np.min(time)) for time in times)
    time, cost = np.full(1, least_time), np.zeros(1)
    used, picks = np.zeros((len(limits), 1)), np.zeros((0, 1), np.int64)
    for n in range(count):
        kept = _undominated(np.maximum(times[n], least_time), costs[n], uses[n], times[n])
        a, b = (grid.ravel() for grid in np.indices((len(time), len(kept))))
        b = kept[b]
        time_now = np.maximum(time[a], times[n][b])
        cost_now, used_now = cost[a] + costs[n][b], used[:, a] + uses[n][:, b]
        later = range(n + 1, count)
        least_use = sum((uses[i].min(axis=1) for i in later), np.zeros(len(limits)))
        least_cost = sum(float(costs[i].min()) for i in later)
        good = np.all(used_now + least_use[:, None] <= limits[:, None], axis=0)
        good &= time_now + cost_now + least_cost < upper_bound
        index = np.flatnonzero(good)
        if not len(index):
            return None
        time, cost, used = time_now[index], cost_now[index], used_now[:, index]
        picks = np.vstack([picks[:, a[index]], b[index]])
        kept = _undominated(time, cost, used, time)
        time, cost, used, picks = time[kept], cost[kept], used[:, kept], picks[:, kept]
    best = int(np.argmin(time + cost))
    return float(time[best] + cost[best]), picks[:, best]


def _undominated(time: Floats, cost: Floats, uses: Floats, tie_break: Floats) -> Ints:
    """Returns the indices that no other index dominates in time, cost and uses; of equal ones, the first."""
    order = np.lexsort((tie_break, cost, time))
    if not len(uses):
        ahead = np.minimum.accumulate(cost[order])
        return order[cost[order] < np.concatenate([[math.inf], ahead[:-1]])]
    dims = np.vstack([time, cost, uses])[:, order]
    leader = 0
    while leader < dims.shape[1]:
        dominated = np.all(dims[:, leader : leader + 1] <= dims, axis=0)
        dominated[: leader + 1] = False
        order, dims = order[~dominated], dims[:, ~dominated]
        leader += 1
    return order
