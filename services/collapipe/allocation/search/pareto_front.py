"""The Pareto front of a cluster: every plan of the cluster that a best decision for all clusters may need.

This is a label-setting algorithm for a shortest-path problem with several costs. A *label* is a partial plan:
the stages from some device to the head. The algorithm builds plans from the head backwards, because the
latency loop of a stage, docs/scheduling.md (4), is a sum over what comes after the stage. In each layer it
extends all labels with the same number of devices at once, as arrays. It drops a label

- if it is *dominated*: another label with the same devices and blocks is at least as good in every respect;
- if its lower bound is too high: every plan that extends it costs more than a known decision.

So the front is complete unless the caller limits the number of labels in a layer.
"""

from collections.abc import Iterator
from dataclasses import dataclass, fields, replace

import numpy as np
import numpy.typing as npt

from collapipe.allocation.search.arrays import Bools, Floats, Ints
from collapipe.allocation.search.segment_bounds import Bounds
from collapipe.allocation.search.segment_costs import ClusterCosts

_CHUNK = 2_000_000
"""The largest number of extended labels that are in memory at once. They take a few hundred MB."""
_MOST_LEADERS = 12
"""The number of labels of a group that are compared with the whole group."""


@dataclass(frozen=True)
class Labels:
    """Partial plans, one in each position of the arrays.

    A label runs the blocks from `start` to the last one on the devices from `device` to the head.

    Args:
        row: Row of the tables in `ClusterCosts`. Each row stands for one number of micro-batches.
        device: First device of the partial plan; the number of devices stands for the edge server.
        mask: Bits of the devices in use. Always 0 if the order of the devices is fixed.
        loop: Latency loop of the first stage, in seconds; 0 if no in-flight window can be too small for it.
        delay_cost: Without the cost of the bottleneck.
        bottleneck: In seconds.
        summed_cost: Energy and convergence.
        error: What codecs add to the convergence term.
        parent: Index of the label that this label extends, in the layer before.
        codec: Index, in the link tables, of the codec on the link after `device`.
    """

    row: Ints
    device: Ints
    start: Ints
    mask: Ints
    loop: Floats
    delay_cost: Floats
    bottleneck: Floats
    summed_cost: Floats
    error: Floats
    parent: Ints
    codec: Ints

    def take(self, index: npt.NDArray[np.generic]) -> "Labels":
        return Labels(*(getattr(self, field.name)[index] for field in fields(self)))

    def __len__(self) -> int:
        return len(self.row)


def _joined(parts: list[Labels]) -> Labels:
    if len(parts) == 1:
        return parts[0]
    return Labels(
        *(np.concatenate([getattr(part, field.name) for part in parts]) for field in fields(Labels))
    )


@dataclass(frozen=True)
class PipelineChoice:
    """One plan of a front: its devices in pipeline order, their first blocks, and the codecs of all links.

    All numbers are indices in the cost tables.
    """

    costs: ClusterCosts
    row: int
    devices: tuple[int, ...]
    starts: tuple[int, ...]
    codecs: tuple[int, ...]

    @property
    def order(self) -> tuple[int, ...]:
        """The devices by their index in the order of registration."""
        return tuple(self.costs.devices[self.row, list(self.devices)].tolist())


@dataclass(frozen=True)
class ParetoFront:
    """Plans of one cluster. No plan dominates another plan of the same row.

    Args:
        costs: The tables that the plans refer to.
        plans: One label for each plan; `device` is the first device of the pipeline.
        layers: All labels by their number of devices; `choice` follows their parents.
        num_devices: Number of devices of each plan.
        complete: Whether the front has every plan that a best decision may need.
    """

    costs: ClusterCosts
    plans: Labels
    layers: tuple[Labels, ...]
    num_devices: Ints
    complete: bool

    def delay_costs(self) -> Floats:
        """Returns the delay cost of each plan, if the load of the edge server is as low as possible."""
        plans = self.plans
        return plans.delay_cost + self.costs.bottleneck_price[plans.row] * plans.bottleneck

    def choice(self, index: int) -> PipelineChoice:
        """Follows the parents of one plan to find its devices, segments and codecs."""
        plans = self.plans
        devices, starts, codecs = [], [], [int(plans.codec[index])]
        label, depth = int(plans.parent[index]), int(self.num_devices[index])
        while depth > 0:
            labels = self.layers[depth]
            devices.append(int(labels.device[label]))
            starts.append(int(labels.start[label]))
            codecs.append(int(labels.codec[label]))
            label, depth = int(labels.parent[label]), depth - 1
        row = int(plans.row[index])
        return PipelineChoice(self.costs, row, tuple(devices), tuple(starts), tuple(codecs))


