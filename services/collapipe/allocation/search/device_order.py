"""Orders of devices that are worth a full search, for clusters with too many devices to compare all orders.

The value of an order is the cost of the cheapest pipeline in this order, over all subsets of its devices.
This cost is the lower bound of `segment_bounds`, so it is exact except for windows. Local search then
improves the best order.
"""

import math
from collections.abc import Sequence

import numpy as np

from collapipe.allocation.search.arrays import Floats, Ints
from collapipe.allocation.search.segment_bounds import (
    cheapest_prefixes,
    possible_bottlenecks,
    weighted_steps,
)
from collapipe.allocation.search.segment_costs import ClusterCosts
from collapipe.allocation.search.segment_windows import blocked_segments

_NUM_CELLS = 8
"""Bottlenecks for which an order is evaluated; its value is the best of them."""
_NUM_ROWS = 12
"""Most rows for the full search; there are more if there are more numbers of micro-batches."""
_NUM_IMPROVED = 1
"""Orders that local search improves."""
_MOST_MOVES = 60
"""Local search stops listing moves when it has this number. It lists short moves first."""
_CHUNK = 3_000_000
"""Most numbers in one table of costs: this keeps the table in the cache of the processor, or close to it."""


def promising_rows(
    costs: ClusterCosts,
    least_bottleneck: Floats,
    time_weight: float,
    known: Sequence[tuple[int, ...]],
    *,
    improve: bool,
) -> tuple[ClusterCosts, Floats]:
    """Returns the best order for each M, and further good ones, as rows for a full search.

    The second result is the least bottleneck of each row.

    Args:
        costs: The tables of the cluster, with devices in the order of registration.
        least_bottleneck: In seconds. (m)
        time_weight: The value of an order is `time_weight` times the delay cost, plus the summed cost.
        known: Orders of the devices in known plans; devices that a plan does not use are missing.
        improve: Whether local search improves the best order.
    """
    num_rows = costs.num_rows
    starts = np.array(_starting_orders(costs, known), dtype=np.int64)
    times = [
        possible_bottlenecks(costs.compute[m], costs.link_load[m], float(least_bottleneck[m]))
        for m in range(num_rows)
    ]
    whole_range = np.stack([_spread(row, 0, len(row) - 1) for row in times])
    rows = np.repeat(np.arange(num_rows), len(starts))
    orders = np.tile(starts, (num_rows, 1))
    values, cells = _evaluate(costs, time_weight, rows, orders, whole_range[rows])
    best_orders = np.argsort(values, kind="stable")[: _NUM_IMPROVED if improve else 0]
    for best in best_orders[np.isfinite(values[best_orders])].tolist():
        row = int(rows[best])
        cell = cells[best]
        near = whole_range[row][[max(cell - 1, 0), min(cell + 1, _NUM_CELLS - 1)]]
        first, last = np.searchsorted(times[row], near).tolist()
        ends = _spread(times[row], first, last)
        order, value = _improved(costs, time_weight, row, orders[best], ends)
        new_orders = np.tile(order, (num_rows, 1))
        new_values, _ = _evaluate(costs, time_weight, np.arange(num_rows), new_orders, whole_range)
        new_values[row] = min(value, float(new_values[row]))
        rows, orders = np.append(rows, np.arange(num_rows)), np.vstack([orders, new_orders])
        values = np.append(values, new_values)
    kept = _best_of_each_row(rows, values)
    rows, orders = rows[kept], orders[kept]
    return costs.rows(rows).reordered(orders), least_bottleneck[rows]


def _improved(
    costs: ClusterCosts, time_weight: float, row: int, order: Ints, ends: Floats
) -> tuple[Ints, float]:
    """Moves one device at a time to the best place until no move helps; returns the order and its value."""
    value = math.inf
    candidates = order[None, :]
    for _ in range(2 * costs.num_devices):
        rows = np.full(len(candidates), row)
        within = np.tile(ends, (len(candidates), 1))
        values, _ = _evaluate(costs, time_weight, rows, candidates, within)
        best = int(np.argmin(values))
        if values[best] >= value * (1 - 1e-12):
            break
        order, value = candidates[best], float(values[best])
        candidates = _moves(order.tolist())
    return order, value


