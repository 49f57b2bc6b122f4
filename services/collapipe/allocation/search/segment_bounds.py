"""Lower bounds on the cost of the part of a pipeline that the search has not built yet.

The search builds a pipeline from the head backwards. The missing part is a *prefix*: the control unit with its
blocks, the segments of the blocks before s, and the link into device k. For each cell of a grid of bottlenecks,
two relaxations bound its cost from below. In a cell, only segments and links are allowed that take no longer than
the cell's end.

- A dynamic programme computes the cheapest path for each device k and each block s. It knows the links, but it
  may use a device twice.
- A fractional knapsack fills blocks into the devices that are still unused, the cheapest ones first. It uses each
  device once, but with the cheapest link into it.

A stage can start a micro-batch only when its window has room. So a window w that is smaller than the number of
micro-batches in flight starves the stage if the latency loop R is longer than w times the bottleneck:
docs/scheduling.md (4). The shortest loop that can follow a segment shows which segments a cell excludes.
"""

import math
from typing import NamedTuple

import numpy as np

from collapipe.allocation.search.arrays import Bools, Floats, Records, compiled
from collapipe.allocation.search.search_tables import SearchTables, search_tables
from collapipe.allocation.search.segment_costs import ClusterCosts

_HUGE = 1e300
"""Replaces an infinite bottleneck in products."""
_ROUNDING = 1 + 1e-11
_CELL = np.dtype([("end", float), ("start", float)])
_ITEM = np.dtype([("index", np.int64), ("cost", float), ("held", np.int64)])


class Bounds(NamedTuple):
    """The bounds of one cluster.

    Lower bounds are on *weighted costs*: a weight times the delay cost, plus the summed cost. w is an index of a
    weight, and g is a cell of bottlenecks. The cells are in ascending order. The items of the knapsack are the
    devices and the control unit, in ascending order of their cost.

    Args:
        cells: The largest bottleneck `end` of each cell, infinite for the last one, and the smallest bottleneck
            `start` that a pipeline in the cell can have. (m, g)
        weights: From 0 to 1. (w)
        limits: A plan of a row with a larger weighted cost is in no best decision. (w, m)
        longest_loop: Longest latency loop from device k on that some prefix allows. (m, g, k, s)
        prefix_cost: Least weighted cost of a prefix, without the bottleneck's, if the bottleneck is at most
            the end of the cell. The last k is the edge server. (w, m, g, k, s)
        items: `index` of the item, least `cost` of a block on it, with the item's share of the link into it, and
            the most blocks `held` that it can run. (w, m, g, item)
        into_cost: Least cost of the control unit without blocks, and of a link into device k, or into the edge
            server. (w, m, g, k)
    """

    cells: Records
    weights: Floats
    limits: Floats
    longest_loop: Floats
    prefix_cost: Floats
    items: Records
    into_cost: Floats


def cluster_bounds(
    costs: ClusterCosts,
    tables: SearchTables,
    least: Floats,
    num_cells: int,
    weights: tuple[float, ...],
) -> Bounds:
    """Tabulates the bounds of a cluster, with infinite limits.

    The cells spread evenly over the ranks of the possible bottlenecks. `least` has the smallest bottleneck that the
    load of the edge server allows: (m, d).
    """
    cells = np.full((costs.num_rows, num_cells), np.inf, _CELL)
    for m, cell in enumerate(cells):
        times = _possible_bottlenecks(costs, m, least[m])
        if len(times) < num_cells:
            cell["end"][: len(times)] = times
        else:
            index = np.linspace(0, len(times) - 1, num_cells - 1).astype(np.intp)
            cell["end"][:-1] = times[index]
        cell["start"] = np.append(times[0], cell["end"][:-1])
        if not costs.starves[m]:  # Where windows starve, any number may be a bottleneck.
            after = np.searchsorted(times, cell["start"][1:], side="right")
            cell["start"][1:] = np.append(times, np.inf)[after]
    return cheapest_rest(tables, cells, np.array(weights))


def one_cell(tables: SearchTables) -> Records:
    """Returns a grid that does not limit the bottleneck."""
    return np.full((len(tables.rows), 1), np.inf, _CELL)


def cheapest_rest(tables: SearchTables, cells: Records, weights: Floats) -> Bounds:
    """Tabulates the bounds for given cells and weights, with infinite limits."""
    num_devices, width = tables.moves.shape[1:3]
    by_cell = (len(weights), *cells.shape)
    bounds = Bounds(
        cells,
        weights,
        limits=np.full(by_cell[:2], np.inf),
        longest_loop=np.full((*cells.shape, num_devices + 1, width), -np.inf),
        prefix_cost=np.full((*by_cell, num_devices + 1, width), np.inf),
        items=np.empty((*by_cell, num_devices + 1), _ITEM),
        into_cost=np.full((*by_cell, num_devices + 1), np.inf),
    )
    segment_cost = np.empty((len(weights), num_devices, width, width))
    fits = np.empty((num_devices, width, width), np.bool_)
    links = np.empty((num_devices + 1, num_devices + 1))
    _fill(tables, bounds, segment_cost, np.empty((num_devices, width)), fits, links)
    return bounds


