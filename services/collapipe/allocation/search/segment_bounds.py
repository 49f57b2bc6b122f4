"""Lower bounds of what the front of a pipeline costs, by dynamic programming over a grid of bottlenecks.

Segments are found from the head backwards. What is still open, the blocks before `s` and the way from the control
unit to device k, costs at least what this module says: bottlenecks fall into cells of a grid, and for each cell the
cheapest way that keeps within it is exact but for windows and, where any order is allowed, for a device that runs twice.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from collapipe.allocation.search.link_tables import Floats
from collapipe.allocation.search.segment_costs import ClusterCosts, Ints
from collapipe.allocation.search.segment_windows import Blocked, blocked_segments, standing_loops

_HUGE = 1e300
"""Stands for an infinite bottleneck where it is multiplied."""


@dataclass(frozen=True)
class Steps:
    """What is added up along a pipeline, and what each step takes of a micro-batch. Axes as in `ClusterCosts`.

    Args:
        device: Price of blocks s to e; infinite where they do not fit. (m, k, s, e)
        link: Price; infinite where there is no link. (m, sender, receiver, codec)
        compute: Seconds, likewise infinite. (m, k, d)
        load: Seconds, likewise infinite. (m, sender, receiver, codec)
    """

    device: Floats
    link: Floats
    compute: Floats
    load: Floats


def priced_steps(costs: ClusterCosts, time_weight: float) -> Steps:
    """Costs, and so much of the priced time."""
    segment = time_weight * costs.device_price + costs.device_cost
    device = _by_range(costs, segment)
    if time_weight:
        device = device + time_weight * costs.move_price
    return _steps(costs, device, time_weight * costs.link_price + costs.link_cost)


def error_steps(costs: ClusterCosts) -> Steps:
    """What codecs add to the convergence term."""
    return _steps(costs, _by_range(costs, np.zeros_like(costs.compute)), costs.link_error)


def _by_range(costs: ClusterCosts, segment: Floats) -> Floats:
    """Prices by number of blocks as prices by range; who runs nothing takes no part."""
    blocks = np.arange(costs.num_blocks + 1)
    span = blocks[None, :] - blocks[:, None]
    segment = np.where((costs.window > 0) & (blocks > 0), segment, np.inf)
    return np.asarray(segment[:, :, np.maximum(span, 0)])


def _steps(costs: ClusterCosts, device: Floats, link: Floats) -> Steps:
    link = np.where(np.isfinite(costs.link_load), link, np.inf)
    return Steps(device, link, costs.compute, costs.link_load)


def cheapest_fronts(
    steps: Steps, grid: Floats, *, in_order: bool, blocked: Blocked | None = None
) -> Floats:
    """The least price of the front of a pipeline.

    Args:
        steps: What is added up.
        grid: Bottlenecks that devices and links keep within. (m, g)
        in_order: Whether devices come in the order of the tables; else in any, and one may come twice.
        blocked: Segments that may not be. (m, g, k, s, e)

    Returns:
        By (m, g, k, s): of the control unit's link, the segments of blocks 0 to s and the links up to the one that
        leads into device k, or with k = K the edge server.
    """
    num_devices, num_blocks = steps.compute.shape[1], steps.compute.shape[2] - 1
    link = np.where(
        steps.load[:, None] <= grid[:, :, None, None, None], steps.link[:, None], np.inf
    ).min(axis=-1)
    over = np.where(steps.compute[:, None] <= grid[:, :, None, None], 0.0, np.inf)
    into = np.full((*grid.shape, num_devices + 1, num_blocks + 1), np.inf)
    into[..., :num_devices, 0] = link[:, :, num_devices, :num_devices]
    between = link[:, :, :num_devices]
    if in_order:
        blocks = np.arange(num_blocks + 1)
        span = np.maximum(blocks[None, :] - blocks[:, None], 0)
        for k in range(num_devices):
            segment = steps.device[:, None, k] + over[:, :, k][:, :, span]
            if blocked is not None:
                segment[blocked[:, :, k]] = np.inf
            ended = np.min(into[:, :, k, :, None] + segment, axis=2)
            later = ended[:, :, None, :] + between[:, :, k, k + 1 :, None]
            into[:, :, k + 1 :] = np.minimum(into[:, :, k + 1 :], later)
        return into
    for e in range(1, num_blocks + 1):
        segment = steps.device[:, None, :, :e, e] + over[:, :, :, e:0:-1]
        if blocked is not None:
            segment[blocked[:, :, :, :e, e]] = np.inf
        ended = np.min(into[:, :, :num_devices, :e] + segment, axis=3)
        into[..., e] = np.min(ended[..., None] + between, axis=2)
    return into


@dataclass(frozen=True)
class Grid:
    """Cells of bottlenecks, ascending.

    Args:
        ends: The most in each; the last is infinite. (m, g)
        starts: The least in each that a pipeline can have. (m, g)
    """

    ends: Floats
    starts: Floats


def bottlenecks(compute: Floats, load: Floats, least: float) -> Floats:
    """What the bottleneck of a pipeline may be where no window starves: a step's time, or the least there is."""
    times = np.concatenate([compute.ravel(), load.ravel()])
    return np.unique(np.append(times[(times > least) & np.isfinite(times)], least))


