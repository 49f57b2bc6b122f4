"""The front of a cluster: every plan that some best decision of all clusters may need.

A plan is built from the head backwards, for the latency loop R_k of design (4) is a sum over what comes after. A partial plan is
a label; all labels with equally many devices are extended at once, in arrays. A label is dropped when another with
the same devices and blocks is nowhere worse, or when its bound exceeds what a known decision costs.
"""

from collections.abc import Iterator
from dataclasses import dataclass, fields

import numpy as np
import numpy.typing as npt

from collapipe.allocation.search.link_tables import Floats
from collapipe.allocation.search.segment_bounds import Bounds
from collapipe.allocation.search.segment_costs import ClusterCosts, Ints

Mask = npt.NDArray[np.bool_]
CHUNK = 2_000_000
"""Extended labels made at once: keeps memory below some hundred MB."""


@dataclass(frozen=True)
class Labels:
    """Partial plans: those of the devices from `device` to the head, which run blocks `start` and on.

    Args:
        row: Row of M.
        device: The first one of the partial plan; K is the edge server.
        start: Its first block.
        mask: Devices that it runs, as bits; 0 where the order is given.
        loop: Latency loop R in seconds; 0 where windows never starve.
        price: Priced time.
        stall: Bottleneck in seconds.
        cost: Energy and error.
        error: Convergence term of codecs.
        parent: Label of the layer before that it extends.
        option: Link option after `device`.
    """

    row: Ints
    device: Ints
    start: Ints
    mask: Ints
    loop: Floats
    price: Floats
    stall: Floats
    cost: Floats
    error: Floats
    parent: Ints
    option: Ints

    def take(self, index: npt.NDArray[np.generic]) -> "Labels":
        """Some of them."""
        return Labels(*(getattr(self, field.name)[index] for field in fields(self)))

    def __len__(self) -> int:
        return len(self.row)


def joined(parts: list[Labels]) -> Labels:
    """All labels of several sets."""
    if len(parts) == 1:
        return parts[0]
    return Labels(
        *(np.concatenate([getattr(part, field.name) for part in parts]) for field in fields(Labels))
    )


@dataclass(frozen=True)
class PipelineChoice:
    """One plan of a front: devices in pipeline order, where each one's blocks begin, and link options."""

    row: int
    devices: tuple[int, ...]
    starts: tuple[int, ...]
    options: tuple[int, ...]


@dataclass(frozen=True)
class Front:
    """Plans of one cluster, none of which beats another of its M in everything.

    Args:
        costs: What they are made of.
        plans: One a label; `device` is the pipeline's first.
        layers: What led to them, for `choice`.
        layer: Number of devices of each plan.
        complete: Whether no plan was left out that a best decision may need.
    """

    costs: ClusterCosts
    plans: Labels
    layers: tuple[Labels, ...]
    layer: Ints
    complete: bool

    def choice(self, index: int) -> PipelineChoice:
        """Spells out one plan."""
        plans = self.plans
        devices, starts, options = [], [], [int(plans.option[index])]
        label, depth = int(plans.parent[index]), int(self.layer[index])
        while depth > 0:
            labels = self.layers[depth]
            devices.append(int(labels.device[label]))
            starts.append(int(labels.start[label]))
            options.append(int(labels.option[label]))
            label, depth = int(labels.parent[label]), depth - 1
        return PipelineChoice(int(plans.row[index]), tuple(devices), tuple(starts), tuple(options))


def front(
    costs: ClusterCosts,
    floor: Floats,
    bounds: Bounds,
    term_limits: Floats,
    *,
    width: int | None = None,
) -> Front:
    """Finds a cluster's front.

    Args:
        costs: The cluster.
        floor: Least bottleneck. (m)
        bounds: With limits; in one order when they were made for one.
        term_limits: The most that codecs' errors may add to the convergence term. (m)
        width: Keep so many labels of each M in each layer, those with the least bounds; `None` for all.
    """
    num_devices, num_blocks = costs.num_devices, costs.num_blocks
    rows = np.arange(len(costs.options))
    zeros, none = np.zeros(len(rows)), np.zeros(len(rows), np.int64)
    layer = Labels(
        row=rows,
        device=np.full(len(rows), num_devices),
        start=np.full(len(rows), num_blocks),
        mask=none,
        loop=np.where(costs.starves, costs.head_seconds, 0.0),
        price=costs.end_price.copy(),
        stall=np.maximum.reduce([floor, costs.entry_seconds, costs.head_seconds]),
        cost=costs.end_cost.copy(),
        error=zeros,
        parent=none,
        option=none,
    )
    layers, ends, depths, complete = [layer], [], [], True
    for depth in range(1, num_devices + 1):
        halves = _linked(costs, layer, bounds, term_limits)
        if not len(halves):
            break
        halves = halves.take(_undominated(costs, halves, halves.start))
        parts = [
            part.take(_undominated(costs, part, part.start))
            for part in _segments(costs, halves, bounds)
        ]
        layer = joined(parts)
        if len(parts) > 1:
            layer = layer.take(_undominated(costs, layer, layer.start))
        if width is not None and len(layer) > width:
            few = _most_promising(costs, layer, bounds, width)
            complete &= len(few) == len(layer)
            layer = layer.take(few)
        layers.append(layer)
        finished = layer.start == 0
        if np.any(finished):
            end = _entered(costs, layer, np.flatnonzero(finished), bounds, term_limits)
            ends.append(end)
            depths.append(np.full(len(end), depth))
    if not ends:
        return Front(costs, layer.take(none[:0]), tuple(layers), none[:0], complete)
    plans, depth_of = joined(ends), np.concatenate(depths)
    kept = _undominated(costs, plans, np.zeros_like(plans.start), by_row=True)
    return Front(costs, plans.take(kept), tuple(layers), depth_of[kept], complete)


