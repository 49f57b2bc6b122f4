"""What windows allow: a stage whose window w is smaller than the micro-batches under way keeps its loop R within beta w.

R is a sum over what comes behind, design (4), so two tables are enough for bounds: the least loop that there can be behind a device,
and the most that the front of the pipeline can stand. Axes as in `segment_bounds`.
"""

import numpy as np
import numpy.typing as npt

from collapipe.allocation.search.link_tables import Floats
from collapipe.allocation.search.segment_costs import ClusterCosts

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


def _least_links(costs: ClusterCosts, grid: Floats) -> Floats:
    """The shortest loop over a link within a bottleneck: (m, g, sender, receiver)."""
    load = costs.link_load[:, None]
    usable = np.isfinite(load) & (load <= grid[:, :, None, None, None])
    return np.asarray(np.where(usable, costs.link_loop[:, None], np.inf).min(axis=-1))


def _spans(num_blocks: int) -> npt.NDArray[np.intp]:
    blocks = np.arange(num_blocks + 1)
    return np.asarray(np.maximum(blocks[None, :] - blocks[:, None], 0))
