"""Partial plans of one cluster, and how the search extends them.

A *label* is a partial plan: the stages from some device to the head. The array of labels has the data type `LABEL`:

- row: row of the tables in `ClusterCosts`;
- device: first device of the partial plan; the number of devices stands for the edge server;
- start: first block that the partial plan runs;
- last: number of blocks on the edge server;
- mask: bits of the devices in use;
- loop: latency loop of the first stage, in seconds; 0 if no in-flight window can be too small for it;
- delay_cost: without the cost of the bottleneck;
- bottleneck: in seconds;
- summed_cost: energy and convergence;
- error: what codecs add to the convergence term;
- parent: index of the label that this label extends, in the layer before; -1 while a label is being dropped;
- codec: index, in the link tables, of the codec on the link after `device`;
- option: index, in the tables of segments, of the option whether `device` recomputes;
- excess: the largest difference between a lower bound and its limit; without limits, the lower bound for the first
  weight.
"""

import functools
import logging
import math
import time

import numpy as np

from collapipe.allocation.search.arrays import Floats, Ints, Record, Records, compiled
from collapipe.allocation.search.search_tables import SearchTables, empty_tables
from collapipe.allocation.search.segment_bounds import Bounds, cheapest_rest, one_cell
from collapipe.allocation.search.segment_costs import ClusterCosts

LABEL = np.dtype(
    [
        (name, np.int64)
        for name in ("row", "device", "start", "last", "mask", "parent", "codec", "option")
    ]
    + [
        (name, np.float64)
        for name in ("loop", "delay_cost", "bottleneck", "summed_cost", "error", "excess")
    ]
)

_log = logging.getLogger(__name__)


@functools.cache
def compile_search() -> None:
    """Compiles all functions of the search, or loads them from disk. The first call on a machine takes long."""
    _log.info("the search is being compiled, or loaded if it was compiled before")
    started = time.monotonic()
    tables = empty_tables()
    bounds = cheapest_rest(tables, one_cell(tables), np.ones(1))
    labels = np.zeros(1, LABEL)
    least_costs(tables, bounds, labels)
    linked = with_links(tables, bounds, np.zeros(1), labels, False)
    with_segments(tables, bounds, undominated(tables, linked, np.zeros(len(linked), np.int64)))
    _log.info("the search is ready after %.1f s", time.monotonic() - started)


def first_labels(costs: ClusterCosts, least_bottleneck: Floats) -> Records:
    """Returns the partial plans that consist of the edge server.

    `least_bottleneck` has the smallest bottleneck that the load of the edge server by all clusters allows: (m, d).
    """
    row, last = np.nonzero(costs.last.window > 0)
    seconds = costs.last.seconds[row, last]
    labels = np.zeros(len(row), LABEL)
    labels["row"], labels["last"] = row, last
    labels["device"], labels["start"] = costs.num_devices, costs.num_blocks - last
    labels["loop"] = np.where(costs.starves[row], seconds, 0.0)
    labels["delay_cost"] = costs.fixed_delay_cost[row] + costs.last.delay_cost[row, last]
    labels["bottleneck"] = np.maximum(least_bottleneck[row, last], seconds)
    labels["summed_cost"] = costs.fixed_summed_cost[row] + costs.last.summed_cost[row, last]
    return labels


