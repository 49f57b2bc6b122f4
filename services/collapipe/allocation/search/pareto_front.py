"""The Pareto front of a cluster: every plan of the cluster that a best decision for all clusters may need.

This is a label-setting algorithm for a shortest-path problem with several costs. A *label* is a partial plan:
the stages from some device to the head. The algorithm builds plans from the head backwards, because the
latency loop of a stage, docs/scheduling.md (4), is a sum over what comes after the stage. In each layer it
extends all labels with the same number of devices at once, as arrays. It drops a label

- if it is *dominated*: another label with the same devices and blocks is at least as good in every respect;
- if its lower bound is too high: every plan that extends it costs more than a known decision.

So the front is complete unless the caller limits the number of labels in a layer.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from collapipe.allocation.round_model.problem import ClusterPlan
from collapipe.allocation.search.arrays import Bools, Floats, Ints
from collapipe.allocation.search.labels import Labels, joined
from collapipe.allocation.search.segment_bounds import Bounds, lower_bound, within_limits
from collapipe.allocation.search.segment_costs import ClusterCosts

_CHUNK = 200_000
"""The largest number of extended labels that are in memory at once. They take about 100 MB."""
_LATE_WIDTH = 5
"""Labels of each row that a layer keeps when no time is left."""
_MOST_LEADERS = 12
"""The number of labels of a group that are compared with the whole group."""


@dataclass(frozen=True)
class PipelineChoice:
    """One plan of a front: its devices in pipeline order, and the codecs of all links.

    All numbers are indices in the cost tables. `starts` has the first block of each device, and then that of the
    edge server.
    """

    costs: ClusterCosts
    row: int
    devices: tuple[int, ...]
    starts: tuple[int, ...]
    codecs: tuple[int, ...]


@dataclass(frozen=True)
class ParetoFront:
    """Plans of one cluster. No plan dominates another plan of the same row.

    Args:
        costs: The tables that the plans refer to.
        plans: One label for each plan; `device` is the first device of the pipeline.
        layers: All labels by their number of devices; `choice` follows their parents.
        num_devices: Number of devices of each plan.
        complete: Whether the front has every plan that a best decision may need.
        known: The only plan of the front, if another search has found it.
    """

    costs: ClusterCosts
    plans: Labels
    layers: tuple[Labels, ...]
    num_devices: Ints
    complete: bool
    known: ClusterPlan | None = None

    def delay_costs(self) -> Floats:
        """Returns the delay cost of each plan, if the load of the edge server is as low as possible."""
        plans = self.plans
        return plans.delay_cost + self.costs.bottleneck_price[plans.row] * plans.bottleneck

    def head_loads(self) -> Floats:
        """Returns the load of the edge server by each plan, in seconds of its processor for a mini-batch."""
        return np.asarray(self.costs.head_load[self.plans.row, self.plans.last])

    def choice(self, index: int) -> PipelineChoice | ClusterPlan:
        """Follows the parents of one plan to find its devices, segments and codecs."""
        if self.known is not None:
            return self.known
        plans = self.plans
        devices, starts, codecs = [], [], [int(plans.codec[index])]
        label, depth = int(plans.parent[index]), int(self.num_devices[index])
        while depth > 0:
            labels = self.layers[depth]
            devices.append(int(labels.device[label]))
            starts.append(int(labels.start[label]))
            codecs.append(int(labels.codec[label]))
            label, depth = int(labels.parent[label]), depth - 1
        row, starts = (
            int(plans.row[index]),
            [*starts, self.costs.num_blocks - int(plans.last[index])],
        )
        return PipelineChoice(self.costs, row, tuple(devices), tuple(starts), tuple(codecs))


def pareto_front(
    costs: ClusterCosts,
    least_bottleneck: Floats,
    bounds: Bounds,
    error_limits: Floats,
    *,
    width: int,
    is_late: Callable[[], bool],
    most_other_load: float | None,
) -> ParetoFront:
    """Finds the Pareto front of a cluster.

    Args:
        least_bottleneck: As in `first_labels`.
        bounds: Lower bounds, and the cost of the best known decision.
        error_limits: The most that the errors of codecs may add to the convergence term. Shape: (rows,).
        width: Number of labels of each row that a layer keeps, those with the least bounds.
        is_late: Returns whether to end soon: the next layers then keep only `_LATE_WIDTH` labels.
        most_other_load: If only the fastest plan of each row matters, the largest load of the edge server by all
            other clusters, in seconds of its processor for a mini-batch. Otherwise `None`.
    """
    layer = within_limits(costs, first_labels(costs, least_bottleneck), bounds)
    layers: list[Labels] = []
    finished: list[Labels] = []
    depths: list[Ints] = []
    complete = True
    for depth in range(costs.num_devices + 1):
        if depth:
            linked = _with_next_device(costs, layer, bounds, error_limits)
            linked = linked.take(_undominated(costs, linked))
            parts = [
                part.take(_undominated(costs, part))
                for part in _with_segments(costs, linked, bounds)
            ]
            if not parts:
                break
            layer = joined(parts)
            if len(parts) > 1:
                layer = layer.take(_undominated(costs, layer))
            most = _LATE_WIDTH if is_late() else width
            if len(layer) > most:
                kept = _most_promising(costs, layer, bounds, most)
                complete &= len(kept) == len(layer)
                layer = layer.take(kept)
        layers.append(layer)
        whole = _with_control_unit(costs, layer, bounds, error_limits)
        finished.append(whole)
        depths.append(np.full(len(whole), depth))
        if most_other_load is not None:
            bounds = _with_known_plans(costs, whole, bounds, most_other_load)
    plans, depth_of = joined(finished), np.concatenate(depths)
    kept = _undominated(costs, plans, whole_plans=True)
    return ParetoFront(costs, plans.take(kept), tuple(layers), depth_of[kept], complete)


def front_of_known_plan(
    costs: ClusterCosts, known: ClusterPlan, row: int, delay_cost: float, bottleneck: float
) -> ParetoFront:
    """Returns a front with one plan that another search has found; `Labels` explains the numbers."""
    last = costs.num_blocks + 1 - known.stages[-1].start_unit
    number, cost = np.zeros(1, np.int64), np.zeros(1)
    plan = Labels(
        row=number + row,
        device=number,
        start=number,
        last=number + last,
        mask=number,
        loop=cost,
        delay_cost=cost + delay_cost,
        bottleneck=cost + bottleneck,
        summed_cost=cost,
        error=cost,
        parent=number,
        codec=number,
    )
    return ParetoFront(costs, plan, (), number, complete=False, known=known)


def first_labels(costs: ClusterCosts, least_bottleneck: Floats) -> Labels:
    """Returns the partial plans that consist of the edge server.

    `least_bottleneck` has the smallest bottleneck that the load of the edge server by all clusters allows: (m, d).
    """
    row, last = np.nonzero(costs.last.window > 0)
    seconds, none = costs.last.seconds[row, last], np.zeros_like(row)
    return Labels(
        row=row,
        device=np.full_like(row, costs.num_devices),
        start=costs.num_blocks - last,
        last=last,
        mask=none,
        loop=np.where(costs.starves[row], seconds, 0.0),
        delay_cost=costs.fixed_delay_cost[row] + costs.last.delay_cost[row, last],
        bottleneck=np.maximum(least_bottleneck[row, last], seconds),
        summed_cost=costs.fixed_summed_cost[row] + costs.last.summed_cost[row, last],
        error=np.zeros(len(row)),
        parent=none,
        codec=none,
    )


def _with_known_plans(
    costs: ClusterCosts, whole: Labels, bounds: Bounds, most_other_load: float
) -> Bounds:
    """Lowers the limit of the delay in each row to the fastest of these plans, at the largest load."""
    row = whole.row
    load = costs.edge_bottleneck(most_other_load)[row, whole.last]
    bottleneck = np.maximum(whole.bottleneck, load)
    best = np.full(costs.num_rows, np.inf)
    np.minimum.at(best, row, whole.delay_cost + costs.bottleneck_price[row] * bottleneck)
    if costs.one_cluster:
        best = np.full_like(best, np.min(best))
    weighted = tuple(
        replace(bound, limit=np.minimum(bound.limit, best * (1 + 1e-12)))
        for bound in bounds.weighted
    )
    return replace(bounds, weighted=weighted)


def _with_next_device(
    costs: ClusterCosts, labels: Labels, bounds: Bounds, error_limits: Floats
) -> Labels:
    """Extends labels by the link from one more device, whose segment is still to be chosen."""
    num_devices = costs.num_devices
    open_labels = np.flatnonzero(labels.start > 0)
    row, receiver = labels.row[open_labels], labels.device[open_labels]
    usable = np.isfinite(costs.link_load[row, :num_devices, receiver])
    usable &= ((labels.mask[open_labels, None] >> np.arange(num_devices)) & 1 == 0)[:, :, None]
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
    extended = Labels(
        row=row,
        device=sender,
        start=labels.start[parent],
        last=labels.last[parent],
        mask=labels.mask[parent]
        | np.where(sender < costs.num_devices, np.left_shift(1, sender), 0),
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
        yield within_limits(costs, extended, bounds)


def _with_control_unit(
    costs: ClusterCosts, labels: Labels, bounds: Bounds, error_limits: Floats
) -> Labels:
    """Completes labels: the control unit takes all blocks that are left."""
    num_devices = costs.num_devices
    row, start = labels.row, labels.start
    usable = np.isfinite(costs.link_load[row, num_devices, labels.device])
    usable &= (costs.first.window[row, start] > 0)[:, None]
    parent, codec = np.nonzero(usable)
    sender = np.full(len(parent), num_devices)
    whole = _with_link(costs, labels, parent, sender, codec, bounds, error_limits)
    row, start = whole.row, whole.start
    seconds, window = costs.first.seconds[row, start], costs.first.window[row, start]
    starving = np.where(window < costs.max_in_flight[row], (whole.loop + seconds) / window, 0.0)
    whole = replace(
        whole,
        delay_cost=whole.delay_cost + costs.first.delay_cost[row, start],
        summed_cost=whole.summed_cost + costs.first.summed_cost[row, start],
        bottleneck=np.maximum.reduce([whole.bottleneck, seconds, starving]),
        # The loop no longer matters, so it must not distinguish whole plans.
        loop=np.zeros(len(whole)),
    )
    return whole.take(np.flatnonzero(_costs_within_limits(costs, whole, bounds)))


def _costs_within_limits(costs: ClusterCosts, labels: Labels, bounds: Bounds) -> Bools:
    """Returns whether the weighted costs of the labels so far are within all limits."""
    within = np.ones(len(labels), bool)
    bottleneck_cost = costs.bottleneck_price[labels.row] * labels.bottleneck
    for bound in bounds.weighted:
        weighted = bound.time_weight * (labels.delay_cost + bottleneck_cost) + labels.summed_cost
        within &= weighted <= bound.limit[labels.row]
    return within


def _most_promising(
    costs: ClusterCosts, labels: Labels, bounds: Bounds, width: int
) -> npt.NDArray[np.intp]:
    """Returns the indices of the labels of each row that may lead to the best decisions.

    What a label exceeds a limit by is a lower bound on what decisions with it exceed the best known one by.
    """
    excess = np.full(len(labels), -np.inf)
    for bound in bounds.weighted:
        least = lower_bound(costs, labels, bounds, bound)
        limit = bound.limit[labels.row]
        if not np.all(np.isfinite(limit)):  # No decision is known yet.
            excess = least
            break
        excess = np.maximum(excess, least - limit)
    order = np.lexsort((excess, labels.row))
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
    # In several clusters, the blocks on the edge server also count for their use of it.
    last = np.zeros(len(labels)) if costs.one_cluster else labels.last.astype(float)
    dims = np.stack(
        [labels.delay_cost, with_bottleneck, labels.summed_cost, labels.loop, labels.error, last]
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
