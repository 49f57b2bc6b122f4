"""What every choice of one cluster costs, as arrays that are computed once for each search.

The arrays follow the model of `round_model.prediction`. They have these axes:

- m: a row, which has one number of micro-batches M, one number of slices sigma, and one codec of uploads;
- k: a device;
- d: a number of blocks, from 0 on;
- p: the first block of a segment, modulo the period with which costs repeat: see `ModelCost.pattern`;
- s and e: the first block of a segment, and the block after its last one;
- c: the option whether the stage recomputes: an index into `RoundProblem.recompute_options`;
- sender: the devices, and then the control unit;
- receiver: the devices, and then the edge server;
- codec: the codecs of the problem.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from operator import le
from typing import Any

import numpy as np
import numpy.typing as npt

from collapipe.allocation.round_model.problem import (
    RECOMPUTED_WORK,
    ClusterProblem,
    Host,
    RoundProblem,
)
from collapipe.allocation.round_model.weights_transfer import (
    push_bits,
    push_seconds,
    transfer_seconds,
    weights_seconds,
)
from collapipe.allocation.search.arrays import Bools, Floats, Ints
from collapipe.allocation.search.link_tables import AssumedLinks, link_tables
from collapipe.codec_table import UPLOAD_CODECS


@dataclass(frozen=True)
class EndStage:
    """The first or the last stage of a cluster, for each number of blocks that it runs. All axes are (m, d).

    Args:
        seconds: Compute time of a part, which is a micro-batch or a slice; infinite where the stage does not fit.
        window: Largest window that memory and the limit allow, as `parts_in_window`; 0 where the stage does not fit.
        delay_cost, summed_cost: See `ClusterCosts`; 0 where the stage does not fit.
    """

    seconds: Floats
    window: Ints
    delay_cost: Floats
    summed_cost: Floats

    def with_one_cost(self) -> "EndStage":
        """Returns the same stage with its summed cost counted as delay cost."""
        return replace(
            self,
            delay_cost=self.delay_cost + self.summed_cost,
            summed_cost=np.zeros_like(self.summed_cost),
        )

    def rows(self, index: npt.NDArray[np.intp]) -> "EndStage":
        return EndStage(*(getattr(self, field.name)[index] for field in fields(self)))


@dataclass(frozen=True)
class ClusterCosts:
    """The cost tables of one cluster.

    The objective of docs/scheduling.md (13) takes the largest *delay cost* of all clusters and adds the
    *summed costs* of all clusters. The delay cost of a pipeline is the sum of the `*_delay_cost` entries of
    its parts, plus `bottleneck_price` times its bottleneck. The summed cost contains energy and convergence.
    Both have the unit of the objective. A *price* is a cost for each second.

    Args:
        num_micro_batches, num_slices: M and sigma of each row. A row is left out if its first or last stage does not fit.
            (m)
        upload_codec: Index into the cluster's `upload_codecs`. (m)
        max_in_flight: Windows of this size never starve a stage. (m)
        loop_price: Price of the latency loop of a mini-batch. (m)
        bottleneck_price: Price of the bottleneck. (m)
        load_price: Price of a second of a step for which the edge server computes for other clusters. (m)
        fixed_delay_cost, fixed_summed_cost: Costs of the step, and of the convergence term. (m)
        first, last: The control unit, which runs the embedding and the first d blocks, and the edge server,
            which runs the last d blocks and the head.
        head_bytes: Least memory of the last stage, without the base of its host. (m, d)
        convergence_term: The cluster's part of (11), without the errors of the links' codecs. (m)
        compute: Seconds of a segment; infinite where it does not fit. (m, k, p, d, c)
        window: Largest window that memory and the limit allow, as `parts_in_window`; 0 where the segment does not fit.
            (m, k, p, d, c)
        segment_delay_cost, segment_summed_cost: Costs of computing a segment. (m, k, p, d, c)
        move_delay_cost: Cost of pushing, fetching and moving blocks s to e. (m, k, s, e)
        link_load: Seconds for which a part occupies a link; infinite where there is no link. The axes
            of all link tables are (m, sender, receiver, codec).
        link_loop: Seconds that the link adds to the latency loop.
        link_error: Part of the convergence term; 0 if that term has no limit.
        link_codec: Index into `problem.codecs`.
        starves: Whether some window may be the bottleneck. (m)
        one_cluster: Whether the problem has no other cluster.
    """

    num_micro_batches: Ints
    num_slices: Ints
    upload_codec: Ints
    max_in_flight: Ints
    loop_price: Floats
    bottleneck_price: Floats
    load_price: Floats
    fixed_delay_cost: Floats
    fixed_summed_cost: Floats
    first: "EndStage"
    last: "EndStage"
    head_bytes: Floats
    convergence_term: Floats
    compute: Floats
    window: Ints
    segment_delay_cost: Floats
    segment_summed_cost: Floats
    move_delay_cost: Floats
    link_load: Floats
    link_loop: Floats
    link_delay_cost: Floats
    link_summed_cost: Floats
    link_error: Floats
    link_codec: Ints
    starves: Bools
    one_cluster: bool

    @property
    def num_rows(self) -> int:
        return len(self.num_micro_batches)

    @property
    def num_parts(self) -> Ints:
        return np.asarray(self.num_micro_batches * self.num_slices)

    @property
    def num_devices(self) -> int:
        return int(self.compute.shape[1])

    @property
    def num_blocks(self) -> int:
        return int(self.compute.shape[3]) - 1

    @property
    def head_load(self) -> Floats:
        """Seconds of the edge server's processor that the cluster needs for a mini-batch. (m, d)"""
        return np.asarray(self.num_parts[:, None] * self.last.seconds)

    def edge_bottleneck(self, other_load: float) -> Floats:
        """Returns the bottleneck that the edge server's load by other clusters causes, if there are several parts. (m, d)"""
        following = np.maximum(self.num_parts - 1, 1)[:, None]
        return np.asarray(self.last.seconds + other_load / following)

    def rows(self, chosen: Sequence[int] | npt.NDArray[np.intp]) -> "ClusterCosts":
        index = np.asarray(chosen, dtype=np.intp)
        changes: dict[str, Any] = {}
        for field in fields(self):
            table = getattr(self, field.name)
            if isinstance(table, EndStage):
                changes[field.name] = table.rows(index)
            elif isinstance(table, np.ndarray):
                changes[field.name] = table[index]
        return replace(self, **changes)


