"""Device orders worth a full search, where there are too many devices to look at all orders: local search.

An order is judged by the cheapest pipeline in it, whatever subset of its devices that uses, with windows as far as the bounds know them.
"""

import math
from collections.abc import Sequence

import numpy as np

from collapipe.allocation.search.link_tables import Floats
from collapipe.allocation.search.segment_bounds import bottlenecks, cheapest_fronts, priced_steps
from collapipe.allocation.search.segment_costs import ClusterCosts, Ints
from collapipe.allocation.search.segment_windows import blocked_segments

_CELLS = 8
_ROWS = 12
_SEARCHES = 1
_MOST_MOVES = 60
_CHUNK = 3_000_000
"""Numbers in one table of prices: keeps it in the cache, or near it."""


def promising_rows(
    costs: ClusterCosts,
    floor: Floats,
    time_weight: float,
    known: Sequence[tuple[int, ...]],
    *,
    improved: bool,
) -> tuple[ClusterCosts, Floats]:
    """Rows for a full search: the best order for each M, and some more that are good.

    Args:
        costs: The cluster, devices in registration order.
        floor: Least bottleneck. (m)
        time_weight: Of priced time against cost.
        known: Orders of plans that are known, maybe of some devices only.
        improved: Move devices one at a time to where that helps most, until none helps.

    Returns:
        Tables of the rows, and the least bottleneck of each.
    """
    num_options = len(costs.options)
    starts = np.array(_starts(costs, known), dtype=np.int64)
    times = [
        bottlenecks(costs.compute[m], costs.link_load[m], float(floor[m]))
        for m in range(num_options)
    ]
    every = np.stack([_spread(row, 0, len(row) - 1) for row in times])
    rows = np.repeat(np.arange(num_options), len(starts))
    orders = np.tile(starts, (num_options, 1))
    totals, at = _totals(costs, time_weight, rows, orders, every[rows])
    starting = np.argsort(totals, kind="stable")[: _SEARCHES if improved else 0]
    for best in starting[np.isfinite(totals[starting])].tolist():
        row = int(rows[best])
        near = every[row][[max(at[best] - 1, 0), min(at[best] + 1, _CELLS - 1)]]
        first, last = np.searchsorted(times[row], near).tolist()
        ends = _spread(times[row], first, last)
        order, total = _improved(costs, time_weight, row, orders[best], ends)
        found = np.tile(order, (num_options, 1))
        values, _ = _totals(costs, time_weight, np.arange(num_options), found, every)
        values[row] = min(total, float(values[row]))
        rows, orders = np.append(rows, np.arange(num_options)), np.vstack([orders, found])
        totals = np.append(totals, values)
    kept = _best_of_each(rows, totals)
    rows, orders = rows[kept], orders[kept]
    return costs.rows(rows).reordered(orders), floor[rows]


def _improved(
    costs: ClusterCosts, time_weight: float, row: int, order: Ints, ends: Floats
) -> tuple[Ints, float]:
    """Moves one device at a time, and what the order is worth then."""
    total = math.inf
    moved = order[None, :]
    for _ in range(2 * costs.num_devices):
        rows = np.full(len(moved), row)
        within = np.tile(ends, (len(moved), 1))
        totals, _ = _totals(costs, time_weight, rows, moved, within)
        best = int(np.argmin(totals))
        if totals[best] >= total * (1 - 1e-12):
            break
        order, total = moved[best], float(totals[best])
        moved = _moves(order.tolist())
    return order, total


def _best_of_each(rows: Ints, totals: Floats) -> Ints:
    """The best of each row, and the best of the rest up to a number."""
    ranked = np.lexsort((totals, rows))
    first = np.flatnonzero(np.diff(rows[ranked], prepend=-1))
    rest = np.delete(ranked, first)
    rest = rest[np.argsort(totals[rest], kind="stable")]
    return np.concatenate([ranked[first], rest[: max(0, _ROWS - len(first))]])


def _starts(costs: ClusterCosts, known: Sequence[tuple[int, ...]]) -> list[tuple[int, ...]]:
    """Known ones, registration order, by speed, and along the shortest links."""
    num_devices = costs.num_devices
    every = tuple(range(num_devices))
    block = np.where(np.isfinite(costs.compute[-1, :, 1]), costs.compute[-1, :, 1], np.inf)
    by_speed = tuple(np.argsort(block, kind="stable").tolist())
    loop = np.where(np.isfinite(costs.link_load[-1]), costs.link_loop[-1], np.inf).min(axis=-1)
    chain: list[int] = []
    sender = num_devices
    while len(chain) < num_devices:
        left = [k for k in every if k not in chain]
        sender = min(left, key=lambda k: float(loop[sender, k]))
        chain.append(sender)
    starts = [(*some, *(k for k in every if k not in some)) for some in known]
    return list(dict.fromkeys([*starts, every, by_speed, by_speed[::-1], tuple(chain)]))


def _moves(order: list[int]) -> Ints:
    """Orders with one device elsewhere, near ones first, as many as are judged at once."""
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


def _totals(
    costs: ClusterCosts, time_weight: float, rows: Ints, orders: Ints, ends: Floats
) -> tuple[Floats, Ints]:
    """What the best pipeline of each row and order is worth within the best of some bottlenecks, and which that is."""
    each = max(1, _CHUNK // (_CELLS * (costs.num_blocks + 1) ** 2))
    parts = []
    for first in range(0, len(rows), each):
        some = costs.rows(rows[first : first + each]).reordered(orders[first : first + each])
        within = ends[first : first + each]
        blocked = None
        if np.any(some.starves):
            blocked = blocked_segments(some, within, in_order=True)
        into = cheapest_fronts(
            priced_steps(some, time_weight), within, in_order=True, blocked=blocked
        )
        stall = time_weight * some.stall_price[:, None] * within
        parts.append(
            into[:, :, -1, -1] + stall + (time_weight * some.end_price + some.end_cost)[:, None]
        )
    totals = np.concatenate(parts)
    return totals.min(axis=1), totals.argmin(axis=1)


def _spread(times: Floats, first: int, last: int) -> Floats:
    """Some of them, from the first to the last."""
    return np.asarray(times[np.linspace(first, last, _CELLS).astype(np.intp)])
