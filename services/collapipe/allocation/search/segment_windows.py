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

from collapipe.allocation.search.arrays import Bools, Floats
from collapipe.allocation.search.segment_costs import ClusterCosts

_ROUNDING = 1 + 1e-11
_NO_LIMIT = 1e300
"""Replaces an infinite loop, from which infinite link times are subtracted; the result must be a number."""


def blocked_segments(costs: ClusterCosts, grid: Floats, *, in_order: bool) -> Bools:
    """Finds segments whose loop is too long for their window, whatever follows them: (m, g, k, s, e)."""
    allowed, _ = _allowed_loops(costs, grid)
    counts = block_counts(costs.num_blocks)
    behind = _shortest_loops_behind(costs, grid, allowed, in_order=in_order)
    loops = costs.compute[:, None][..., counts] + behind[..., None, :]
    return np.asarray((loops > allowed[..., counts]) & (counts > 0))


def longest_loops(costs: ClusterCosts, grid: Floats, *, in_order: bool) -> Floats:
    """Computes the longest loop from device k on that some prefix of blocks 0 to s allows: (m, g, k, s).

    It is negative infinity if no prefix exists.
    """
    num_devices, num_blocks = costs.num_devices, costs.num_blocks
    allowed, embedding_allowed = _allowed_loops(costs, grid)
    links = _shortest_link_loops(costs, grid)
    between = links[:, :, :num_devices]
    longest = np.full((*grid.shape, num_devices + 1, num_blocks + 1), -np.inf)
    after_embedding = (embedding_allowed - costs.embedding_seconds[:, None])[..., None]
    longest[..., :num_devices, 0] = after_embedding - links[:, :, num_devices, :num_devices]
    if in_order:
        counts = block_counts(num_blocks)
        for k in range(num_devices):
            room = np.minimum(longest[:, :, k, :, None], allowed[:, :, k][..., counts])
            ended = np.max(room - costs.compute[:, None, k][..., counts], axis=2)
            later = ended[:, :, None, :] - between[:, :, k, k + 1 :, None]
            longest[:, :, k + 1 :] = np.maximum(longest[:, :, k + 1 :], later)
        return longest
    for e in range(1, num_blocks + 1):
        room = np.minimum(longest[:, :, :num_devices, :e], allowed[:, :, :, e:0:-1])
        ended = np.max(room - costs.compute[:, None, :, e:0:-1], axis=3)
        longest[..., e] = np.max(ended[..., None] - between, axis=2)
    return longest


def _allowed_loops(costs: ClusterCosts, grid: Floats) -> tuple[Floats, Floats]:
    """Returns the longest loops that windows allow: of segments (m, g, k, d) and the embedding (m, g)."""
    max_in_flight = costs.max_in_flight[:, None]
    embedding = np.where(
        costs.embedding_window[:, None] < max_in_flight,
        grid * costs.embedding_window[:, None],
        np.inf,
    )
    window = costs.window[:, None]
    starves = (window > 0) & (window < max_in_flight[..., None, None])
    segment = np.where(starves, grid[:, :, None, None] * np.maximum(window, 1), np.inf)
    segment = np.where(window > 0, np.minimum(segment, _NO_LIMIT), -np.inf)
    return segment * _ROUNDING, np.minimum(embedding, _NO_LIMIT) * _ROUNDING


def _shortest_loops_behind(
    costs: ClusterCosts, grid: Floats, allowed: Floats, *, in_order: bool
) -> Floats:
    """Computes the shortest loop behind a segment that ends at block e, link included: (m, g, k, e)."""
    num_devices, num_blocks = costs.num_devices, costs.num_blocks
    links = _shortest_link_loops(costs, grid)
    shortest = np.full((*grid.shape, num_devices, num_blocks + 1), np.inf)
    shortest[..., num_blocks] = (
        links[:, :, :num_devices, num_devices] + (costs.head_seconds[:, None, None])
    )
    if in_order:
        counts = block_counts(num_blocks)
        for k in reversed(range(num_devices)):
            loops = costs.compute[:, None, k][..., counts] + shortest[:, :, k, None, :]
            loops = np.where(loops <= allowed[:, :, k][..., counts], loops, np.inf)
            begun = np.min(loops, axis=3)
            before = links[:, :, :k, k, None] + begun[:, :, None, :]
            shortest[:, :, :k] = np.minimum(shortest[:, :, :k], before)
        return shortest
    for s in range(num_blocks - 1, 0, -1):
        count = num_blocks - s
        loops = costs.compute[:, None, :, 1 : count + 1] + shortest[..., s + 1 :]
        loops = np.where(loops <= allowed[:, :, :, 1 : count + 1], loops, np.inf)
        begun = np.min(loops, axis=3)
        shortest[..., s] = np.min(
            links[:, :, :num_devices, :num_devices] + begun[:, :, None, :], axis=3
        )
    return shortest


def _shortest_link_loops(costs: ClusterCosts, grid: Floats) -> Floats:
    """Returns the least seconds that a link within a bottleneck adds to the loop."""
    load = costs.link_load[:, None]
    usable = np.isfinite(load) & (load <= grid[:, :, None, None, None])
    return np.asarray(np.where(usable, costs.link_loop[:, None], np.inf).min(axis=-1))


def block_counts(num_blocks: int) -> npt.NDArray[np.intp]:
    """Returns the number of blocks from s to e, or 0 if e is before s: (s, e)."""
    blocks = np.arange(num_blocks + 1)
    return np.asarray(np.maximum(blocks[None, :] - blocks[:, None], 0))
