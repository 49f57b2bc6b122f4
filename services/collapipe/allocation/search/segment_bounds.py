"""Lower bounds on the cost of the part of a pipeline that the search has not built yet.

The search builds a pipeline from the head backwards. The missing part is a *prefix*: the link of the control
unit, the segments of the blocks before s, and the link into device k. A dynamic programme computes the
cheapest prefix for each device k and each block s, and for each cell of a grid of bottlenecks. In a cell,
only segments and links are allowed that take no longer than the cell's end.

The result is a lower bound, because the programme relaxes two restrictions. It leaves out only some of the
segments that windows forbid. And if devices may come in any order, it may use a device twice.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from collapipe.allocation.search.arrays import Bools, Floats, Ints
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
        segment: Cost of running blocks s to e on device k. (m, k, s, e)
        link: Cost. (m, sender, receiver, codec)
        compute: Seconds of a segment. (m, k, d)
        load: Seconds for which a micro-batch occupies a link. (m, sender, receiver, codec)
    """

    segment: Floats
    link: Floats
    compute: Floats
    load: Floats


def weighted_steps(costs: ClusterCosts, time_weight: float) -> Steps:
    """Returns steps that cost `time_weight` times the delay cost, plus the summed cost."""
    by_count = time_weight * costs.segment_delay_cost + costs.segment_summed_cost
    segment = _by_range(costs, by_count)
    if time_weight:
        segment = segment + time_weight * costs.move_delay_cost
    return _steps(costs, segment, time_weight * costs.link_delay_cost + costs.link_summed_cost)


def error_steps(costs: ClusterCosts) -> Steps:
    """Returns steps that cost what their codec adds to the convergence term."""
    return _steps(costs, _by_range(costs, np.zeros_like(costs.compute)), costs.link_error)


def _by_range(costs: ClusterCosts, segment: Floats) -> Floats:
    """Converts costs by (m, k, d) to costs by (m, k, s, e); they are infinite for an empty range."""
    not_empty = np.arange(costs.num_blocks + 1) > 0
    segment = np.where((costs.window > 0) & not_empty, segment, np.inf)
    return np.asarray(segment[:, :, block_counts(costs.num_blocks)])


def _steps(costs: ClusterCosts, segment: Floats, link: Floats) -> Steps:
    link = np.where(np.isfinite(costs.link_load), link, np.inf)
    return Steps(segment, link, costs.compute, costs.link_load)


def cheapest_prefixes(
    steps: Steps, grid: Floats, *, in_order: bool, blocked: Bools | None = None
) -> Floats:
    """Computes the least cost of each prefix of a pipeline by dynamic programming: (m, g, k, s).

    A prefix runs the blocks before s and ends with the link into device k. The last k is the edge server.

    Args:
        grid: Bottlenecks that no segment and no link may exceed. (m, g)
        in_order: Whether devices come in the order of the tables. Otherwise the programme may use one twice.
        blocked: Segments that are not allowed. (m, g, k, s, e)
    """
    num_devices, num_blocks = steps.compute.shape[1], steps.compute.shape[2] - 1
    link = np.where(
        steps.load[:, None] <= grid[:, :, None, None, None], steps.link[:, None], np.inf
    ).min(axis=-1)
    over = np.where(steps.compute[:, None] <= grid[:, :, None, None], 0.0, np.inf)
    cheapest = np.full((*grid.shape, num_devices + 1, num_blocks + 1), np.inf)
    cheapest[..., :num_devices, 0] = link[:, :, num_devices, :num_devices]
    between = link[:, :, :num_devices]
    if in_order:
        counts = block_counts(num_blocks)
        for k in range(num_devices):
            segment = steps.segment[:, None, k] + over[:, :, k][:, :, counts]
            if blocked is not None:
                segment[blocked[:, :, k]] = np.inf
            ended = np.min(cheapest[:, :, k, :, None] + segment, axis=2)
            later = ended[:, :, None, :] + between[:, :, k, k + 1 :, None]
            cheapest[:, :, k + 1 :] = np.minimum(cheapest[:, :, k + 1 :], later)
        return cheapest
    for e in range(1, num_blocks + 1):
        segment = steps.segment[:, None, :, :e, e] + over[:, :, :, e:0:-1]
        if blocked is not None:
            segment[blocked[:, :, :, :e, e]] = np.inf
        ended = np.min(cheapest[:, :, :num_devices, :e] + segment, axis=3)
        cheapest[..., e] = np.min(ended[..., None] + between, axis=2)
    return cheapest


@dataclass(frozen=True)
class Grid:
    """Cells of bottlenecks, in ascending order.

    Args:
        ends: The largest bottleneck of each cell; the last one is infinite. (m, g)
        starts: The smallest bottleneck that a pipeline in the cell can have. (m, g)
    """

    ends: Floats
    starts: Floats


def possible_bottlenecks(compute: Floats, load: Floats, least: float) -> Floats:
    """Returns every bottleneck that a pipeline can have if no window starves, ascending.

    Such a bottleneck is the time of a segment, the time of a link, or `least`.
    """
    times = np.concatenate([compute.ravel(), load.ravel()])
    return np.unique(np.append(times[(times > least) & np.isfinite(times)], least))