_LINK_TABLES = (
    "link_load",
    "link_loop",
    "link_delay_cost",
    "link_summed_cost",
    "link_error",
    "link_codec",
)


def largest_windows(
    problem: RoundProblem,
    host: Host,
    state_bytes: Floats,
    stash_bytes: Floats,
    micro_batch_size: Floats,
    max_in_flight: Ints,
    *,
    recompute: bool,
) -> Ints:
    """Returns the largest windows that a host's memory and the job allow: docs/scheduling.md (10).

    The arrays broadcast against each other. A window is 0 where not even one micro-batch fits.

    Args:
        state_bytes, stash_bytes: State and stash of the units that the host would run; see `ModelCost`.
        micro_batch_size: In samples.
        max_in_flight: Most micro-batches that can be in flight.
    """
    most = (
        max_in_flight
        if problem.in_flight_limit is None
        else np.minimum(max_in_flight, problem.in_flight_limit)
    )
    shape = np.broadcast_shapes(state_bytes.shape, micro_batch_size.shape, max_in_flight.shape)
    limit = host.memory_bytes
    if limit is None:
        return np.broadcast_to(most, shape).astype(np.int64)

    def fits(window: Ints) -> Bools:
        # The order of operations is that of `ModelCost.memory_bytes`, so that both round alike.
        activation = problem.model.activation_bytes
        kept = window * activation + stash_bytes if recompute else window * stash_bytes
        need = state_bytes + micro_batch_size * (kept + 2 * window * activation)
        return np.asarray(host.base_bytes + need <= limit)

    low, high = np.zeros(shape, np.int64), np.broadcast_to(most, shape).astype(np.int64)
    while np.any(low < high):
        middle: Ints = (low + high + 1) // 2
        fit = fits(middle)
        low, high = np.where(fit, middle, low), np.where(fit, high, middle - 1)
    return low