def pareto_front(
    costs: ClusterCosts,
    least_bottleneck: Floats,
    bounds: Bounds,
    error_limits: Floats,
    *,
    width: int | None = None,
) -> ParetoFront:
    """Finds the Pareto front of a cluster.

    Args:
        least_bottleneck: The smallest bottleneck that any plan of a row can have, in seconds. Shape: (rows,).
        bounds: Lower bounds, and the cost of the best known decision. They also say whether the order of the
            devices is fixed.
        error_limits: The most that the errors of codecs may add to the convergence term. Shape: (rows,).
        width: Number of labels of each row that a layer keeps, those with the least bounds; `None` keeps all.
    """
    num_devices, num_blocks = costs.num_devices, costs.num_blocks
    rows = np.arange(costs.num_rows)
    zeros, none = np.zeros(len(rows)), np.zeros(len(rows), np.int64)
    layer = Labels(
        row=rows,
        device=np.full(len(rows), num_devices),
        start=np.full(len(rows), num_blocks),
        mask=none,
        loop=np.where(costs.starves, costs.head_seconds, 0.0),
        delay_cost=costs.fixed_delay_cost.copy(),
        bottleneck=np.maximum.reduce(
            [least_bottleneck, costs.embedding_seconds, costs.head_seconds]
        ),
        summed_cost=costs.fixed_summed_cost.copy(),
        error=zeros,
        parent=none,
        codec=none,
    )
    layers, finished, depths, complete = [layer], [], [], True
    for depth in range(1, num_devices + 1):
        linked = _with_next_device(costs, layer, bounds, error_limits)
        if not len(linked):
            break
        linked = linked.take(_undominated(costs, linked))
        parts = [
            part.take(_undominated(costs, part)) for part in _with_segments(costs, linked, bounds)
        ]
        layer = _joined(parts)
        if len(parts) > 1:
            layer = layer.take(_undominated(costs, layer))
        if width is not None and len(layer) > width:
            kept = _most_promising(costs, layer, bounds, width)
            complete &= len(kept) == len(layer)
            layer = layer.take(kept)
        layers.append(layer)
        if np.any(layer.start == 0):
            whole = _with_control_unit(costs, layer, bounds, error_limits)
            finished.append(whole)
            depths.append(np.full(len(whole), depth))
    if not finished:
        return ParetoFront(costs, layer.take(none[:0]), tuple(layers), none[:0], complete)
    plans, depth_of = _joined(finished), np.concatenate(depths)
    kept = _undominated(costs, plans, whole_plans=True)
    return ParetoFront(costs, plans.take(kept), tuple(layers), depth_of[kept], complete)


def _with_next_device(
    costs: ClusterCosts, labels: Labels, bounds: Bounds, error_limits: Floats
) -> Labels:
    """Extends labels by the link from one more device, whose segment is still to be chosen."""
    num_devices = costs.num_devices
    open_labels = np.flatnonzero(labels.start > 0)
    row, receiver = labels.row[open_labels], labels.device[open_labels]
    usable = np.isfinite(costs.link_load[row, :num_devices, receiver])
    senders = np.arange(num_devices)
    if bounds.first_cell is None:
        usable &= (senders < receiver[:, None])[:, :, None]
    else:
        usable &= ((labels.mask[open_labels, None] >> senders) & 1 == 0)[:, :, None]
    which, sender, codec = np.nonzero(usable)
    return _with_link(costs, labels, open_labels[which], sender, codec, bounds, error_limits)


