"""One plan for each cluster, chosen together: design (13) has a maximum over clusters of the time, and a sum of the rest.

What couples clusters besides is the edge server: its processor, whose load depends on every cluster's M, and its
memory; and the limit on the convergence term, where there is one.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from collapipe.allocation.search.link_tables import Floats
from collapipe.allocation.search.segment_costs import Ints

_ROUNDING = 1 + 1e-12


@dataclass(frozen=True)
class Candidates:
    """Plans of one cluster, as arrays.

    Args:
        price: Priced time without the bottleneck's.
        stall_price: Of a second of the bottleneck.
        stall: Bottleneck in seconds, without the load of the edge server.
        micro_batches: M.
        cost: Energy and convergence.
        head_load: Seconds of the edge server's processor a mini-batch.
        uses: Of what has a limit over all clusters, by (resource, plan).
    """

    price: Floats
    stall_price: Floats
    stall: Floats
    micro_batches: Ints
    cost: Floats
    head_load: Floats
    uses: Floats

    def priced_time(self, head_load: float) -> Floats:
        """With so much work at the edge server in all."""
        return self.price + self.stall_price * np.maximum(
            self.stall, head_load / self.micro_batches
        )


@dataclass(frozen=True)
class Chosen:
    """What each cluster does, by index of its candidates, and what all are worth together."""

    value: float
    plans: tuple[int, ...]


def choose(clusters: Sequence[Candidates], limits: Floats, upper: float) -> Chosen | None:
    """Chooses one plan a cluster; exact.

    The edge server's load is not known before it is chosen, so loads are assumed in ascending order: whoever asks for
    less than assumed is only made to look slower, and the true load has its turn. A load within which the best choice
    stays of its own accord ends the search, for a higher load makes nothing faster.

    Args:
        clusters: None without plans.
        limits: Of the resources.
        upper: Only what is worth less is of interest.

    Returns:
        The best choice, `None` if none within the limits is better than `upper`.
    """
    loads = _loads(clusters)
    first, last = 0, len(loads) - 1
    best: Chosen | None = None
    while first <= last:  # some load that is not exceeded: a choice to begin with
        middle = (first + last) // 2
        free = _with_load(clusters, limits, float(loads[middle]), upper, bounded=False)
        if free is None:
            last = middle - 1
        elif _asked(clusters, free) <= loads[middle] * _ROUNDING:
            best, upper, last = free, free.value, middle - 1
        else:
            first = middle + 1
    for load in loads:
        free = _with_load(clusters, limits, float(load), upper, bounded=False)
        if free is None:
            return best
        if _asked(clusters, free) <= load * _ROUNDING:
            return free
        chosen = _with_load(clusters, limits, float(load), upper, bounded=True)
        if chosen is not None:
            best, upper = chosen, chosen.value
    return best


def _asked(clusters: Sequence[Candidates], chosen: Chosen) -> float:
    return sum(
        float(cluster.head_load[plan]) for cluster, plan in zip(clusters, chosen.plans, strict=True)
    )


def _with_load(
    clusters: Sequence[Candidates], limits: Floats, load: float, upper: float, *, bounded: bool
) -> Chosen | None:
    """The best choice when the edge server is asked for so much, and maybe for no more."""
    times = [cluster.priced_time(load) for cluster in clusters]
    costs = [cluster.cost for cluster in clusters]
    uses = [cluster.uses for cluster in clusters]
    if bounded:
        limits = np.append(limits, load * _ROUNDING)
        uses = [np.vstack([cluster.uses, cluster.head_load]) for cluster in clusters]
    return _merged(times, costs, uses, limits, upper)


def least_loads(clusters: Sequence[Floats]) -> Floats:
    """Least load of the edge server by all other clusters, for each cluster; `clusters` are loads of each M."""
    least = np.array([np.min(loads, initial=math.inf) for loads in clusters])
    return np.array([np.sum(np.delete(least, n)) for n in range(len(least))])


def fair_weights(fronts: Sequence[tuple[Floats, Floats]]) -> list[float]:
    """Weights of each cluster's time that sum to 1 and make the sum of their least weighed totals largest.

    The maximum of times is at least any mean of them, so each cluster alone, with its weight, gives a bound for all
    together. At the best time T the weights are how much each cluster's cost falls with T.

    Args:
        fronts: Priced times and costs of each cluster's plans.
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
        share = (1 - sum(after)) / more if more > 0 else 0.0
        return [b + min(share, 1.0) * (a - b) for a, b in zip(before, after, strict=True)]
    return [1 / len(fronts)] * len(fronts)