def grid_over(costs: ClusterCosts, least: Floats, size: int) -> Grid:
    """Spreads cells over the bottlenecks that there may be.

    Args:
        costs: The cluster.
        least: Floor of the bottleneck. (m)
        size: Cells.
    """
    times = [
        bottlenecks(compute, load, floor)
        for compute, load, floor in zip(costs.compute, costs.link_load, least, strict=True)
    ]
    ends = []
    for row in times:
        index = np.arange(len(row))
        if len(row) >= size:
            index = np.linspace(0, len(row) - 1, size - 1).astype(np.intp)
        ends.append(np.append(row[index], np.full(size - len(index), np.inf)))
    return Grid(np.stack(ends), _starts(costs, times, np.stack(ends)))


def _starts(costs: ClusterCosts, times: Sequence[Floats], ends: Floats) -> Floats:
    """The next possible bottleneck after the cell before; where windows starve any number may be one."""
    starts = np.concatenate([[[row[0]] for row in times], ends[:, :-1]], axis=1)
    for m in np.flatnonzero(~costs.starves).tolist():
        after = np.searchsorted(times[m], starts[m, 1:], side="right")
        starts[m, 1:] = np.append(times[m], np.inf)[after]
    return starts


@dataclass(frozen=True)
class Bound:
    """Of one weighing of time against cost.

    Args:
        time_weight: Of the priced time, 0 to 1.
        within: Price of the front when the bottleneck stays within a cell's end. (m, g, k, s)
        beyond: Least of price and stall over all cells from one on; one cell more than the grid, infinite. Likewise.
        limit: A cluster whose weighed time and cost exceed this is in no best decision.
    """

    time_weight: float
    within: Floats
    beyond: Floats
    limit: float


@dataclass(frozen=True)
class Bounds:
    """Bounds of one cluster.

    Args:
        grid: Cells of bottlenecks.
        blocked: Segments that no window allows, where windows may starve. (m, g, k, s, e)
        standing: Longest loop from device k on that the front can stand, likewise. (m, g, k, s)
        first_cell: Where the devices that are left can run the blocks that are left: (m, mask, s), or `None` for one
            order.
        weighed: Each is a reason to give up.
    """

    grid: Grid
    blocked: Blocked | None
    standing: Floats | None
    first_cell: Ints | None
    weighed: tuple[Bound, ...]

    def first_weighed(self, costs: ClusterCosts, time_weight: float) -> "Bounds":
        """With one more weighing, the first; the same if it is there already."""
        if any(bound.time_weight == time_weight for bound in self.weighed):
            return self
        return replace(self, weighed=(_bound(costs, self, time_weight), *self.weighed))


def cluster_bounds(
    costs: ClusterCosts,
    grid: Grid,
    time_weights: tuple[float, ...],
    *,
    in_order: bool,
) -> Bounds:
    """Tabulates the bounds of a cluster, with infinite limits.

    Args:
        costs: The cluster.
        grid: Cells of bottlenecks.
        time_weights: Of each weighing.
        in_order: See `cheapest_fronts`.
    """
    blocked = standing = None
    if np.any(costs.starves):
        blocked = blocked_segments(costs, grid.ends, in_order=in_order)
        standing = standing_loops(costs, grid.ends, in_order=in_order)
    first = None if in_order else _first_cells(costs, grid.ends)
    bounds = Bounds(grid, blocked, standing, first, ())
    return replace(bounds, weighed=tuple(_bound(costs, bounds, weight) for weight in time_weights))


def _bound(costs: ClusterCosts, bounds: Bounds, weight: float) -> Bound:
    within = cheapest_fronts(
        priced_steps(costs, weight),
        bounds.grid.ends,
        in_order=bounds.first_cell is None,
        blocked=bounds.blocked,
    )
    stall_price = weight * costs.stall_price[:, None]
    stall = np.where(stall_price > 0, stall_price * np.minimum(bounds.grid.starts, _HUGE), 0.0)
    total = within + stall[:, :, None, None]
    beyond = np.minimum.accumulate(total[:, ::-1], axis=1)[:, ::-1]
    beyond = np.concatenate([beyond, np.full_like(beyond[:, :1], np.inf)], axis=1)
    return Bound(weight, within, beyond, np.inf)


def _first_cells(costs: ClusterCosts, grid: Floats) -> Ints:
    """First cell in which the devices that a mask leaves can hold and run so many blocks: (m, mask, s)."""
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
    left = (masks[:, None] >> np.arange(num_devices)) & 1 == 0
    most = held @ left.T.astype(np.int64)
    cells: Ints = np.sum(most[..., None] < np.arange(num_blocks + 1), axis=1)
    return cells
