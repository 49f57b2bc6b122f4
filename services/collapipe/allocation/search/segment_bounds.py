"""Lower bounds on the cost of the part of a pipeline that the search has not built yet.

The search builds a pipeline from the head backwards. The missing part is a *prefix*: the control unit with its
blocks, the segments of the blocks before s, and the link into device k. For each cell of a grid of bottlenecks,
two relaxations bound its cost from below. In a cell, only segments and links are allowed that take no longer than
the cell's end.

- A dynamic programme computes the cheapest path for each device k and each block s. It knows the links, but it
  may use a device twice.
- A fractional knapsack fills blocks into the devices that are still unused, the cheapest ones first. It uses each
  device once, but with the cheapest link into it.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from collapipe.allocation.search.arrays import Bools, Floats, Ints
from collapipe.allocation.search.labels import Labels
from collapipe.allocation.search.segment_costs import ClusterCosts
from collapipe.allocation.search.segment_windows import (
    block_counts,
    blocked_segments,
    longest_loops,
)

_HUGE = 1e300
"""Replaces an infinite bottleneck in products."""


@dataclass(frozen=True)
class Steps:
    """The parts of a pipeline: their costs, which add up, and their times, which the bottleneck limits.

    `ClusterCosts` explains the axes. Everything is infinite where a segment does not fit or a link does not
    exist.

    Args:
        first: Cost of the control unit with s blocks. (m, s)
        segment: Cost of running blocks s to e on device k. (m, k, s, e)
        link: Cost. (m, sender, receiver, codec)
    """

    first: Floats
    segment: Floats
    link: Floats


def weighted_steps(costs: ClusterCosts, time_weight: float) -> Steps:
    """Returns steps that cost `time_weight` times the delay cost, plus the summed cost."""
    first = time_weight * costs.first.delay_cost + costs.first.summed_cost
    by_count = time_weight * costs.segment_delay_cost + costs.segment_summed_cost
    segment = _by_range(costs, by_count)
    if time_weight:
        segment = segment + time_weight * costs.move_delay_cost
    link = time_weight * costs.link_delay_cost + costs.link_summed_cost
    return _steps(costs, first, segment, link)


def error_steps(costs: ClusterCosts) -> Steps:
    """Returns steps that cost what their codec adds to the convergence term."""
    first = np.zeros_like(costs.first.seconds)
    return _steps(costs, first, _by_range(costs, np.zeros_like(costs.compute)), costs.link_error)


def _by_range(costs: ClusterCosts, segment: Floats) -> Floats:
    """Converts costs by (m, k, d) to costs by (m, k, s, e); they are infinite for an empty range."""
    not_empty = np.arange(costs.num_blocks + 1) > 0
    segment = np.where((costs.window > 0) & not_empty, segment, np.inf)
    return np.asarray(segment[:, :, block_counts(costs.num_blocks)])


def _steps(costs: ClusterCosts, first: Floats, segment: Floats, link: Floats) -> Steps:
    first = np.where(costs.first.window > 0, first, np.inf)
    return Steps(first, segment, np.where(np.isfinite(costs.link_load), link, np.inf))


def cheapest_prefixes(
    costs: ClusterCosts, steps: Steps, grid: Floats, blocked: Bools | None = None
) -> Floats:
    """Computes the least cost of each prefix of a pipeline by dynamic programming: (m, g, k, s).

    A prefix runs the blocks before s and ends with the link into device k. The last k is the edge server. The
    programme may use a device twice.

    Args:
        grid: Bottlenecks that no stage and no link may exceed. (m, g)
        blocked: Segments that are not allowed. (m, g, k, s, e)
    """
    num_devices, num_blocks = costs.num_devices, costs.num_blocks
    link = _links_within(costs, steps, grid)
    between = link[:, :, :num_devices]
    over = np.where(costs.compute[:, None] <= grid[:, :, None, None], 0.0, np.inf)
    first = np.where(costs.first.seconds[:, None] <= grid[:, :, None], steps.first[:, None], np.inf)
    cheapest: Floats = first[:, :, None, :] + link[:, :, num_devices, :, None]
    for e in range(1, num_blocks + 1):
        segment = steps.segment[:, None, :, :e, e] + over[:, :, :, e:0:-1]
        if blocked is not None:
            segment[blocked[:, :, :, :e, e]] = np.inf
        ended = np.min(cheapest[:, :, :num_devices, :e] + segment, axis=3, initial=np.inf)
        through = np.min(ended[..., None] + between, axis=2, initial=np.inf)
        cheapest[..., e] = np.minimum(cheapest[..., e], through)
    return cheapest


def _links_within(costs: ClusterCosts, steps: Steps, grid: Floats) -> Floats:
    """Returns the cost of each link with its cheapest codec within a bottleneck: (m, g, sender, receiver)."""
    within = costs.link_load[:, None] <= grid[:, :, None, None, None]
    return np.asarray(np.where(within, steps.link[:, None], np.inf).min(axis=-1))


@dataclass(frozen=True)
class Grid:
    """Cells of bottlenecks, in ascending order.

    Args:
        ends: The largest bottleneck of each cell; the last one is infinite. (m, g)
        starts: The smallest bottleneck that a pipeline in the cell can have. (m, g)
    """

    ends: Floats
    starts: Floats


def bottleneck_grid(costs: ClusterCosts, least: Floats, num_cells: int) -> Grid:
    """Spreads cells evenly over the ranks of the possible bottlenecks.

    `least` has the smallest bottleneck that the load of the edge server allows: (m, d).
    """
    times = [_possible_bottlenecks(costs, row, least[row]) for row in range(costs.num_rows)]
    ends = []
    for row in times:
        index = np.arange(len(row))
        if len(row) >= num_cells:
            index = np.linspace(0, len(row) - 1, num_cells - 1).astype(np.intp)
        ends.append(np.append(row[index], np.full(num_cells - len(index), np.inf)))
    return Grid(np.stack(ends), _cell_starts(costs, times, np.stack(ends)))


def _possible_bottlenecks(costs: ClusterCosts, row: int, least: Floats) -> Floats:
    """Returns every bottleneck that a pipeline of a row can have if no window starves, ascending."""
    tables = (costs.compute, costs.link_load, costs.first.seconds, costs.last.seconds)
    times = np.concatenate([*(table[row].ravel() for table in tables), least])
    return np.unique(times[(times >= np.min(least)) & np.isfinite(times)])


def _cell_starts(costs: ClusterCosts, times: Sequence[Floats], ends: Floats) -> Floats:
    """Returns the first possible bottleneck after the end of the cell before.

    Where windows starve, any number may be a bottleneck, so the cell starts at the end of the cell before.
    """
    starts = np.concatenate([[[row[0]] for row in times], ends[:, :-1]], axis=1)
    for m in np.flatnonzero(~costs.starves).tolist():
        after = np.searchsorted(times[m], starts[m, 1:], side="right")
        starts[m, 1:] = np.append(times[m], np.inf)[after]
    return starts


@dataclass(frozen=True)
class Knapsack:
    """What it costs at least to run blocks on devices, if each one is used once. g is a cell of the grid.

    The items are the devices, and then the control unit. Items are in ascending order of their cost.

    Args:
        item: Index of the item. (m, g, item)
        cost: Least cost of a block on this item, with the item's share of the link into it. (m, g, item)
        held: Most blocks that the item can run. (m, g, item)
        first: Cost of the control unit without blocks. (m, g)
        into: Least cost of a link into device k, or into the edge server. (m, g, k)
    """

    item: Ints
    cost: Floats
    held: Ints
    first: Floats
    into: Floats

    def cost_before(self, row: Ints, used: Ints, start: Ints) -> Floats:
        """Returns the least cost of the blocks before `start` on the unused items: (label, g).

        Args:
            row: Row of each label.
            used: Bits of the devices that the label uses.
            start: The label's first block.
        """
        num_rows, num_starts = len(self.item), int(np.max(start, initial=0)) + 1
        key = (used * num_rows + row) * num_starts + start
        _, first, label = np.unique(key, return_index=True, return_inverse=True)
        row, used, start = row[first], used[first], start[first]
        unused = (used[:, None, None] >> self.item[row]) & 1 == 0
        held = self.held[row] * unused
        up_to = np.cumsum(held, axis=-1)
        taken = np.clip(start[:, None, None] - (up_to - held), 0, held)
        cost = self.first[row] + np.sum(taken * self.cost[row], axis=-1)
        cost = np.where(up_to[..., -1] < start[:, None], np.inf, cost)
        return np.asarray(cost[label])


def _knapsack(costs: ClusterCosts, grid: Floats, time_weight: float) -> Knapsack:
    steps = weighted_steps(costs, time_weight)
    num_devices, ends = costs.num_devices, grid[:, :, None, None]
    into = np.min(_links_within(costs, steps, grid), axis=2)
    blocks = np.arange(1, costs.num_blocks + 1)
    segment = time_weight * costs.segment_delay_cost + costs.segment_summed_cost
    fits = (costs.window[:, None, :, 1:] > 0) & (costs.compute[:, None, :, 1:] <= ends)
    each = (segment[:, None, :, 1:] + into[:, :, :num_devices, None]) / blocks
    moved = np.diagonal(costs.move_delay_cost, offset=1, axis1=2, axis2=3)
    device = np.min(np.where(fits, each, np.inf), axis=-1, initial=np.inf)
    device = device + time_weight * np.min(moved, axis=-1)[:, None]
    first = steps.first[:, None]
    first = np.where(costs.first.seconds[:, None] <= grid[:, :, None], first, np.inf)
    least_first = np.min(first, axis=-1)
    with np.errstate(invalid="ignore"):
        more = (
            np.where(np.isfinite(first), first - least_first[..., None], np.inf)[..., 1:] / blocks
        )
    cost = np.concatenate([device, np.min(more, axis=-1, initial=np.inf)[..., None]], axis=2)
    held = np.concatenate(
        [
            np.max(np.where(fits, blocks, 0), axis=-1, initial=0),
            np.max(np.where(np.isfinite(first[..., 1:]), blocks, 0), axis=-1, initial=0)[..., None],
        ],
        axis=2,
    )
    held = np.where(np.isfinite(cost), held, 0)
    cost = np.where(held > 0, cost, 0.0)
    item = np.argsort(cost, axis=-1, kind="stable")
    cost, held = (np.take_along_axis(table, item, axis=-1) for table in (cost, held))
    return Knapsack(item, cost, held, least_first, into)


@dataclass(frozen=True)
class Bound:
    """Lower bounds on the *weighted cost*: `time_weight` times the delay cost, plus the summed cost.

    Args:
        time_weight: From 0 to 1.
        prefix_cost: Least weighted cost of a prefix, without the bottleneck's, if the bottleneck is at most
            the end of the cell. (m, g, k, s)
        limit: A plan of a row with a larger weighted cost is in no best decision. (m)
    """

    time_weight: float
    prefix_cost: Floats
    knapsack: Knapsack
    limit: Floats


@dataclass(frozen=True)
class Bounds:
    """The bounds of one cluster.

    Args:
        blocked: Segments that no window allows; `None` if no window starves. (m, g, k, s, e)
        longest_loop: Longest latency loop from device k on that some prefix allows; `None` if no window
            starves. (m, g, k, s)
        weighted: Bounds for several weights. A partial plan that exceeds the limit of any of them is dropped.
    """

    grid: Grid
    blocked: Bools | None
    longest_loop: Floats | None
    weighted: tuple[Bound, ...]

    def with_fair_weight(self, costs: ClusterCosts, time_weight: float) -> "Bounds":
        """Puts bounds for this weight before those for the weights 1 and 0; drops those of another weight."""
        weighted = tuple(bound for bound in self.weighted if bound.time_weight in (0.0, 1.0))
        if time_weight not in (0.0, 1.0):
            weighted = (_bound(costs, self, time_weight), *weighted)
        return replace(self, weighted=weighted)


def cluster_bounds(costs: ClusterCosts, grid: Grid, time_weights: tuple[float, ...]) -> Bounds:
    """Tabulates the bounds of a cluster, with infinite limits."""
    blocked = longest_loop = None
    if np.any(costs.starves):
        blocked = blocked_segments(costs, grid.ends)
        longest_loop = longest_loops(costs, grid.ends)
    bounds = Bounds(grid, blocked, longest_loop, ())
    weighted = tuple(_bound(costs, bounds, weight) for weight in time_weights)
    return replace(bounds, weighted=weighted)


def _bound(costs: ClusterCosts, bounds: Bounds, time_weight: float) -> Bound:
    ends = bounds.grid.ends
    prefix_cost = cheapest_prefixes(costs, weighted_steps(costs, time_weight), ends, bounds.blocked)
    unlimited = np.full(costs.num_rows, np.inf)
    return Bound(time_weight, prefix_cost, _knapsack(costs, ends, time_weight), unlimited)


def lower_bound(costs: ClusterCosts, labels: Labels, bounds: Bounds, bound: Bound) -> Floats:
    """Returns a lower bound on the weighted cost of every plan that extends a label.

    If a plan extends a label, its bottleneck is in the cell of the label or in a later cell.
    """
    row, device, start = labels.row, labels.device, labels.start
    cell = np.sum(bounds.grid.ends[row] < labels.bottleneck[:, None], axis=1)
    impossible: Bools = np.arange(bounds.grid.ends.shape[1]) < cell[:, None]
    if bounds.longest_loop is not None:
        impossible |= bounds.longest_loop[row, :, device, start] < labels.loop[:, None]
    bottleneck = np.maximum(bounds.grid.starts[row], labels.bottleneck[:, None])
    price = bound.time_weight * costs.bottleneck_price[row, None]
    filled = bound.knapsack.cost_before(row, labels.mask, start)
    filled += bound.knapsack.into[row, :, device]
    total = np.maximum(bound.prefix_cost[row, :, device, start], filled)
    total += price * np.minimum(bottleneck, _HUGE)
    least = np.min(np.where(impossible, np.inf, total), axis=1)
    return np.asarray(bound.time_weight * labels.delay_cost + labels.summed_cost + least)


def within_limits(costs: ClusterCosts, labels: Labels, bounds: Bounds) -> Labels:
    """Drops the labels that no plan within all limits extends."""
    for bound in bounds.weighted:
        least = lower_bound(costs, labels, bounds, bound)
        labels = labels.take(
            np.flatnonzero(np.isfinite(least) & (least <= bound.limit[labels.row]))
        )
    return labels