def _hull(time: Floats, cost: Floats) -> tuple[Floats, Floats]:
    """Corners of the lower convex hull that fall with time."""
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
    """How fast the cost falls just before or after a time; infinite where no plan is as fast."""
    i = int(np.searchsorted(time, at, side=side))
    if i == 0:
        return math.inf
    return float((cost[i - 1] - cost[i]) / (time[i] - time[i - 1])) if i < len(time) else 0.0


def _loads(clusters: Sequence[Candidates]) -> Floats:
    """What the edge server may be asked for in all, ascending; nearly equal ones once."""
    sums = np.zeros(1)
    for cluster in clusters:
        sums = np.unique(sums[:, None] + np.unique(cluster.head_load))
        step = np.diff(sums, prepend=-math.inf)
        sums = sums[step > 1e-12 * np.abs(sums)]
    return sums


def _merged(
    times: list[Floats], costs: list[Floats], uses: list[Floats], limits: Floats, upper: float
) -> Chosen | None:
    """Cluster by cluster: what is not beaten in slowest time, summed cost and uses goes on."""
    most = [use.max(axis=1) for use in uses]
    binding = np.sum(most, axis=0) > limits
    uses, limits = [use[binding] for use in uses], limits[binding]
    count = len(times)
    floor = max(float(np.min(time)) for time in times)  # no decision is faster than that
    time, cost = np.full(1, floor), np.zeros(1)
    used, picks = np.zeros((len(limits), 1)), np.zeros((0, 1), np.int64)
    for n in range(count):
        kept = _unbeaten(np.maximum(times[n], floor), costs[n], uses[n], times[n])
        a, b = (grid.ravel() for grid in np.indices((len(time), len(kept))))
        b = kept[b]
        time_now = np.maximum(time[a], times[n][b])
        cost_now, used_now = cost[a] + costs[n][b], used[:, a] + uses[n][:, b]
        later = range(n + 1, count)
        least_use = sum((uses[i].min(axis=1) for i in later), np.zeros(len(limits)))
        least_cost = sum(float(costs[i].min()) for i in later)
        good = np.all(used_now + least_use[:, None] <= limits[:, None], axis=0)
        good &= time_now + cost_now + least_cost < upper
        index = np.flatnonzero(good)
        if not len(index):
            return None
        time, cost, used = time_now[index], cost_now[index], used_now[:, index]
        picks = np.vstack([picks[:, a[index]], b[index]])
        kept = _unbeaten(time, cost, used, time)
        time, cost, used, picks = time[kept], cost[kept], used[:, kept], picks[:, kept]
    best = int(np.argmin(time + cost))
    return Chosen(float(time[best] + cost[best]), tuple(int(pick) for pick in picks[:, best]))


def _unbeaten(time: Floats, cost: Floats, uses: Floats, tie: Floats) -> Ints:
    """Indices of what nothing else beats in time, cost and uses; of equals the first by `tie`."""
    order = np.lexsort((tie, cost, time))
    if not len(uses):
        ahead = np.minimum.accumulate(cost[order])
        return order[cost[order] < np.concatenate([[math.inf], ahead[:-1]])]
    dims = np.vstack([time, cost, uses])[:, order]
    leader = 0
    while leader < dims.shape[1]:
        beaten = np.all(dims[:, leader : leader + 1] <= dims, axis=0)
        beaten[: leader + 1] = False
        order, dims = order[~beaten], dims[:, ~beaten]
        leader += 1
    return order
