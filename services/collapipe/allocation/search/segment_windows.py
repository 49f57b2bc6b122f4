"""What in-flight windows allow within a bottleneck.

A stage can start a micro-batch only when its window has room. So a window w that is smaller than the number
of micro-batches in flight starves the stage if the latency loop R is longer than w times the bottleneck:
docs/scheduling.md (4). R is a sum over the stages and links behind the stage. So two tables bound what
windows allow: the shortest loop that can follow a segment, and the longest loop that some prefix allows.
`segment_bounds` explains prefixes, and `segment_costs` explains the axes; g is a cell of the grid of
bottlenecks.
"""

import numpy as np
import numpy.typing as npt

from collapipe.allocation.search.arrays import Bools, Floats, Ints
from collapipe.allocation.search.segment_costs import ClusterCosts

_ROUNDING = 1 + 1e-11
_NO_LIMIT = 1e300
"""Replaces an infinite loop, from which infinite link times are subtracted; the result must be a number."""


def blocked_segments(costs: ClusterCosts, grid: Floats) -> Bools:
    """Finds segments whose loop is too long for their window, whatever follows them: (m, g, k, s, e)."""
    allowed = _allowed_loops(costs, grid, costs.window)
    counts = block_counts(costs.num_blocks)
    behind = _shortest_loops_behind(costs, grid, allowed)
    loops = costs.compute[:, None][..., counts] + behind[..., None, :]
    return np.asarray((loops > allowed[..., counts]) & (counts > 0))


def longest_loops(costs: ClusterCosts, grid: Floats) -> Floats:
    """Computes the longest loop from device k on that some prefix of blocks 0 to s allows: (m, g, k, s).

    It is negative infinity if no prefix exists.
    """
    num_devices, num_blocks = costs.num_devices, costs.num_blocks
    allowed = _allowed_loops(costs, grid, costs.window)
    links = _shortest_link_loops(costs, grid)
    between = links[:, :, :num_devices]
    after_first = (
        _allowed_loops(costs, grid, costs.first.window) - _finite(costs.first.seconds)[:, None]
    )
    longest = after_first[:, :, None, :] - links[:, :, num_devices, :, None]
    for e in range(1, num_blocks + 1):
        room = np.minimum(longest[:, :, :num_devices, :e], allowed[:, :, :, e:0:-1])
        ended = np.max(room - _finite(costs.compute[:, None, :, e:0:-1]), axis=3)
        longest[..., e] = np.maximum(longest[..., e], np.max(ended[..., None] - between, axis=2))
    return longest


def _allowed_loops(costs: ClusterCosts, grid: Floats, window: Ints) -> Floats:
    """Returns the longest loops that windows (m, ...) allow: (m, g, ...).

    Where a window is 0, nothing is allowed.
    """
    window = window[:, None]
    ends = grid.reshape(*grid.shape, *(1,) * (window.ndim - 2))
    max_in_flight = costs.max_in_flight.reshape(-1, *(1,) * (window.ndim - 1))
    allowed = np.where(window < max_in_flight, ends * np.maximum(window, 1), np.inf)
    return np.where(window > 0, np.minimum(allowed, _NO_LIMIT) * _ROUNDING, -np.inf)


def _shortest_loops_behind(costs: ClusterCosts, grid: Floats, allowed: Floats) -> Floats:
    """Computes the shortest loop behind a segment that ends at block e, link included: (m, g, k, e)."""
    num_devices, num_blocks = costs.num_devices, costs.num_blocks
    links = _shortest_link_loops(costs, grid)
    shortest: Floats = (
        links[:, :, :num_devices, num_devices, None] + costs.last.seconds[:, None, None, ::-1]
    )
    for s in range(num_blocks - 1, 0, -1):
        count = num_blocks - s
        loops = costs.compute[:, None, :, 1 : count + 1] + shortest[..., s + 1 :]
        loops = np.where(loops <= allowed[:, :, :, 1 : count + 1], loops, np.inf)
        begun = np.min(loops, axis=3)
        through = np.min(links[:, :, :num_devices, :num_devices] + begun[:, :, None, :], axis=3)
        shortest[..., s] = np.minimum(shortest[..., s], through)
    return shortest


def _finite(seconds: Floats) -> Floats:
    return np.minimum(seconds, _NO_LIMIT)


def _shortest_link_loops(costs: ClusterCosts, grid: Floats) -> Floats:
    """Returns the least seconds that a link within a bottleneck adds to the loop."""
    load = costs.link_load[:, None]
    usable = np.isfinite(load) & (load <= grid[:, :, None, None, None])
    return np.asarray(np.where(usable, costs.link_loop[:, None], np.inf).min(axis=-1))


def block_counts(num_blocks: int) -> npt.NDArray[np.intp]:
    """Returns the number of blocks from s to e, or 0 if e is before s: (s, e)."""
    blocks = np.arange(num_blocks + 1)
    return np.asarray(np.maximum(blocks[None, :] - blocks[:, None], 0))