def cluster_costs(
    problem: RoundProblem, cluster: ClusterProblem, assumed: AssumedLinks, *, one_cluster: bool
) -> ClusterCosts:
    """Tabulates one cluster, with a row for each M, each sigma and each codec of uploads.

    There is no row for an M whose first or last stage does not fit, so there may be none.

    If the problem has `one_cluster`, nothing distinguishes delay costs from summed costs. So all costs then count as
    delay costs, and summed costs are 0.
    """
    model, num_blocks = problem.model, problem.model.num_blocks
    devices = cluster.devices
    options = list(itertools.product(cluster.micro_batch_options, cluster.slice_options))
    codecs = _useful_upload_codecs(problem, cluster)
    num_micro_batches, num_slices = np.tile(np.array(options, np.int64).T, len(codecs))
    upload_codec = np.repeat(np.array(codecs, np.int64), len(options))
    num_parts = num_micro_batches * num_slices
    micro_batch_size, size = problem.mini_batch / num_micro_batches, problem.mini_batch / num_parts
    flushes = problem.update_per_micro_batch
    max_in_flight = np.ones_like(num_micro_batches) if flushes else num_micro_batches
    passes = (problem.local_steps * num_parts).astype(float)
    second_price = problem.penalty_weight / problem.reference_seconds
    loops, repeats = (num_parts, 0) if flushes else (1, num_parts - 1)
    ones = np.ones(len(num_micro_batches))
    loop_price: Floats = second_price * problem.local_steps * (loops * ones)
    bottleneck_price: Floats = second_price * problem.local_steps * (repeats * ones)

    def seconds_of(host: Host, codec: int) -> Floats:
        """Returns the seconds of pushing, fetching and moving all units before each unit on a host: (u)."""
        seconds = [
            weights_seconds(problem, cluster, host, cluster.upload_codecs[codec], u, u + 1)
            for u in range(num_blocks + 2)
        ]
        return np.cumsum([0.0, *(one.per_round(problem) for one in seconds)])

    # The first axis is for the codecs of uploads. A device whose links to the edge server are dead holds nothing.
    up_to_blocks = np.array([[seconds_of(device, c)[1:-1] for device in devices] for c in codecs])
    reachable = np.all(np.isfinite(up_to_blocks), axis=(0, 2))
    up_to_blocks[:, ~reachable] = 0.0
    convergence_term = _convergence_term(problem, cluster, num_micro_batches, upload_codec)
    num_updates = num_micro_batches if flushes else np.ones_like(num_micro_batches)
    fixed_delay_cost: Floats = (
        second_price * problem.local_steps * (num_updates * np.float64(cluster.step_seconds))
    )
    fixed_summed_cost = np.zeros(len(num_micro_batches))
    if problem.convergence.weight:
        weight = problem.penalty_weight * problem.convergence.weight
        fixed_summed_cost = weight * convergence_term

    def push_costs(host: Host, ranges: Sequence[tuple[int, int]]) -> Floats:
        """Returns the price of the energy for pushing each range of units. (m, d)"""
        price = host.joule_weight * host.push_watts
        if not price or host.host_id == cluster.edge_server.host_id:
            return np.zeros((1, len(ranges)))
        names = [cluster.upload_codecs[c] for c in codecs]
        bits = [[push_bits(problem, name, *units) for units in ranges] for name in names]
        sending = [[transfer_seconds(each, host.push_bps) for each in row] for row in bits]
        return price * np.repeat(sending, len(options), axis=0)

    def in_parts(windows: Ints) -> Ints:
        """Converts windows (m, ...) as `parts_in_window` does. 0 stays 0."""
        slices = num_slices.reshape(-1, *([1] * (windows.ndim - 1)))
        return np.where(windows > 0, (windows - 1) * slices + 1, 0)

    def stash_with_slices(ranges: Sequence[tuple[int, int]]) -> Floats:
        """Returns the stash of each range of units for each row: (m, d)."""
        stash = [model.stash_bytes(*units) for units in ranges]
        return np.array(
            [
                [
                    bytes_ + model.slice_bytes(*units, s)
                    for bytes_, units in zip(stash, ranges, strict=True)
                ]
                for s in num_slices
            ]
        )

    def end_stage(
        host: Host,
        ranges: Sequence[tuple[int, int]],
        move_seconds: Sequence[Floats],
        may_run_blocks: bool,
        waited: float,
        recompute: bool,
    ) -> EndStage:
        """Tabulates a host that runs one of these ranges of units; `move_seconds` has (d) for each codec.

        `waited` is the share of its compute time that other stages wait for: 1 - d_k / c_k of (4).
        """
        windows = in_parts(
            largest_windows(
                problem,
                host,
                np.array([model.state_bytes(*units) for units in ranges]),
                stash_with_slices(ranges),
                micro_batch_size[:, None],
                max_in_flight[:, None],
                recompute=recompute,
            )
        )
        work = [model.work(*units, host.end_unit_work) for units in ranges]
        seconds = np.array(
            [[host.compute_seconds(b, one, recompute=recompute) for one in work] for b in size]
        )
        energy_cost = passes[:, None] * host.joule_weight * host.busy_watts * seconds
        energy_cost = energy_cost + push_costs(host, ranges)
        moves = second_price * np.repeat(move_seconds, len(options), axis=0)
        fits = (windows > 0) & np.isfinite(moves)
        if not may_run_blocks:
            fits[:, 1:] = False
        return EndStage(
            np.where(fits, seconds, np.inf),
            np.where(fits, windows, 0),
            np.where(fits, loop_price[:, None] * waited * seconds + moves, 0.0),
            np.where(fits, energy_cost, 0.0),
        )

    control_unit, edge_server, head = cluster.control_unit, cluster.edge_server, num_blocks + 1
    blocks = np.arange(num_blocks + 1)
    first = end_stage(
        control_unit,
        [(0, 1 + d) for d in blocks],
        [seconds_of(control_unit, c)[1:-1] for c in codecs],
        problem.blocks_on_control_unit,
        1.0,
        problem.recomputes_by_default,
    )
    up_to = seconds_of(edge_server, codecs[0])
    last = end_stage(
        edge_server,
        [(head - d, head + 1) for d in blocks],
        [(up_to[-1] - up_to)[head:0:-1] for _ in codecs],
        problem.blocks_on_edge_server,
        1.0 - edge_server.deferred_share,
        recompute=False,
    )
    # Segments of each number of blocks, which start at each block of the pattern as far as the model has room.
    starts = [np.minimum(start, num_blocks - blocks[1:]) + 1 for start in range(model.period)]
    ranges = [list(zip(start, start + blocks[1:], strict=True)) for start in starts]
    state, work = (
        np.array([[cost(*units) for units in listed] for listed in ranges])
        for cost in (model.state_bytes, model.work)
    )
    stash = np.stack([stash_with_slices(listed) for listed in ranges], axis=1)
    recomputes = problem.recompute_options
    shape = (len(num_micro_batches), len(devices), model.period, num_blocks + 1, len(recomputes))
    compute, windows = np.full(shape, np.inf), np.zeros(shape, np.int64)
    segment_delay_cost, segment_summed_cost = np.zeros(shape), np.zeros(shape)
    for k, c in itertools.product(np.flatnonzero(reachable), range(len(recomputes))):
        device, factor = devices[k], RECOMPUTED_WORK if recomputes[c] else 1.0
        window = windows[:, k, :, :, c]
        window[..., 1:] = in_parts(
            largest_windows(
                problem,
                device,
                state,
                stash,
                micro_batch_size[:, None, None],
                max_in_flight[:, None, None],
                recompute=recomputes[c],
            )
        )
        block_seconds = device.seconds_per_sample * np.pad(work, ((0, 0), (1, 0)))
        varying = size[:, None, None] * block_seconds
        seconds = device.seconds_per_micro_batch + factor * varying
        deferred = device.deferred_share * (device.seconds_per_micro_batch + varying)
        compute[:, k, :, :, c] = np.where(window > 0, seconds, np.inf)
        waited = loop_price[:, None, None] * (seconds - deferred)
        segment_delay_cost[:, k, :, :, c] = np.where(window > 0, waited, 0.0)
        watt_price = device.joule_weight * device.busy_watts
        segment_summed_cost[:, k, :, :, c] = passes[:, None, None] * watt_price * seconds
        for start, listed in enumerate(ranges):
            segment_summed_cost[:, k, start, 1:, c] += push_costs(device, listed)
    move_delay_cost = second_price * (up_to_blocks[..., None, :] - up_to_blocks[..., :, None])
    takes_turns = (num_micro_batches == 1) & (num_slices > 1)
    links = link_tables(problem, cluster, assumed, size, passes, takes_turns)
    link_delay_cost = loop_price[:, None, None, None] * links.loop
    link_summed_cost = links.summed_cost
    if one_cluster:
        fixed_delay_cost = fixed_delay_cost + fixed_summed_cost
        segment_delay_cost = segment_delay_cost + segment_summed_cost
        link_delay_cost = link_delay_cost + link_summed_cost
        fixed_summed_cost = np.zeros_like(fixed_summed_cost)
        segment_summed_cost = np.zeros_like(segment_summed_cost)
        link_summed_cost = np.zeros_like(link_summed_cost)
        first, last = first.with_one_cost(), last.with_one_cost()
    max_in_flight = in_parts(max_in_flight)
    first_narrow = (first.window > 0) & (first.window < max_in_flight[:, None])
    narrow = (windows > 0) & (windows < max_in_flight[:, None, None, None, None])
    costs = ClusterCosts(
        num_micro_batches=num_micro_batches,
        num_slices=num_slices,
        upload_codec=upload_codec,
        max_in_flight=max_in_flight,
        loop_price=loop_price,
        bottleneck_price=bottleneck_price,
        load_price=np.zeros_like(loop_price) if flushes else loop_price,
        fixed_delay_cost=fixed_delay_cost,
        fixed_summed_cost=fixed_summed_cost,
        first=first,
        last=last,
        head_bytes=np.array(
            [
                [model.memory_bytes(head - d, head + 1, 1, b, num_slices=s) for d in blocks]
                for b, s in zip(micro_batch_size, num_slices.tolist(), strict=True)
            ]
        ),
        convergence_term=convergence_term,
        compute=compute,
        window=windows,
        segment_delay_cost=segment_delay_cost,
        segment_summed_cost=segment_summed_cost,
        move_delay_cost=np.repeat(move_delay_cost, len(options), axis=0),
        link_load=links.load,
        link_loop=links.loop,
        link_delay_cost=link_delay_cost,
        link_summed_cost=link_summed_cost,
        link_error=links.error,
        link_codec=np.broadcast_to(np.arange(links.load.shape[-1]), links.load.shape),
        starves=np.any(first_narrow, axis=1) | np.any(narrow, axis=(1, 2, 3, 4)),
        one_cluster=one_cluster,
    )
    fitting_rows = np.flatnonzero(
        np.any(first.window > 0, axis=1) & np.any(last.window > 0, axis=1)
    )
    return _without_dominated_codecs(costs).rows(fitting_rows)


