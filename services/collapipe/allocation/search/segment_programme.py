"""One segment programme: one cluster, one order of devices, one M, one price for time and energy.

Without windows the optimum is the least, over bottlenecks beta, of `stall_price` beta + S(beta), where S(beta) is the cheapest pipeline
within beta: a dynamic programme, and never larger for a larger beta. So intervals of beta are halved only where
their lower bound, the least stall at the one end and the cheapest pipeline at the other, beats what is known.
"""

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from collapipe.allocation.search.link_tables import Floats
from collapipe.allocation.search.pareto_front import Front, front
from collapipe.allocation.search.segment_bounds import (
    Steps,
    bottlenecks,
    cheapest_fronts,
    cluster_bounds,
    grid_of,
    priced_steps,
)
from collapipe.allocation.search.segment_costs import ClusterCosts
from collapipe.allocation.search.segment_windows import blocked_segments, feasible_plans

_BATCH = 12
"""Bottlenecks tried at once."""

_ROUNDING = 1e-11
_REFINEMENTS = 3
_WIDTH = 300
"""Labels a layer: more than the optimum needs, except for dozens of devices with windows that starve."""


def best_segments(costs: ClusterCosts, floor: float) -> Front | None:
    """Finds the best segments, device subset and codecs for one order of devices and one M.

    Args:
        costs: Of one cluster, with one row, its devices in the order of the pipeline, time and energy in one price.
        floor: Least bottleneck: the load of the edge server.

    Returns:
        A front whose best plan is optimal if it is complete; `None` where nothing fits. It is complete but for dozens of devices
        with windows that starve.
    """
    least = max(floor, float(costs.entry_seconds[0]), float(costs.head_seconds[0]))
    steps = priced_steps(costs, 1.0)
    known: ClusterCosts | None = None
    if costs.starves[0]:
        best, points, known = _plans_with_windows(costs, steps, least)
    else:
        best, points = cheapest_within(steps, float(costs.stall_price[0]), least)
    if math.isinf(best):
        return None
    best += float(costs.end_price[0] + costs.end_cost[0])
    found = _front_within(costs, least, points, best + _ROUNDING * abs(best))
    if known is None or len(found.plans):
        return found
    # What is known to exist was lost among too many that looked better.
    return replace(_front_within(known, least, points[:1], math.inf), complete=False)


def _front_within(costs: ClusterCosts, least: float, points: Floats, limit: float) -> Front:
    bounds = cluster_bounds(costs, grid_of(costs, least, points), (1.0,), in_order=True)
    limited = replace(bounds, weighed=(replace(bounds.weighed[0], limit=limit),))
    return front(costs, np.array([least]), limited, np.array([math.inf]), width=_WIDTH)


def _plans_with_windows(
    costs: ClusterCosts, steps: Steps, least: float
) -> tuple[float, Floats, ClusterCosts | None]:
    """What a good plan is worth at most, bottlenecks that are near each other where better ones may be, and that plan.

    Windows make any number a bottleneck, so that intervals are halved where their bound allows a better plan.

    Args:
        costs: Of one row, in order.
        steps: Of the same.
        least: Floor of the bottleneck.
    """
    stall_price, loop_price = float(costs.stall_price[0]), float(costs.loop_price[0])
    best, known = math.inf, None

    def evaluate(ends: Floats) -> Floats:
        """Least price within each; keeps the best plan that is met."""
        nonlocal best, known
        for weight in (0.0, 100 * loop_price):
            plans = feasible_plans(costs, steps.device[0], ends, weight)
            totals = stall_price * ends + plans.prices
            cell = int(np.argmin(totals))
            if totals[cell] < best:
                best, known = float(totals[cell]), _only(costs, plans.segments(cell))
        blocked = blocked_segments(costs, ends[None, :], in_order=True)
        into = cheapest_fronts(steps, ends[None, :], in_order=True, blocked=blocked)
        return np.asarray(into[0, :, -1, -1])

    longest = _longest_loop(costs)
    ends = np.geomspace(max(least, 1e-4 * longest, 1e-300), max(longest, least, 1e-300), _BATCH)
    ends = np.append(least, ends[ends > least])
    prices = evaluate(ends)
    for _ in range(_REFINEMENTS):
        bounds = stall_price * ends[:-1] + prices[1:]
        open_ones = np.flatnonzero(bounds < best)
        middles = np.sqrt(np.maximum(ends[open_ones], 1e-6 * longest) * ends[open_ones + 1])
        if not len(middles):
            break
        ends, prices = np.append(ends, middles), np.append(prices, evaluate(middles))
        order = np.argsort(ends)
        ends, prices = ends[order], prices[order]
    return best, ends, known


def _longest_loop(costs: ClusterCosts) -> float:
    """No less than the loop of any pipeline: within such a bottleneck no window starves."""
    compute = np.max(costs.compute[0], axis=1, initial=0.0, where=np.isfinite(costs.compute[0]))
    usable = np.isfinite(costs.link_load[0])
    links = np.max(costs.link_loop[0], axis=(1, 2), initial=0.0, where=usable)
    loads = np.max(costs.link_load[0], initial=0.0, where=usable)
    ends = costs.entry_seconds[0] + costs.head_seconds[0]
    return float(np.sum(compute) + np.sum(links) + loads + ends)


def _only(costs: ClusterCosts, segments: Sequence[tuple[int, int, int]]) -> ClusterCosts:
    """Tables in which nothing fits but these segments' devices with as many blocks."""
    window = np.zeros_like(costs.window)
    for device, start, stop in segments:
        window[0, device, stop - start] = costs.window[0, device, stop - start]
    return replace(costs, window=window)


def cheapest_within(steps: Steps, stall_price: float, least: float) -> tuple[float, Floats]:
    """The optimum without windows, and bottlenecks that together prove it.

    Args:
        steps: Of one row, in order.
        stall_price: Of a second of the bottleneck.
        least: Floor of the bottleneck.

    Returns:
        The least total, infinite if nothing fits, and bottlenecks, ascending: from one to the next, with the stall of the first possible
        one after it and the cheapest pipeline within the next, nothing is better.
    """
    times = bottlenecks(steps.compute, steps.load, least)
    known: dict[int, float] = {}
    asked = sorted({*_spread(-1, len(times) - 1, _BATCH), len(times) - 1})
    best = math.inf
    while asked:
        into = cheapest_fronts(steps, times[asked][None, :], in_order=True)
        known.update(zip(asked, into[0, :, -1, -1].tolist(), strict=True))
        best = min(best, *(stall_price * times[i] + known[i] for i in asked))
        asked = _open(times, known, stall_price, best)
    return best, times[sorted(known)]


def _open(times: Floats, known: dict[int, float], stall_price: float, best: float) -> list[int]:
    """Bottlenecks to try next, in the intervals that may hold something better."""
    ends = sorted(known)
    intervals = []
    for low, high in zip([-1, *ends], ends, strict=False):
        bound = stall_price * times[low + 1] + known[high]
        if high - low > 1 and bound < best - _ROUNDING * abs(best):
            intervals.append((low, high))
    each = max(1, _BATCH // max(1, len(intervals)))
    return sorted({i for low, high in intervals for i in _spread(low, high - 1, each)})


def _spread(low: int, high: int, count: int) -> list[int]:
    """At most so many numbers above `low` up to `high`, evenly spread, `high` not necessarily among them."""
    room = high - low
    count = min(count, room)
    return sorted({low + round((i + 1) * room / (count + (count < room))) for i in range(count)})
