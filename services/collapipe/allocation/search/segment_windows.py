"""What windows allow: a stage whose window w is smaller than the micro-batches under way keeps its loop R within beta w.

R is a sum over what comes behind, design (4), so two tables are enough for bounds: the least loop that there can be behind a device,
and the most that the front of the pipeline can stand. Axes as in `segment_bounds`.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from collapipe.allocation.search.link_tables import Floats
from collapipe.allocation.search.segment_costs import ClusterCosts, Ints

_ROUNDING = 1 + 1e-11
_NO_LIMIT = 1e300
"""Finite, for infinite links are taken from it."""

Blocked = npt.NDArray[np.bool_]


def allowed_loops(costs: ClusterCosts, grid: Floats) -> tuple[Floats, Floats]:
    """Most seconds of a loop by device and number of blocks, (m, g, k, d), and of the control unit, (m, g)."""
    flight = costs.flight[:, None]
    entry = np.where(
        costs.entry_window[:, None] < flight, grid * costs.entry_window[:, None], np.inf
    )
    window = costs.window[:, None]
    starving = (window > 0) & (window < flight[..., None, None])
    device = np.where(starving, grid[:, :, None, None] * np.maximum(window, 1), np.inf)
    device = np.where(window > 0, np.minimum(device, _NO_LIMIT), -np.inf)
    return device * _ROUNDING, np.minimum(entry, _NO_LIMIT) * _ROUNDING


def blocked_segments(costs: ClusterCosts, grid: Floats, *, in_order: bool) -> Blocked:
    """Segments whose loop is too long for their window, however short what comes behind is: (m, g, k, s, e)."""
    allowed, _ = allowed_loops(costs, grid)
    num_blocks = costs.num_blocks
    span = _spans(num_blocks)
    behind = _least_behind(costs, grid, allowed, in_order=in_order)
    loops = costs.compute[:, None][..., span] + behind[..., None, :]
    return np.asarray((loops > allowed[..., span]) & (span > 0))


def standing_loops(costs: ClusterCosts, grid: Floats, *, in_order: bool) -> Floats:
    """The longest loop from device k on that the front can stand: (m, g, k, s); negative infinity if no front can be."""
    num_devices, num_blocks = costs.num_devices, costs.num_blocks
    allowed, entry = allowed_loops(costs, grid)
    links = _least_links(costs, grid)
    between = links[:, :, :num_devices]
    most = np.full((*grid.shape, num_devices + 1, num_blocks + 1), -np.inf)
    most[..., :num_devices, 0] = (entry - costs.entry_seconds[:, None])[..., None] - links[
        :, :, num_devices, :num_devices
    ]
    if in_order:
        span = _spans(num_blocks)
        for k in range(num_devices):
            room = np.minimum(most[:, :, k, :, None], allowed[:, :, k][..., span])
            ended = np.max(room - costs.compute[:, None, k][..., span], axis=2)
            later = ended[:, :, None, :] - between[:, :, k, k + 1 :, None]
            most[:, :, k + 1 :] = np.maximum(most[:, :, k + 1 :], later)
        return most
    for e in range(1, num_blocks + 1):
        room = np.minimum(most[:, :, :num_devices, :e], allowed[:, :, :, e:0:-1])
        ended = np.max(room - costs.compute[:, None, :, e:0:-1], axis=3)
        most[..., e] = np.max(ended[..., None] - between, axis=2)
    return most


def _least_behind(costs: ClusterCosts, grid: Floats, allowed: Floats, *, in_order: bool) -> Floats:
    """The shortest loop behind a device whose segment ends at e, its link included: (m, g, k, e)."""
    num_devices, num_blocks = costs.num_devices, costs.num_blocks
    links = _least_links(costs, grid)
    least = np.full((*grid.shape, num_devices, num_blocks + 1), np.inf)
    least[..., num_blocks] = (
        links[:, :, :num_devices, num_devices] + (costs.head_seconds[:, None, None])
    )
    if in_order:
        span = _spans(num_blocks)
        for k in reversed(range(num_devices)):
            loops = costs.compute[:, None, k][..., span] + least[:, :, k, None, :]
            loops = np.where(loops <= allowed[:, :, k][..., span], loops, np.inf)
            begun = np.min(loops, axis=3)
            before = links[:, :, :k, k, None] + begun[:, :, None, :]
            least[:, :, :k] = np.minimum(least[:, :, :k], before)
        return least
    for s in range(num_blocks - 1, 0, -1):
        count = num_blocks - s
        loops = costs.compute[:, None, :, 1 : count + 1] + least[..., s + 1 :]
        loops = np.where(loops <= allowed[:, :, :, 1 : count + 1], loops, np.inf)
        begun = np.min(loops, axis=3)
        least[..., s] = np.min(
            links[:, :, :num_devices, :num_devices] + begun[:, :, None, :], axis=3
        )
    return least


@dataclass(frozen=True)
class FeasiblePlans:
    """Pipelines that keep within bottlenecks with their windows: good ones, not the best.

    Args:
        prices: Infinite where none was found. (g)
        stops: Where the segment of a device that begins at s ends. (g, k, s)
        receivers: Who follows the device whose segment ends at e, or the control unit. (g, sender, e)
    """

    prices: Floats
    stops: Ints
    receivers: Ints

    def segments(self, cell: int) -> list[tuple[int, int, int]]:
        """Device, first block and one past the last of each segment within one of the bottlenecks."""
        num_devices = self.stops.shape[1]
        device, start = int(self.receivers[cell, num_devices, 0]), 0
        found = []
        while device < num_devices:
            stop = int(self.stops[cell, device, start])
            found.append((device, start, stop))
            device, start = int(self.receivers[cell, device, stop]), stop
        return found


def feasible_plans(
    costs: ClusterCosts, device: Floats, grid: Floats, loop_weight: float
) -> FeasiblePlans:
    """Finds a pipeline in order within each bottleneck.

    Of all that can follow a device and a block, only one goes on: the one with the least price and weighed loop.

    Args:
        costs: Of one row, priced in one price.
        device: Prices of segments. (k, s, e)
        grid: Bottlenecks. (g)
        loop_weight: Of a second of loop.
    """
    num_devices, num_blocks = costs.num_devices, costs.num_blocks
    allowed, entry = (one[0] for one in allowed_loops(costs, grid[None, :]))
    span = _spans(num_blocks)
    usable = costs.link_load[0] <= np.minimum(grid, _NO_LIMIT)[:, None, None, None]
    keys = np.where(usable, costs.link_price[0] + loop_weight * costs.link_loop[0], np.inf)
    option = np.argmin(keys, axis=-1)[..., None]
    usable = np.take_along_axis(usable, option, -1)[..., 0]
    price, loop = (
        np.take_along_axis(np.broadcast_to(table, keys.shape), option, -1)[..., 0]
        for table in (costs.link_price[0], costs.link_loop[0])
    )
    price = np.where(usable, price, np.inf)
    prices = np.full((len(grid), num_devices + 1, num_blocks + 1), np.inf)
    loops = np.zeros_like(prices)
    stops = np.zeros((len(grid), num_devices, num_blocks + 1), np.int64)
    receivers = np.full(prices.shape, num_devices)
    prices[:, :num_devices, num_blocks] = price[:, :num_devices, num_devices]
    loops[:, :num_devices, num_blocks] = loop[:, :num_devices, num_devices] + costs.head_seconds[0]
    for k in reversed(range(num_devices)):
        behind = loops[:, k, None, :] + costs.compute[0, k][span]
        total = prices[:, k, None, :] + device[k]
        within = np.minimum(
            allowed[:, k], np.where(costs.compute[0, k] <= grid[:, None], np.inf, -1)
        )
        total = np.where(behind <= within[:, span], total, np.inf)
        key = total + loop_weight * np.where(np.isfinite(total), behind, 0.0)
        stop = np.argmin(key, axis=2)[..., None]
        stops[:, k] = stop[..., 0]
        begun = np.take_along_axis(total, stop, 2)[..., 0]
        begun_loop = np.where(np.isfinite(begun), np.take_along_axis(behind, stop, 2)[..., 0], 0.0)
        before = [*range(k), num_devices]
        new_price = price[:, before, k, None] + begun[:, None, :]
        new_loop = loop[:, before, k, None] + begun_loop[:, None, :]
        better = new_price + loop_weight * new_loop < (
            prices[:, before] + loop_weight * loops[:, before]
        )
        receivers[:, before] = np.where(better, k, receivers[:, before])
        prices[:, before] = np.where(better, new_price, prices[:, before])
        loops[:, before] = np.where(better, new_loop, loops[:, before])
    whole = loops[:, num_devices, 0] + costs.entry_seconds[0]
    total = np.where(whole <= entry, prices[:, num_devices, 0], np.inf)
    return FeasiblePlans(total, stops, receivers)


def _least_links(costs: ClusterCosts, grid: Floats) -> Floats:
    """The shortest loop over a link within a bottleneck: (m, g, sender, receiver)."""
    load = costs.link_load[:, None]
    usable = np.isfinite(load) & (load <= grid[:, :, None, None, None])
    return np.asarray(np.where(usable, costs.link_loop[:, None], np.inf).min(axis=-1))


def _spans(num_blocks: int) -> npt.NDArray[np.intp]:
    blocks = np.arange(num_blocks + 1)
    return np.asarray(np.maximum(blocks[None, :] - blocks[:, None], 0))