def _with_link(
    costs: ClusterCosts,
    labels: Labels,
    parent: Ints,
    sender: Ints,
    codec: Ints,
    bounds: Bounds,
    error_limits: Floats,
) -> Labels:
    """Extends the parents by links from the senders, and drops labels beyond a limit."""
    row = labels.row[parent]
    link = (row, sender, labels.device[parent], codec)
    bit = 0 if bounds.first_cell is None else np.left_shift(1, sender)
    extended = Labels(
        row=row,
        device=sender,
        start=labels.start[parent],
        mask=labels.mask[parent] | bit,
        loop=labels.loop[parent] + np.where(costs.starves[row], costs.link_loop[link], 0.0),
        delay_cost=labels.delay_cost[parent] + costs.link_delay_cost[link],
        bottleneck=np.maximum(labels.bottleneck[parent], costs.link_load[link]),
        summed_cost=labels.summed_cost[parent] + costs.link_summed_cost[link],
        error=labels.error[parent] + costs.link_error[link],
        parent=parent,
        codec=codec,
    )
    within = (extended.error <= error_limits[row]) & _costs_within_limits(costs, extended, bounds)
    return extended if np.all(within) else extended.take(np.flatnonzero(within))


def _with_segments(costs: ClusterCosts, linked: Labels, bounds: Bounds) -> Iterator[Labels]:
    """Gives the first device of each label every number of blocks that it can run."""
    num_blocks = costs.num_blocks
    step = max(1, _CHUNK // num_blocks)
    blocks = np.arange(1, num_blocks + 1)
    for first in range(0, len(linked), step):
        part = linked.take(np.arange(first, min(first + step, len(linked))))
        fits = (costs.window[part.row, part.device, 1:] > 0) & (blocks <= part.start[:, None])
        which, count = np.nonzero(fits)
        count += 1
        chosen = part.take(which)
        row, device = chosen.row, chosen.device
        start = chosen.start - count
        compute = costs.compute[row, device, count]
        window = costs.window[row, device, count]
        loop = chosen.loop + np.where(costs.starves[row], compute, 0.0)
        starving = np.where(window < costs.max_in_flight[row], loop / window, 0.0)
        extended = replace(
            chosen,
            start=start,
            loop=loop,
            delay_cost=chosen.delay_cost
            + costs.segment_delay_cost[row, device, count]
            + costs.move_delay_cost[row, device, start, chosen.start],
            bottleneck=np.maximum.reduce([chosen.bottleneck, compute, starving]),
            summed_cost=chosen.summed_cost + costs.segment_summed_cost[row, device, count],
        )
        yield extended.take(np.flatnonzero(_bounds_within_limits(costs, extended, bounds)))


def _with_control_unit(
    costs: ClusterCosts, labels: Labels, bounds: Bounds, error_limits: Floats
) -> Labels:
    """Completes the labels that have all blocks: adds the link from the control unit."""
    num_devices = costs.num_devices
    full = np.flatnonzero(labels.start == 0)
    usable = np.isfinite(costs.link_load[labels.row[full], num_devices, labels.device[full]])
    which, codec = np.nonzero(usable)
    parent = full[which]
    sender = np.full(len(parent), num_devices)
    whole = _with_link(costs, labels, parent, sender, codec, bounds, error_limits)
    row = whole.row
    loop = whole.loop + costs.embedding_seconds[row]
    window = costs.embedding_window[row]
    starving = np.where(window < costs.max_in_flight[row], loop / window, 0.0)
    # The loop no longer matters, so it must not distinguish whole plans.
    whole = replace(
        whole, bottleneck=np.maximum(whole.bottleneck, starving), loop=np.zeros(len(whole))
    )
    return whole.take(np.flatnonzero(_costs_within_limits(costs, whole, bounds)))


def _costs_within_limits(costs: ClusterCosts, labels: Labels, bounds: Bounds) -> Bools:
    """Returns whether the weighted costs of the labels so far are within all limits."""
    within = np.ones(len(labels), bool)
    bottleneck_cost = costs.bottleneck_price[labels.row] * labels.bottleneck
    for bound in bounds.weighted:
        weighted = bound.time_weight * (labels.delay_cost + bottleneck_cost) + labels.summed_cost
        within &= weighted <= bound.limit
    return within


def _bounds_within_limits(costs: ClusterCosts, labels: Labels, bounds: Bounds) -> Bools:
    """Returns whether some plan that extends a label may be within all limits."""
    within = np.ones(len(labels), bool)
    for bound, least in zip(bounds.weighted, _lower_bounds(costs, labels, bounds), strict=True):
        within &= np.isfinite(least) & (least <= bound.limit)
    return within


def _lower_bounds(costs: ClusterCosts, labels: Labels, bounds: Bounds) -> Iterator[Floats]:
    """Yields for each weight a lower bound on the weighted cost of every plan that extends a label.

    A grid divides all possible bottlenecks into cells. If a plan extends a label, its bottleneck is in the cell
    of the label or in a later cell.
    """
    row, device, start = labels.row, labels.device, labels.start
    cell = np.sum(bounds.grid.ends[row] < labels.bottleneck[:, None], axis=1)
    first = cell
    if bounds.longest_loop is not None:
        too_long = bounds.longest_loop[row, :, device, start] < labels.loop[:, None]
        first = np.maximum(first, np.sum(too_long, axis=1))
    if bounds.first_cell is not None:
        first = np.maximum(first, bounds.first_cell[row, labels.mask, start])
    own_cell = np.minimum(cell, bounds.grid.ends.shape[1] - 1)
    for bound in bounds.weighted:
        weight = bound.time_weight
        later = bound.from_cell[row, np.maximum(first, cell + 1), device, start]
        same = (
            weight * costs.bottleneck_price[row] * labels.bottleneck
            + bound.prefix_cost[row, own_cell, device, start]
        )
        same = np.where(first > cell, np.inf, same)
        yield weight * labels.delay_cost + labels.summed_cost + np.minimum(same, later)


def _most_promising(
    costs: ClusterCosts, labels: Labels, bounds: Bounds, width: int
) -> npt.NDArray[np.intp]:
    """Returns the indices of the labels of each row that have the least bounds for the first weight."""
    least = next(iter(_lower_bounds(costs, labels, bounds)))
    order = np.lexsort((least, labels.row))
    row = labels.row[order]
    return order[np.arange(len(row)) - np.searchsorted(row, row) < width]


def _undominated(
    costs: ClusterCosts, labels: Labels, *, whole_plans: bool = False
) -> npt.NDArray[np.intp]:
    """Returns the indices of labels that no other label of the same group dominates.

    A group has the same row, device, start and mask; whole plans are grouped by row. The bottleneck itself is
    not compared. If one label has the lower delay cost both without the bottleneck and with it, no extension
    of the two labels can reverse that.

    Only the `_MOST_LEADERS` cheapest labels of a group are compared with all others. So a few dominated
    labels of large groups remain. They cost time, but the result stays correct.
    """
    if not len(labels):
        return np.zeros(0, np.intp)
    with_bottleneck = labels.delay_cost + costs.bottleneck_price[labels.row] * labels.bottleneck
    key = labels.row
    if not whole_plans:
        num_starts = costs.num_blocks + 1
        key = (
            (labels.mask * costs.num_rows + labels.row) * (costs.num_devices + 1) + labels.device
        ) * num_starts + labels.start
    order = np.lexsort((with_bottleneck + labels.summed_cost, key))
    dims = np.stack(
        [labels.delay_cost, with_bottleneck, labels.summed_cost, labels.loop, labels.error]
    )
    dims, key = dims[:, order], key[order]
    dims = dims[np.any(dims != dims[:, :1], axis=1)]
    leader = 0
    while True:
        first = np.flatnonzero(np.diff(key, prepend=-1))
        sizes = np.diff(np.append(first, len(key)))
        place = np.arange(len(key)) - np.repeat(first, sizes)
        behind = np.flatnonzero(place > leader)
        if not len(behind) or (leader >= _MOST_LEADERS and not whole_plans):
            return order
        leaders = behind - place[behind] + leader
        dominated = behind[np.all(dims[:, leaders] <= dims[:, behind], axis=0)]
        if len(dominated):
            keep = np.ones(len(key), bool)
            keep[dominated] = False
            order, key, dims = order[keep], key[keep], dims[:, keep]
        leader += 1