def _best_of_each_row(rows: Ints, values: Floats) -> Ints:
    """Returns the indices of the best order of each row, then of the best others, up to `_NUM_ROWS`."""
    ranked = np.lexsort((values, rows))
    first = np.flatnonzero(np.diff(rows[ranked], prepend=-1))
    rest = np.delete(ranked, first)
    rest = rest[np.argsort(values[rest], kind="stable")]
    return np.concatenate([ranked[first], rest[: max(0, _NUM_ROWS - len(first))]])


def _starting_orders(
    costs: ClusterCosts, known: Sequence[tuple[int, ...]]
) -> list[tuple[int, ...]]:
    """Returns known orders, the order of registration, orders by speed, and a chain of short links."""
    num_devices = costs.num_devices
    registered = tuple(range(num_devices))
    block = np.where(np.isfinite(costs.compute[-1, :, 1]), costs.compute[-1, :, 1], np.inf)
    by_speed = tuple(np.argsort(block, kind="stable").tolist())
    loop = np.where(np.isfinite(costs.link_load[-1]), costs.link_loop[-1], np.inf).min(axis=-1)
    chain: list[int] = []
    sender = num_devices
    while len(chain) < num_devices:
        left = [k for k in registered if k not in chain]
        sender = min(left, key=lambda k: float(loop[sender, k]))
        chain.append(sender)
    starts = [(*some, *(k for k in registered if k not in some)) for some in known]
    return list(dict.fromkeys([*starts, registered, by_speed, by_speed[::-1], tuple(chain)]))


def _moves(order: list[int]) -> Ints:
    """Returns orders in which one device has another place; short moves come first."""
    count = len(order)
    moved = []
    for distance in range(1, count):
        for i in range(count):
            for j in (i - distance, i + distance):
                if 0 <= j < count and not (distance == 1 and j < i):
                    rest = [*order[:i], *order[i + 1 :]]
                    moved.append([*rest[:j], order[i], *rest[j:]])
        if len(moved) >= _MOST_MOVES:
            break
    return np.array(moved, dtype=np.int64).reshape(-1, count)


def _evaluate(
    costs: ClusterCosts, time_weight: float, rows: Ints, orders: Ints, ends: Floats
) -> tuple[Floats, Ints]:
    """Returns the least weighted cost of a pipeline in each order, and the cell of the best bottleneck.

    `rows` has the row of each order, and `ends` the bottlenecks to evaluate, (order, cell).
    """
    chunk = max(1, _CHUNK // (_NUM_CELLS * (costs.num_blocks + 1) ** 2))
    parts = []
    for first in range(0, len(rows), chunk):
        some = costs.rows(rows[first : first + chunk]).reordered(orders[first : first + chunk])
        within = ends[first : first + chunk]
        blocked = None
        if np.any(some.starves):
            blocked = blocked_segments(some, within, in_order=True)
        cheapest = cheapest_prefixes(
            weighted_steps(some, time_weight), within, in_order=True, blocked=blocked
        )
        bottleneck_cost = time_weight * some.bottleneck_price[:, None] * within
        fixed = time_weight * some.fixed_delay_cost + some.fixed_summed_cost
        parts.append(cheapest[:, :, -1, -1] + bottleneck_cost + fixed[:, None])
    totals = np.concatenate(parts)
    return totals.min(axis=1), totals.argmin(axis=1)


def _spread(times: Floats, first: int, last: int) -> Floats:
    """Returns `_NUM_CELLS` of the times, evenly spread from index `first` to index `last`."""
    return np.asarray(times[np.linspace(first, last, _NUM_CELLS).astype(np.intp)])