@compiled
def with_links(
    tables: SearchTables, bounds: Bounds, error_limits: Floats, labels: Records, whole: bool
) -> Records:
    """Extends labels by links from one more device, whose segment is still to be chosen.

    If the plans become `whole`, the links come from the control unit instead, which takes all blocks that are left.
    """
    num_devices = tables.segments.shape[1]
    num_codecs = tables.links.shape[3]
    out = np.empty(max(64, len(labels)), labels.dtype)
    count = 0
    for parent in range(len(labels)):
        label = labels[parent]
        row, receiver, start = label.row, label.device, label.start
        if (tables.first[row, start].window == 0) if whole else (start == 0):
            continue
        for sender in range(num_devices if whole else 0, num_devices + 1 if whole else num_devices):
            if (label.mask >> sender) & 1:
                continue
            for codec in range(num_codecs):
                link = tables.links[row, sender, receiver, codec]
                if link.load == math.inf:
                    continue
                if count == len(out):
                    out = np.concatenate((out, out))
                new = out[count]
                new.row, new.device, new.start, new.last = row, sender, start, label.last
                new.mask, new.parent, new.codec, new.loop = label.mask, parent, codec, 0.0
                new.option = 0
                new.delay_cost = label.delay_cost + link.delay_cost
                new.summed_cost = label.summed_cost + link.summed_cost
                new.bottleneck = max(label.bottleneck, link.load)
                new.error, new.excess = label.error + link.error, 0.0
                loop = label.loop
                if tables.rows[row].starves:
                    loop += link.loop
                if whole:
                    # The loop no longer matters, so it must not distinguish whole plans.
                    first = tables.first[row, start]
                    new.delay_cost += first.delay_cost
                    new.summed_cost += first.summed_cost
                    new.bottleneck = max(new.bottleneck, first.seconds)
                    if first.window < tables.rows[row].max_in_flight:
                        starving = (loop + first.seconds) / first.window
                        new.bottleneck = max(new.bottleneck, starving)
                else:
                    new.mask |= 1 << sender
                    new.loop = loop
                count += new.error <= error_limits[row] and _within_limits(tables, bounds, new)
    extended: Records = out[:count].copy()
    return extended


@compiled
def _within_limits(tables: SearchTables, bounds: Bounds, label: Record) -> bool:
    """Returns whether the weighted costs of a label so far are within all limits."""
    delay = label.delay_cost + tables.rows[label.row].bottleneck_price * label.bottleneck
    for w in range(len(bounds.weights)):
        if bounds.weights[w] * delay + label.summed_cost > bounds.limits[w, label.row]:
            return False
    return True


@compiled
def with_segments(tables: SearchTables, bounds: Bounds, linked: Records) -> Records:
    """Gives the first device of each label every number of blocks that it can run; drops dominated labels.

    Labels of the same mask, row and device must follow each other.
    """
    period, num_blocks = tables.segments.shape[2], tables.segments.shape[3] - 1
    num_options = tables.segments.shape[4]
    out = np.empty(max(64, len(linked)), linked.dtype)
    count = first = 0
    newest, older = np.full(num_blocks + 1, -1), np.empty(len(out), np.int64)
    for i in range(len(linked)):
        label = linked[i]
        row, device = label.row, label.device
        for place in range(num_options, num_options * (label.start + 1)):
            blocks, option = place // num_options, place % num_options
            start = label.start - blocks
            segment = tables.segments[row, device, start % period, blocks, option]
            if segment.window == 0:
                continue
            if count == len(out):
                out, older = np.concatenate((out, out)), np.concatenate((older, older))
            new = out[count]
            out[count] = label
            new.start, new.option = start, option
            new.delay_cost += segment.delay_cost + tables.moves[row, device, start, label.start]
            new.summed_cost += segment.summed_cost
            new.bottleneck = max(new.bottleneck, segment.seconds)
            if tables.rows[row].starves:
                new.loop += segment.seconds
                if segment.window < tables.rows[row].max_in_flight:
                    new.bottleneck = max(new.bottleneck, new.loop / segment.window)
            if (
                _within_limits(tables, bounds, new)
                and _bounded(tables, bounds, new)
                and _inserted(tables, out, count, newest, older, start)
            ):
                count += 1
        after = i + 1
        if (
            after == len(linked)
            or linked[after].mask != label.mask
            or linked[after].row != row
            or linked[after].device != device
        ):
            kept = first
            for j in range(first, count):
                if out[j].parent >= 0:
                    out[kept] = out[j]
                    kept += 1
            count = first = kept
            newest[:] = -1
    extended: Records = out[:count].copy()
    return extended


@compiled
def _bounded(tables: SearchTables, bounds: Bounds, label: Record) -> bool:
    """Notes the excess of a label, and returns whether some plan within all limits may extend the label."""
    label.excess = -math.inf
    for w in range(len(bounds.weights)):
        least, limit = _lower_bound(tables, bounds, label, w), bounds.limits[w, label.row]
        if least == math.inf or least > limit:
            return False
        if limit < math.inf:
            label.excess = max(label.excess, least - limit)
        elif w == 0:
            label.excess = least
    return True