def _linked(costs: ClusterCosts, labels: Labels, bounds: Bounds, term_limits: Floats) -> Labels:
    """Labels extended by the link from one more device; its blocks are still to be chosen."""
    num_devices = costs.num_devices
    open_ones = np.flatnonzero(labels.start > 0)
    row, receiver = labels.row[open_ones], labels.device[open_ones]
    usable = np.isfinite(costs.link_load[row, :num_devices, receiver])
    senders = np.arange(num_devices)
    if bounds.first_cell is None:
        usable &= (senders < receiver[:, None])[:, :, None]
    else:
        usable &= ((labels.mask[open_ones, None] >> senders) & 1 == 0)[:, :, None]
    which, sender, option = np.nonzero(usable)
    parent = open_ones[which]
    return _over_link(costs, labels, parent, sender, option, bounds, term_limits)


def _over_link(
    costs: ClusterCosts,
    labels: Labels,
    parent: Ints,
    sender: Ints,
    option: Ints,
    bounds: Bounds,
    term_limits: Floats,
) -> Labels:
    row = labels.row[parent]
    link = (row, sender, labels.device[parent], option)
    bit = 0 if bounds.first_cell is None else np.left_shift(1, sender)
    extended = Labels(
        row=row,
        device=sender,
        start=labels.start[parent],
        mask=labels.mask[parent] | bit,
        loop=labels.loop[parent] + np.where(costs.starves[row], costs.link_loop[link], 0.0),
        price=labels.price[parent] + costs.link_price[link],
        stall=np.maximum(labels.stall[parent], costs.link_load[link]),
        cost=labels.cost[parent] + costs.link_cost[link],
        error=labels.error[parent] + costs.link_error[link],
        parent=parent,
        option=option,
    )
    within = extended.error <= term_limits[row]
    for bound in bounds.weighed:
        weight = bound.time_weight
        least = weight * (extended.price + costs.stall_price[row] * extended.stall) + extended.cost
        within &= least <= bound.limit
    return extended if np.all(within) else extended.take(np.flatnonzero(within))


