"""The tables of one cluster as compiled functions read them: few arrays of records."""

from typing import NamedTuple

import numpy as np

from collapipe.allocation.search.arrays import Floats, Records
from collapipe.allocation.search.segment_costs import ClusterCosts

_ROW = np.dtype([("max_in_flight", np.int64), ("starves", np.bool_), ("bottleneck_price", float)])
_STAGE = np.dtype(
    [("window", np.int64), ("seconds", float), ("delay_cost", float), ("summed_cost", float)]
)
_LINK = np.dtype([(name, float) for name in ("load", "loop", "delay_cost", "summed_cost", "error")])


class SearchTables(NamedTuple):
    """The tables of `ClusterCosts` that compiled functions need. `segment_costs` explains the axes.

    Args:
        rows: max_in_flight, starves, bottleneck_price. (m)
        first: window, seconds, delay_cost, summed_cost of the control unit. (m, d)
        last_seconds: Compute time of the edge server. (m, d)
        segments: window, seconds, delay_cost, summed_cost. (m, k, p, d, c)
        moves: Cost of pushing, fetching and moving blocks s to e. (m, k, s, e)
        links: load, loop, delay_cost, summed_cost, error. (m, sender, receiver, codec)
        one_cluster: Whether the problem has no other cluster.
    """

    rows: Records
    first: Records
    last_seconds: Floats
    segments: Records
    moves: Floats
    links: Records
    one_cluster: bool


def search_tables(costs: ClusterCosts) -> SearchTables:
    """Copies the tables of a cluster into records."""
    first = costs.first
    segments = (
        costs.window,
        costs.compute,
        costs.segment_delay_cost,
        costs.segment_summed_cost,
    )
    links = (
        costs.link_load,
        costs.link_loop,
        costs.link_delay_cost,
        costs.link_summed_cost,
        costs.link_error,
    )
    return SearchTables(
        _records(_ROW, costs.max_in_flight, costs.starves, costs.bottleneck_price),
        _records(_STAGE, first.window, first.seconds, first.delay_cost, first.summed_cost),
        np.ascontiguousarray(costs.last.seconds),
        _records(_STAGE, *segments),
        np.ascontiguousarray(costs.move_delay_cost),
        _records(_LINK, *links),
        costs.one_cluster,
    )


def empty_tables() -> SearchTables:
    """Returns tables of one device and one block, in which no segment fits."""
    return SearchTables(
        np.zeros(1, _ROW),
        np.zeros((1, 2), _STAGE),
        np.zeros((1, 2)),
        np.zeros((1, 1, 1, 2, 1), _STAGE),
        np.zeros((1, 1, 2, 2)),
        np.zeros((1, 2, 2, 1), _LINK),
        True,
    )


def _records(kind: np.dtype[np.void], *columns: np.ndarray) -> Records:
    table = np.empty(columns[0].shape, kind)
    for name, column in zip(kind.names or (), columns, strict=True):
        table[name] = column
    return table