@compiled
def undominated(tables: SearchTables, labels: Records, group: Ints) -> Records:
    """Returns the labels that no other label of the same group dominates; of equal ones, the first.

    The groups are numbered from 0. Labels with a low cost should come first, because that saves time.
    """
    newest, older = np.full(len(group), -1), np.empty(len(group), np.int64)
    for i in range(len(labels)):
        if not _inserted(tables, labels, i, newest, older, group[i]):
            labels[i].parent = -1
    kept = 0
    for i in range(len(labels)):
        if labels[i].parent >= 0:
            labels[kept] = labels[i]
            kept += 1
    rest: Records = labels[:kept].copy()
    return rest


@compiled
def _inserted(
    tables: SearchTables, labels: Records, new: int, newest: Ints, older: Ints, group: int
) -> bool:
    """Inserts a label into its group unless another label dominates it; drops those that it dominates.

    `newest` has the last label of each group, and `older` the one before each label.
    """
    price = tables.rows[labels[new].row].bottleneck_price
    behind, at = -1, newest[group]
    while at >= 0:
        if _dominates(labels[at], labels[new], price, tables.one_cluster):
            return False
        if _dominates(labels[new], labels[at], price, tables.one_cluster):
            labels[at].parent = -1
            if behind < 0:
                newest[group] = older[at]
            else:
                older[behind] = older[at]
        else:
            behind = at
        at = older[at]
    older[new] = newest[group]
    newest[group] = new
    return True


@compiled
def _dominates(a: Record, b: Record, price: float, one_cluster: bool) -> bool:
    """Returns whether a label is at least as good as another one in every respect.

    The bottleneck itself is not compared. If one label has the lower delay cost both without the bottleneck and
    with it, no extension of the two labels can reverse that. In several clusters, the blocks on the edge server
    also count for their use of it.
    """
    return bool(
        a.delay_cost <= b.delay_cost
        and a.summed_cost <= b.summed_cost
        and a.loop <= b.loop
        and a.delay_cost + price * a.bottleneck <= b.delay_cost + price * b.bottleneck
        and a.error <= b.error
        and (one_cluster or a.last <= b.last)
    )


@compiled
def _lower_bound(tables: SearchTables, bounds: Bounds, label: Record, w: int) -> float:
    """Returns a lower bound on the weighted cost of every plan that extends a label.

    If a plan extends a label, its bottleneck is in the cell of the label or in a later cell.
    """
    m, k, s = label.row, label.device, label.start
    price = bounds.weights[w] * tables.rows[m].bottleneck_price
    least = math.inf
    for g in range(bounds.cells.shape[1]):
        if (
            bounds.cells[m, g].end < label.bottleneck
            or bounds.longest_loop[m, g, k, s] < label.loop
        ):
            continue
        # The start of a cell may be infinite.
        slowest = price * max(bounds.cells[m, g].start, label.bottleneck) if price > 0 else 0.0
        cost = bounds.prefix_cost[w, m, g, k, s] + slowest
        if cost < least:
            cost = max(cost, _knapsack_cost(bounds, label, w, g) + slowest)
            least = min(least, cost)
    return float(bounds.weights[w] * label.delay_cost + label.summed_cost + least)


@compiled
def least_costs(tables: SearchTables, bounds: Bounds, labels: Records) -> Floats:
    """Returns lower bounds on the weighted cost of every plan that extends one of these labels: (w)."""
    least = np.full(len(bounds.weights), math.inf)
    for w in range(len(least)):
        for i in range(len(labels)):
            least[w] = min(least[w], _lower_bound(tables, bounds, labels[i], w))
    return least


@compiled
def _knapsack_cost(bounds: Bounds, label: Record, w: int, g: int) -> float:
    """Returns the least cost of the prefix of a label by the knapsack."""
    m, blocks = label.row, label.start
    cost = bounds.into_cost[w, m, g, label.device]
    for i in range(bounds.items.shape[3]):
        item = bounds.items[w, m, g, i]
        if not (label.mask >> item.index) & 1 and item.held > 0:
            if item.held >= blocks:
                return float(cost + blocks * item.cost)
            cost += item.held * item.cost
            blocks -= item.held
    return cost if blocks == 0 else math.inf