def with_weight(tables: SearchTables, bounds: Bounds, weight: float) -> Bounds:
    """Puts bounds for one more weight before the others."""
    more = cheapest_rest(tables, bounds.cells, np.array([weight]))
    names = ("weights", "limits", "prefix_cost", "items", "into_cost")
    return bounds._replace(
        **{name: np.concatenate([getattr(more, name), getattr(bounds, name)]) for name in names}
    )


def _possible_bottlenecks(costs: ClusterCosts, row: int, least: Floats) -> Floats:
    """Returns every bottleneck that a pipeline of a row can have if no window starves, ascending."""
    tables = (costs.compute, costs.link_load, costs.first.seconds, costs.last.seconds)
    times = np.concatenate([*(table[row].ravel() for table in tables), least])
    return np.unique(times[(times >= np.min(least)) & np.isfinite(times)])


def least_error(costs: ClusterCosts) -> Floats:
    """Returns the least sum of codec errors over any chain of links; infinite if there is no chain. (m)"""
    tables = search_tables(costs)
    tables.first["summed_cost"] = tables.segments["summed_cost"] = 0.0
    tables.links["summed_cost"] = tables.links["error"]
    prefix_cost = cheapest_rest(tables, one_cell(tables), np.zeros(1)).prefix_cost[0, :, 0, -1]
    least: Floats = np.where(costs.last.window[:, ::-1] > 0, prefix_cost, np.inf)
    return np.asarray(least.min(axis=1))


@compiled
def _fill(
    tables: SearchTables,
    bounds: Bounds,
    segment_cost: Floats,
    behind: Floats,
    fits: Bools,
    links: Floats,
) -> None:
    """Fills the tables from `longest_loop` on.

    The other arrays are overwritten for each row or cell: `segment_cost` (w, k, s, e), `behind` (k, s), `fits` (k, s, e)
    and `links` (sender, receiver).
    """
    for m in range(bounds.cells.shape[0]):
        _fill_segment_costs(tables, bounds, m, segment_cost)
        for g in range(bounds.cells.shape[1]):
            _fill_links(tables, bounds, m, g, -1, links)
            _fill_fits(tables, m, bounds.cells[m, g].end, links, behind, fits)
            _fill_longest_loops(tables, bounds, m, g, links, fits)
            for w in range(len(bounds.weights)):
                _fill_links(tables, bounds, m, g, w, links)
                _fill_prefixes(tables, bounds, m, g, w, links, fits, segment_cost)
                _fill_knapsack(bounds, m, g, w, links, fits, segment_cost)


@compiled
def _fill_segment_costs(tables: SearchTables, bounds: Bounds, m: int, segment_cost: Floats) -> None:
    """Fills the least weighted cost of every segment, over the options to recompute: (w, k, s, e)."""
    period, width = tables.segments.shape[2], tables.segments.shape[3]
    for w in range(len(bounds.weights)):
        for k in range(segment_cost.shape[1]):
            for s in range(width):
                for e in range(s + 1, width):
                    least = math.inf
                    for segment in tables.segments[m, k, s % period, e - s]:
                        if segment.window > 0:
                            delay = segment.delay_cost + tables.moves[m, k, s, e]
                            cost = bounds.weights[w] * delay + segment.summed_cost
                            least = min(least, cost)
                    segment_cost[w, k, s, e] = least


@compiled
def _fill_links(
    tables: SearchTables, bounds: Bounds, m: int, g: int, w: int, links: Floats
) -> None:
    """Fills the least weighted cost of each link within a cell, or its least loop if w is negative."""
    end = min(bounds.cells[m, g].end, _HUGE)
    for sender in range(links.shape[0]):
        for receiver in range(links.shape[1]):
            least = math.inf
            for codec in range(tables.links.shape[3]):
                link = tables.links[m, sender, receiver, codec]
                if link.load <= end:
                    value = link.loop
                    if w >= 0:
                        value = bounds.weights[w] * link.delay_cost + link.summed_cost
                    least = min(least, value)
            links[sender, receiver] = least


@compiled
def _fill_fits(
    tables: SearchTables, m: int, end: float, loops: Floats, behind: Floats, fits: Bools
) -> None:
    """Finds the segments within a bottleneck whose window some rest of the pipeline allows: (k, s, e).

    `behind` gets the shortest loop behind a segment of device k that ends at block e: (k, e).
    """
    num_devices, period, width = (
        tables.segments.shape[1],
        tables.segments.shape[2],
        tables.segments.shape[3],
    )
    fits[:] = False
    for s in range(width - 1, -1, -1):
        for k in range(num_devices):
            behind[k, s] = loops[k, num_devices] + tables.last_seconds[m, width - 1 - s]
        for k in range(num_devices):
            begun = math.inf
            for e in range(s + 1, width):
                for segment in tables.segments[m, k, s % period, e - s]:
                    if segment.window > 0 and segment.seconds <= end:
                        loop = segment.seconds + behind[k, e]
                        if loop <= _allowed_loop(segment.window, tables.rows[m].max_in_flight, end):
                            fits[k, s, e] = True
                            begun = min(begun, loop)
            for j in range(num_devices):
                behind[j, s] = min(behind[j, s], loops[j, k] + begun)


