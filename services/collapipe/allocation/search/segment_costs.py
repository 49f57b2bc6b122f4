"""What every choice of a cluster costs, as arrays: the model of `prediction`, tabulated once for a segment programme.

Axes: m is a row: a choice of M, k a device, d a number of blocks, s and e the first and one past the last block. Senders of
links are the devices and, last, the control unit; receivers are the devices and, last, the edge server. What is
*priced* is in units of the objective, design (13); the rest is in seconds.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

import numpy as np
import numpy.typing as npt

from collapipe.allocation.round_model.prediction import moved_blocks, state_seconds
from collapipe.allocation.round_model.problem import ClusterProblem, Host, RoundProblem
from collapipe.allocation.search.link_tables import Floats, Offers, link_tables

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True)
class ClusterCosts:
    """The tables of one cluster.

    A time that is added to the latency loop of a mini-batch is priced at `loop_price`; a second of the bottleneck
    at `stall_price`. The objective of a pipeline is the sum of prices, and `stall_price` times its bottleneck.

    Args:
        options: M of each row; only values whose first and last stage fit their hosts are here.
        devices: Index of each device among the cluster's; rows may have their own order. (m, k)
        flight: Micro-batches under way at most: windows of so many never starve. (m)
        loop_price, stall_price: Of a second. (m)
        end_price, end_cost: What first and last stage and the round itself add. (m)
        entry_seconds, head_seconds: Compute of first and last stage. (m)
        entry_window: Largest window of the first stage. (m)
        head_load: What the cluster asks of the edge server in a mini-batch, in seconds. (m)
        head_bytes: Least memory of the last stage, without the host's base. (m)
        term: Convergence term without codecs' errors: its part of (11). (m)
        compute: Seconds of a segment; infinite where it does not fit. (m, k, d)
        window: Largest window that memory and limit allow; 0 where the segment does not fit. (m, k, d)
        device_price, device_cost: Priced time, and energy, of a segment. (m, k, d)
        move_price: Of gathering and moving blocks s to e. (m, k, s, e)
        link_load: Of a micro-batch; infinite where there is no link. (m, sender, receiver, codec)
        link_loop: What it adds to the loop; likewise.
        link_price, link_cost: Priced time, and energy and error; likewise.
        link_error: What it adds to the convergence term; 0 where no limit is set on that. Likewise.
        link_codec: Index into `problem.codecs`; likewise.
        starves: Whether some window may be the bottleneck. (m)
    """

    options: Ints
    devices: Ints
    flight: Ints
    loop_price: Floats
    stall_price: Floats
    end_price: Floats
    end_cost: Floats
    entry_seconds: Floats
    head_seconds: Floats
    entry_window: Ints
    head_load: Floats
    head_bytes: Floats
    term: Floats
    compute: Floats
    window: Ints
    device_price: Floats
    device_cost: Floats
    move_price: Floats
    link_load: Floats
    link_loop: Floats
    link_price: Floats
    link_cost: Floats
    link_error: Floats
    link_codec: Ints
    starves: npt.NDArray[np.bool_]

    @property
    def num_devices(self) -> int:
        """K."""
        return int(self.compute.shape[1])

    @property
    def num_blocks(self) -> int:
        """L."""
        return int(self.compute.shape[2]) - 1

    def rows(self, chosen: Sequence[int] | npt.NDArray[np.intp]) -> "ClusterCosts":
        """Some rows."""
        index = np.asarray(chosen, dtype=np.intp)
        return replace(
            self, **{field.name: getattr(self, field.name)[index] for field in fields(self)}
        )

    def reordered(self, orders: Ints) -> "ClusterCosts":
        """The same with the devices of each row in another order: (m, position)."""
        row = np.arange(len(self.options))[:, None]
        last = np.full((len(row), 1), self.num_devices)
        ends = np.concatenate([orders, last], axis=1)
        return replace(
            self,
            **{name: getattr(self, name)[row, orders] for name in _DEVICE_TABLES},
            **{
                name: getattr(self, name)[row[..., None], ends[:, :, None], ends[:, None, :]]
                for name in _LINK_TABLES
            },
        )


_DEVICE_TABLES = ("devices", "compute", "window", "device_price", "device_cost", "move_price")
_LINK_TABLES = ("link_load", "link_loop", "link_price", "link_cost", "link_error", "link_codec")


def largest_windows(
    problem: RoundProblem,
    host: Host,
    state_bytes: Floats,
    stash_bytes: Floats,
    micro_batch_size: Floats,
    flight: Ints,
) -> Ints:
    """The largest windows that a host's memory and the job's limit allow: design (10).

    Args:
        problem: The round.
        host: Whose memory.
        state_bytes, stash_bytes: Of what it would run; stash of one sample.
        micro_batch_size: Samples.
        flight: Micro-batches under way at most; arrays broadcast against each other.

    Returns:
        Windows of the common shape; 0 where not even one micro-batch fits.
    """
    most = (
        flight if problem.in_flight_limit is None else np.minimum(flight, problem.in_flight_limit)
    )
    shape = np.broadcast_shapes(state_bytes.shape, micro_batch_size.shape, flight.shape)
    limit = host.memory_bytes
    if limit is None:
        return np.broadcast_to(most, shape).astype(np.int64)

    def fits(window: Ints) -> npt.NDArray[np.bool_]:
        """In the order of `ModelCost.memory_bytes`, so that not even rounding tells them apart."""
        activation = problem.model.activation_bytes
        kept = (
            window * activation + stash_bytes if problem.model.recompute else window * stash_bytes
        )
        need = state_bytes + micro_batch_size * (kept + 2 * window * activation)
        return np.asarray(host.base_bytes + need <= limit)

    low, high = np.zeros(shape, np.int64), np.broadcast_to(most, shape).astype(np.int64)
    while np.any(low < high):
        middle: Ints = (low + high + 1) // 2
        fit = fits(middle)
        low, high = np.where(fit, middle, low), np.where(fit, high, middle - 1)
    return low


def cluster_costs(
    problem: RoundProblem, cluster: ClusterProblem, offers: Offers, *, one_cluster: bool
) -> ClusterCosts:
    """Tabulates one cluster.

    Args:
        problem: The round.
        cluster: One of its clusters.
        offers: Share and powers of its links.
        one_cluster: Whether time and energy have one price, for no other cluster's time counts: then energy is
            priced like time, and nothing is left in the tables of costs.

    Returns:
        Tables with rows for those values of M whose first and last stage fit their hosts, maybe none.
    """
    model, num_blocks = problem.model, problem.model.num_blocks
    devices = cluster.devices
    options = np.array(cluster.micro_batch_options, np.int64)
    size = problem.mini_batch / options
    each = problem.update_per_micro_batch
    flight = np.ones_like(options) if each else options
    passes = (problem.local_steps * options).astype(float)
    second = problem.penalty_weight / problem.reference_seconds
    loops, stalls = (options, 0) if each else (1, options - 1)
    loop_price: Floats = second * problem.local_steps * (loops * np.ones(len(options)))
    stall_price: Floats = second * problem.local_steps * (stalls * np.ones(len(options)))

    def window(host: Host, start_unit: int, stop_unit: int) -> Ints:
        state = np.array(model.state_bytes(start_unit, stop_unit))
        stash = np.array(model.head_stash_bytes if start_unit else model.embedding_stash_bytes)
        return largest_windows(problem, host, state, stash, size, flight)

    def seconds(host: Host, start_unit: int, stop_unit: int) -> Floats:
        work = model.work(start_unit, stop_unit)
        return np.array([host.compute_seconds(b, work) for b in size])

    entry, head = cluster.control_unit, cluster.edge_server
    entry_seconds = seconds(entry, 0, 1)
    head_seconds = seconds(head, num_blocks + 1, num_blocks + 2)
    head_window = window(head, num_blocks + 1, num_blocks + 2)
    term = _term(problem, cluster, options)
    steps = options * cluster.step_seconds if each else np.full(len(options), cluster.step_seconds)
    end_price = loop_price * (entry_seconds + head_seconds) + second * (
        problem.local_steps * steps + cluster.upload_seconds
    )
    end_cost = passes * (
        entry.joule_weight * entry.busy_watts * entry_seconds
        + head.joule_weight * head.busy_watts * head_seconds
    )
    if problem.convergence.weight:
        end_cost = end_cost + problem.penalty_weight * problem.convergence.weight * term

    shape = (len(options), len(devices), num_blocks + 1)
    blocks = np.arange(num_blocks + 1)
    some: Floats = blocks[1:].astype(np.float64)
    compute, windows = np.full(shape, np.inf), np.zeros(shape, np.int64)
    device_cost = np.zeros(shape)
    for k, device in enumerate(devices):
        windows[:, k, 1:] = largest_windows(
            problem,
            device,
            some * model.block_state_bytes,
            some * model.block_stash_bytes,
            size[:, None],
            flight[:, None],
        )
        if not np.isfinite(state_seconds(problem, device, 1)):
            windows[:, k] = 0
        each_second = (
            device.seconds_per_micro_batch + size[:, None] * device.seconds_per_sample * blocks
        )
        compute[:, k] = np.where(windows[:, k] > 0, each_second, np.inf)
        watts = device.joule_weight * device.busy_watts
        device_cost[:, k] = passes[:, None] * watts * each_second
    move_price = (
        second * np.stack([_move_seconds(problem, cluster, device) for device in devices])
        if devices
        else np.zeros((0, num_blocks + 1, num_blocks + 1))
    )
    device_price = loop_price[:, None, None] * np.where(windows > 0, compute, 0.0)
    links = link_tables(problem, cluster, offers, size, passes)
    link_price, link_cost = loop_price[:, None, None, None] * links.loop, links.cost
    if one_cluster:
        end_price, end_cost = end_price + end_cost, np.zeros_like(end_cost)
        device_price, device_cost = device_price + device_cost, np.zeros_like(device_cost)
        link_price, link_cost = link_price + link_cost, np.zeros_like(link_cost)
    entry_window = window(entry, 0, 1)
    fitting = windows > 0
    costs = ClusterCosts(
        options=options,
        devices=np.broadcast_to(np.arange(len(devices)), shape[:2]),
        flight=flight,
        loop_price=loop_price,
        stall_price=stall_price,
        end_price=end_price,
        end_cost=end_cost,
        entry_seconds=entry_seconds,
        head_seconds=head_seconds,
        entry_window=entry_window,
        head_load=options * head_seconds,
        head_bytes=np.array(
            [model.memory_bytes(num_blocks + 1, num_blocks + 2, 1, b) for b in size]
        ),
        term=term,
        compute=compute,
        window=windows,
        device_price=device_price,
        device_cost=device_cost,
        move_price=np.broadcast_to(move_price, (len(options), *move_price.shape)),
        link_load=links.load,
        link_loop=links.loop,
        link_price=link_price,
        link_cost=link_cost,
        link_error=links.error,
        link_codec=np.broadcast_to(np.arange(links.load.shape[-1]), links.load.shape),
        starves=(entry_window < flight)
        | np.any(fitting & (windows < flight[:, None, None]), axis=(1, 2)),
    )
    return _without_bad_codecs(costs).rows(np.flatnonzero((entry_window > 0) & (head_window > 0)))


def _term(problem: RoundProblem, cluster: ClusterProblem, options: Ints) -> Floats:
    """A cluster's part of design (11), without its codecs."""
    c0, c1, c2, _, c4 = problem.convergence.constants
    updates = options if problem.update_per_micro_batch else np.ones_like(options)
    samples = problem.mini_batch / updates
    steps = problem.local_steps
    return np.asarray(
        cluster.weight
        * (
            c0 / (steps * problem.convergence.num_rounds * updates)
            + c1 * updates / (len(problem.clusters) * samples)
            + c2 * (steps * updates) ** 2
            + c4 * cluster.loss_probability
        )
    )