def bottleneck_grid(costs: ClusterCosts, least: Floats, num_cells: int) -> Grid:
    """Spreads cells evenly over the ranks of the possible bottlenecks, from `least` (m) on."""
    times = [
        possible_bottlenecks(compute, load, floor)
        for compute, load, floor in zip(costs.compute, costs.link_load, least, strict=True)
    ]
    ends = []
    for row in times:
        index = np.arange(len(row))
        if len(row) >= num_cells:
            index = np.linspace(0, len(row) - 1, num_cells - 1).astype(np.intp)
        ends.append(np.append(row[index], np.full(num_cells - len(index), np.inf)))
    return Grid(np.stack(ends), _cell_starts(costs, times, np.stack(ends)))


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
class Bound:
    """Lower bounds on the *weighted cost*: `time_weight` times the delay cost, plus the summed cost.

    Args:
        time_weight: From 0 to 1.
        prefix_cost: Least weighted cost of a prefix, without the bottleneck's, if the bottleneck is at most
            the end of the cell. (m, g, k, s)
        from_cell: Least weighted cost of a prefix and of the bottleneck, if the bottleneck is in this cell or
            a later one. The grid has one more cell here, which is infinite. (m, g + 1, k, s)
        limit: A plan of the cluster with a larger weighted cost is in no best decision.
    """

    time_weight: float
    prefix_cost: Floats
    from_cell: Floats
    limit: float


@dataclass(frozen=True)
class Bounds:
    """The bounds of one cluster.

    Args:
        blocked: Segments that no window allows; `None` if no window starves. (m, g, k, s, e)
        longest_loop: Longest latency loop from device k on that some prefix allows; `None` if no window
            starves. (m, g, k, s)
        first_cell: First cell in which the unused devices can run the blocks before s. The mask has a bit for
            each device that is in use. `None` if the devices come in one order. (m, mask, s)
        weighted: Bounds for several weights. A partial plan that exceeds the limit of any of them is dropped.
    """

    grid: Grid
    blocked: Bools | None
    longest_loop: Floats | None
    first_cell: Ints | None
    weighted: tuple[Bound, ...]

    def with_first_weight(self, costs: ClusterCosts, time_weight: float) -> "Bounds":
        """Puts bounds for one more weight before the others, unless there are bounds for this weight."""
        if any(bound.time_weight == time_weight for bound in self.weighted):
            return self
        return replace(self, weighted=(_bound(costs, self, time_weight), *self.weighted))


def cluster_bounds(
    costs: ClusterCosts,
    grid: Grid,
    time_weights: tuple[float, ...],
    *,
    in_order: bool,
) -> Bounds:
    """Tabulates the bounds of a cluster, with infinite limits; `in_order` as in `cheapest_prefixes`."""
    blocked = longest_loop = None
    if np.any(costs.starves):
        blocked = blocked_segments(costs, grid.ends, in_order=in_order)
        longest_loop = longest_loops(costs, grid.ends, in_order=in_order)
    first_cell = None if in_order else _first_cells(costs, grid.ends)
    bounds = Bounds(grid, blocked, longest_loop, first_cell, ())
    weighted = tuple(_bound(costs, bounds, weight) for weight in time_weights)
    return replace(bounds, weighted=weighted)


def _bound(costs: ClusterCosts, bounds: Bounds, time_weight: float) -> Bound:
    prefix_cost = cheapest_prefixes(
        weighted_steps(costs, time_weight),
        bounds.grid.ends,
        in_order=bounds.first_cell is None,
        blocked=bounds.blocked,
    )
    price = time_weight * costs.bottleneck_price[:, None]
    bottleneck_cost = np.where(price > 0, price * np.minimum(bounds.grid.starts, _HUGE), 0.0)
    total = prefix_cost + bottleneck_cost[:, :, None, None]
    from_cell = np.minimum.accumulate(total[:, ::-1], axis=1)[:, ::-1]
    from_cell = np.concatenate([from_cell, np.full_like(from_cell[:, :1], np.inf)], axis=1)
    return Bound(time_weight, prefix_cost, from_cell, np.inf)


def _first_cells(costs: ClusterCosts, grid: Floats) -> Ints:
    """Finds the first cell in which the devices outside a mask can hold and run s blocks: (m, mask, s)."""
    num_devices, num_blocks = costs.num_devices, costs.num_blocks
    held = np.max(
        np.where(
            (costs.compute[:, None] <= grid[:, :, None, None]) & (costs.window[:, None] > 0),
            np.arange(num_blocks + 1),
            0,
        ),
        axis=-1,
    )
    masks = np.arange(2**num_devices)
    unused = (masks[:, None] >> np.arange(num_devices)) & 1 == 0
    most = held @ unused.T.astype(np.int64)
    cells: Ints = np.sum(most[..., None] < np.arange(num_blocks + 1), axis=1)
    return cells