def _useful_upload_codecs(problem: RoundProblem, cluster: ClusterProblem) -> list[int]:
    """Returns the codecs of uploads that no other codec beats in its error and in the time and energy of every host.

    A codec is an index into the cluster's `upload_codecs`.
    """
    names, last = cluster.upload_codecs, problem.model.num_blocks + 1
    priced = any(host.joule_weight * host.push_watts for host in cluster.hosts.values())
    rows = [
        (
            problem.convergence.constants[3] and UPLOAD_CODECS[name].relative_error,
            priced and UPLOAD_CODECS[name].bytes_ratio,
            push_seconds(problem, cluster.control_unit, name, 0, 1),
            push_seconds(problem, cluster.control_unit, name, 1, last),
            *(push_seconds(problem, device, name, 1, last) for device in cluster.devices),
        )
        for name in names
    ]
    useful: list[int] = []
    for c in sorted(range(len(rows)), key=lambda c: rows[c]):
        if not any(all(map(le, rows[other], rows[c])) for other in useful):
            useful.append(c)
    return useful


def _convergence_term(
    problem: RoundProblem, cluster: ClusterProblem, num_micro_batches: Ints, upload_codec: Ints
) -> Floats:
    """Returns a cluster's part of docs/scheduling.md (11), without the errors of its links' codecs: (m)."""
    c0, c1, c2, c3, c4 = problem.convergence.constants
    errors = np.array([UPLOAD_CODECS[name].relative_error for name in cluster.upload_codecs])
    updates = (
        num_micro_batches if problem.update_per_micro_batch else np.ones_like(num_micro_batches)
    )
    samples = problem.mini_batch / updates
    steps = problem.local_steps
    return np.asarray(
        cluster.weight
        * (
            c0 / (steps * problem.convergence.num_rounds * updates)
            + c1 * updates / (len(problem.clusters) * samples)
            + c2 * (steps * updates) ** 2
            + c3 * errors[upload_codec]
            + c4 * cluster.loss_probability
        )
    )


def _without_dominated_codecs(costs: ClusterCosts) -> ClusterCosts:
    """Removes a codec from a link if another codec of that link is at least as good in every respect."""
    dims = np.stack(
        [
            costs.link_load,
            costs.link_loop,
            costs.link_delay_cost,
            costs.link_summed_cost,
            costs.link_error,
        ]
    )
    count = dims.shape[-1]
    dominated = np.isinf(costs.link_load)
    for a in range(count):
        for b in range(count):
            if a == b:
                continue
            better = np.all(dims[..., a] <= dims[..., b], axis=0)
            if b < a:  # Of two equal codecs, the first one stays.
                better &= np.any(dims[..., a] < dims[..., b], axis=0)
            dominated[..., b] |= better
    kept = np.argsort(dominated, axis=-1, kind="stable")
    most = max(1, int(np.max(np.sum(~dominated, axis=-1), initial=0)))
    tables: dict[str, Any] = {
        name: np.take_along_axis(getattr(costs, name), kept, axis=-1)[..., :most]
        for name in _LINK_TABLES
    }
    removed = np.take_along_axis(dominated, kept, axis=-1)[..., :most]
    tables["link_load"] = np.where(removed, np.inf, tables["link_load"])
    return replace(costs, **tables)