def _move_seconds(problem: RoundProblem, cluster: ClusterProblem, device: Host) -> Floats:
    """Gathering of blocks s to e, and moving those that were not there, divided by the horizon: (s, e)."""
    num_blocks = problem.model.num_blocks
    block_seconds = state_seconds(problem, device, 1)
    if not np.isfinite(block_seconds):
        return np.zeros((num_blocks + 1, num_blocks + 1))
    new = [
        moved_blocks(cluster, device.host_id, unit, unit + 1) for unit in range(1, num_blocks + 1)
    ]
    upto = np.arange(num_blocks + 1) + np.cumsum([0, *new]) / problem.migration_horizon_rounds
    return np.asarray(block_seconds * (upto[None, :] - upto[:, None]))


def _without_bad_codecs(costs: ClusterCosts) -> ClusterCosts:
    """Leaves only codecs that no other of the same link beats in every respect."""
    dims = np.stack(
        [costs.link_load, costs.link_loop, costs.link_price, costs.link_cost, costs.link_error]
    )
    count = dims.shape[-1]
    beaten = np.isinf(costs.link_load)
    for a in range(count):
        for b in range(count):
            if a == b:
                continue
            better = np.all(dims[..., a] <= dims[..., b], axis=0)
            if b < a:  # of two that are equal, the first stays
                better &= np.any(dims[..., a] < dims[..., b], axis=0)
            beaten[..., b] |= better
    kept = np.argsort(beaten, axis=-1, kind="stable")
    most = max(1, int(np.max(np.sum(~beaten, axis=-1), initial=0)))
    tables = {
        name: np.take_along_axis(getattr(costs, name), kept, axis=-1)[..., :most]
        for name in _LINK_TABLES
    }
    gone = np.take_along_axis(beaten, kept, axis=-1)[..., :most]
    return replace(costs, **{**tables, "link_load": np.where(gone, np.inf, tables["link_load"])})