def _segments(costs: ClusterCosts, halves: Labels, bounds: Bounds) -> Iterator[Labels]:
    """Labels whose first device is given every number of blocks that it may run."""
    num_blocks = costs.num_blocks
    step = max(1, CHUNK // num_blocks)
    blocks = np.arange(1, num_blocks + 1)
    for first in range(0, len(halves), step):
        part = halves.take(np.arange(first, min(first + step, len(halves))))
        fits = (costs.window[part.row, part.device, 1:] > 0) & (blocks <= part.start[:, None])
        which, count = np.nonzero(fits)
        count += 1
        chosen = part.take(which)
        row, device = chosen.row, chosen.device
        start = chosen.start - count
        compute = costs.compute[row, device, count]
        window = costs.window[row, device, count]
        loop = chosen.loop + np.where(costs.starves[row], compute, 0.0)
        starving = np.where(window < costs.flight[row], loop / window, 0.0)
        extended = Labels(
            row=row,
            device=device,
            start=start,
            mask=chosen.mask,
            loop=loop,
            price=chosen.price
            + costs.device_price[row, device, count]
            + costs.move_price[row, device, start, chosen.start],
            stall=np.maximum.reduce([chosen.stall, compute, starving]),
            cost=chosen.cost + costs.device_cost[row, device, count],
            error=chosen.error,
            parent=chosen.parent,
            option=chosen.option,
        )
        yield extended.take(np.flatnonzero(_within(costs, extended, bounds)))


def _entered(
    costs: ClusterCosts, labels: Labels, done: Ints, bounds: Bounds, term_limits: Floats
) -> Labels:
    """Whole plans: labels without open blocks, extended by the control unit's link."""
    num_devices = costs.num_devices
    usable = np.isfinite(costs.link_load[labels.row[done], num_devices, labels.device[done]])
    which, option = np.nonzero(usable)
    parent = done[which]
    sender = np.full(len(parent), num_devices)
    whole = _over_link(costs, labels, parent, sender, option, bounds, term_limits)
    row = whole.row
    loop = whole.loop + costs.entry_seconds[row]
    starving = np.where(
        costs.entry_window[row] < costs.flight[row], loop / costs.entry_window[row], 0.0
    )
    whole = Labels(
        **{
            **{field.name: getattr(whole, field.name) for field in fields(Labels)},
            "stall": np.maximum(whole.stall, starving),
            "loop": np.zeros(len(whole)),  # no one waits for it any more
        }
    )
    keep = np.ones(len(whole), bool)
    for bound in bounds.weighed:
        weight = bound.time_weight
        total = weight * (whole.price + costs.stall_price[row] * whole.stall) + whole.cost
        keep &= total <= bound.limit
    return whole.take(np.flatnonzero(keep))


def _least_totals(costs: ClusterCosts, labels: Labels, bounds: Bounds) -> Iterator[Floats]:
    """For each weighing, the least weighed total of whatever a label leads to."""
    row, device, start = labels.row, labels.device, labels.start
    cell = np.sum(bounds.grid.ends[row] < labels.stall[:, None], axis=1)
    first = cell
    if bounds.standing is not None:
        short = bounds.standing[row, :, device, start] < labels.loop[:, None]
        first = np.maximum(first, np.sum(short, axis=1))
    if bounds.first_cell is not None:
        first = np.maximum(first, bounds.first_cell[row, labels.mask, start])
    here = np.minimum(cell, bounds.grid.ends.shape[1] - 1)
    for bound in bounds.weighed:
        weight = bound.time_weight
        ahead = bound.beyond[row, np.maximum(first, cell + 1), device, start]
        inside = (
            weight * costs.stall_price[row] * labels.stall + bound.within[row, here, device, start]
        )
        inside = np.where(first > cell, np.inf, inside)
        yield weight * labels.price + labels.cost + np.minimum(inside, ahead)


def _within(costs: ClusterCosts, labels: Labels, bounds: Bounds) -> Mask:
    keep = np.ones(len(labels), bool)
    for bound, least in zip(bounds.weighed, _least_totals(costs, labels, bounds), strict=True):
        keep &= np.isfinite(least) & (least <= bound.limit)
    return keep


def _most_promising(
    costs: ClusterCosts, labels: Labels, bounds: Bounds, width: int
) -> npt.NDArray[np.intp]:
    """So many labels of each M, those with the least bounds in the first weighing."""
    least = next(iter(_least_totals(costs, labels, bounds)))
    order = np.lexsort((least, labels.row))
    row = labels.row[order]
    return order[np.arange(len(row)) - np.searchsorted(row, row) < width]


def _undominated(
    costs: ClusterCosts, labels: Labels, start: Ints, *, by_row: bool = False
) -> npt.NDArray[np.intp]:
    """Indices of labels that no other of the same row, device, blocks and mask beats; nearly all that are beaten go.

    Whatever is still to come, a price that is no higher, without the stall and with it, stays no higher: the stall
    itself need not be compared. Labels of a group are sorted by their total; whatever one of the first ones beats is
    left out.
    """
    if not len(labels):
        return np.zeros(0, np.intp)
    time = labels.price + costs.stall_price[labels.row] * labels.stall
    key = labels.row
    if not by_row:
        size = costs.num_blocks + 1
        key = (
            (labels.mask * len(costs.options) + labels.row) * (costs.num_devices + 1)
            + labels.device
        ) * size + start
    order = np.lexsort((time + labels.cost, key))
    dims = np.stack([labels.price, time, labels.cost, labels.loop, labels.error])
    dims, key = dims[:, order], key[order]
    dims = dims[np.any(dims != dims[:, :1], axis=1)]
    leader = 0
    while True:
        first = np.flatnonzero(np.diff(key, prepend=-1))
        sizes = np.diff(np.append(first, len(key)))
        place = np.arange(len(key)) - np.repeat(first, sizes)
        behind = np.flatnonzero(place > leader)
        if not len(behind) or (leader >= 12 and not by_row):
            return order
        leads = behind - place[behind] + leader
        beaten = behind[np.all(dims[:, leads] <= dims[:, behind], axis=0)]
        if len(beaten):
            keep = np.ones(len(key), bool)
            keep[beaten] = False
            order, key, dims = order[keep], key[keep], dims[:, keep]
        leader += 1