@compiled
def _allowed_loop(window: int, most: int, end: float) -> float:
    """Returns the longest loop in seconds that a window allows if the bottleneck is at most `end`.

    The result is a number even without a limit, because infinite link times are subtracted from it.
    """
    return min(_HUGE, window * end if window < most else math.inf) * _ROUNDING


@compiled
def _fill_longest_loops(
    tables: SearchTables, bounds: Bounds, m: int, g: int, loops: Floats, fits: Bools
) -> None:
    """Fills `longest_loop` of a cell; `loops` has the least loop of each link: (sender, receiver)."""
    num_devices, period, width = (
        tables.segments.shape[1],
        tables.segments.shape[2],
        tables.segments.shape[3],
    )
    end, most, longest = (
        bounds.cells[m, g].end,
        tables.rows[m].max_in_flight,
        bounds.longest_loop[m, g],
    )
    for s in range(width):
        seconds, window = tables.first[m, s].seconds, tables.first[m, s].window
        if window > 0 and seconds <= end:
            room = _allowed_loop(window, most, end) - seconds
            for k in range(num_devices + 1):
                longest[k, s] = room - loops[num_devices, k]
    for e in range(1, width):
        for k in range(num_devices):
            room = -math.inf
            for s in range(e):
                if fits[k, s, e]:
                    for segment in tables.segments[m, k, s % period, e - s]:
                        if segment.window > 0:
                            allowed = _allowed_loop(segment.window, most, end)
                            slack = min(longest[k, s], allowed) - segment.seconds
                            room = max(room, slack)
            for j in range(num_devices + 1):
                longest[j, e] = max(longest[j, e], room - loops[k, j])


@compiled
def _fill_prefixes(
    tables: SearchTables,
    bounds: Bounds,
    m: int,
    g: int,
    w: int,
    links: Floats,
    fits: Bools,
    segment_cost: Floats,
) -> None:
    """Fills the costs of the cheapest paths, and the part of the control unit in the knapsack."""
    num_devices, width = tables.segments.shape[1], tables.segments.shape[3]
    prefix, weight, end = bounds.prefix_cost[w, m, g], bounds.weights[w], bounds.cells[m, g].end
    least, more, held = math.inf, math.inf, 0
    for s in range(width):
        if tables.first[m, s].window > 0 and tables.first[m, s].seconds <= end:
            cost = weight * tables.first[m, s].delay_cost + tables.first[m, s].summed_cost
            for k in range(num_devices + 1):
                prefix[k, s] = cost + links[num_devices, k]
            least = min(least, cost)
    for s in range(1, width):
        if tables.first[m, s].window > 0 and tables.first[m, s].seconds <= end:
            cost = weight * tables.first[m, s].delay_cost + tables.first[m, s].summed_cost
            more, held = min(more, (cost - least) / s), s
    bounds.into_cost[w, m, g] = least
    _put(bounds, m, g, w, 0, num_devices, more, held)
    for e in range(1, width):
        for k in range(num_devices):
            ended = math.inf
            for s in range(e):
                if fits[k, s, e]:
                    ended = min(ended, prefix[k, s] + segment_cost[w, k, s, e])
            for j in range(num_devices + 1):
                prefix[j, e] = min(prefix[j, e], ended + links[k, j])


@compiled
def _fill_knapsack(
    bounds: Bounds, m: int, g: int, w: int, links: Floats, fits: Bools, segment_cost: Floats
) -> None:
    """Puts the devices into the knapsack, which has the control unit already."""
    num_devices, width = fits.shape[0], fits.shape[2]
    for k in range(num_devices + 1):
        into = math.inf
        for sender in range(num_devices + 1):
            into = min(into, links[sender, k])
        bounds.into_cost[w, m, g, k] += into
        if k < num_devices:
            least, held = math.inf, 0
            for s in range(width):
                for e in range(s + 1, width):
                    if fits[k, s, e]:
                        least = min(least, (into + segment_cost[w, k, s, e]) / (e - s))
                        held = max(held, e - s)
            _put(bounds, m, g, w, k + 1, k, least, held if least < math.inf else 0)


@compiled
def _put(
    bounds: Bounds, m: int, g: int, w: int, count: int, new: int, new_cost: float, new_held: int
) -> None:
    """Inserts an item into the first `count` items, which are in ascending order of their cost."""
    items, at = bounds.items[w, m, g], count
    while at > 0 and items[at - 1].cost > new_cost:
        items[at] = items[at - 1]
        at -= 1
    items[at].index, items[at].cost, items[at].held = new, new_cost, new_held
