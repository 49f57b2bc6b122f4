"""The objective as a function of the transfer times on links that share channels.

The rest of the plans is given. `bandwidth` and `power` minimise this function.
"""

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from collapipe.allocation.round_model.prediction import (
    LinkPrediction,
    latency_loops,
    other_edge_seconds,
    parts_in_window,
    predict,
)
from collapipe.allocation.round_model.problem import (
    Host,
    Link,
    RadioLink,
    RoundPlan,
    RoundProblem,
    UploadPlan,
)
from collapipe.allocation.round_model.uploads import upload_stages
from collapipe.allocation.round_model.weights_transfer import push_bits, sending_seconds
from collapipe.allocation.search.arrays import Bools, Floats
from collapipe.codec_table import CODECS

LinkPosition: TypeAlias = tuple[int, int]
"""Index of a cluster, and index of a link in the cluster's plan."""


@dataclass(frozen=True)
class RoundDelay:
    """The round time of each cluster as a function of the transfer times t: docs/scheduling.md (5) and (6).

    The vector t has one entry for each of J directions, in seconds. Cluster n takes

        constant[n] + times[n] @ t + repeats[n] * z[n]

    seconds for a round. Its bottleneck z[n] is the largest of `least[n]` and the value of each row r of this
    cluster, `row_constant[r] + row_times[r] @ t`. The shapes are (N) and (N, J) for N clusters, and (R) and
    (R, J) for R rows. `row_cluster` has the cluster of each row.
    """

    constant: Floats
    times: Floats
    repeats: Floats
    least: Floats
    row_cluster: npt.NDArray[np.intp]
    row_constant: Floats
    row_times: Floats

    def bottlenecks(self, times: Floats) -> Floats:
        found: Floats = self.least.copy()
        np.maximum.at(found, self.row_cluster, self.row_constant + self.row_times @ times)
        return found

    def round_seconds(self, times: Floats) -> Floats:
        worst = self.bottlenecks(times)
        found: Floats = self.constant + self.times @ times + self.repeats * worst
        return found


@dataclass(frozen=True)
class SharedUploads:
    """The uploads of all clusters in which the energy of an upload costs something. All vectors are (P).

    Args:
        positions: Cluster and stage of each.
        cluster: Index of the cluster.
        hertz: Bandwidth of the channel that the uploads of the cluster share.
        bits: What the host sends in a round, divided by the efficiency of its link.
        gain: h / (N0 + I0).
        most_nats: mu log(2) of (1).
        limit_watts: Largest power.
        joule_price: Cost of a joule in the objective.
    """

    positions: tuple[tuple[int, int], ...]
    cluster: npt.NDArray[np.intp]
    hertz: Floats
    bits: Floats
    gain: Floats
    most_nats: Floats
    limit_watts: Floats
    joule_price: Floats

    def times(self, shares: Floats, watts: Floats) -> Floats:
        """Returns for how long each host sends: docs/scheduling.md (1) and (6)."""
        nats = np.minimum(np.log1p(watts * self.gain / shares), self.most_nats)
        return np.asarray(self.bits * math.log(2) / (shares * nats))

    def least_watts(self, shares: Floats, times: Floats) -> Floats:
        """Returns the least powers that reach these times, within their limits."""
        signal = np.expm1(np.minimum(self.bits * math.log(2) / (shares * times), 700.0))
        return np.asarray(np.minimum(signal * shares / self.gain, self.limit_watts))


@dataclass(frozen=True)
class Point:
    """Shares and powers, and the transfer times in seconds that follow from them.

    `shares` is (m), `watts` in W and `times` are (J), and the three of uploads are (P).
    """

    shares: Floats
    watts: Floats
    times: Floats
    upload_shares: Floats
    upload_watts: Floats
    upload_times: Floats


@dataclass(frozen=True)
class SharedLinks:
    """The links of the plans that share channels.

    Vectors over m links have the shape (m). Vectors over directions have the shape (J) with J = 2 m: first
    the forward direction of every link, then the backward directions. A transfer time is the seconds of a
    micro-batch on the link, without coding.

    Args:
        radio: Whether a direction is a radio. (J)
        channel: Index of the link's channel. (m)
        totals: Bandwidth of each channel, in Hz or bit/s.
        bits: Bits of a micro-batch. (J)
        gain: h / (N0 + I0); 0 on wires. The signal-to-noise ratio is this gain times the power over the
            share. (J)
        efficiency: Measured rate over that of docs/scheduling.md (1). (J)
        most_nats: mu log(2) of (1). (J)
        capacity_bps: Rate of a wire; infinite on radios. (J)
        limit_watts: Largest power of the sender, for all of its directions together; 0 on wires. (J)
        same_sender: Whether two directions have the same sender in the same cluster. (J, J)
        joule_price: Cost in the objective for a joule that each micro-batch takes. (J)
        second_price: Cost in the objective for a second of the round: V / tau_ref.
        delay: The round time as a function of the transfer times, without sending `uploads`.
        uploads: All other uploads keep shares and powers of the plans.
    """

    positions: tuple[LinkPosition, ...]
    radio: Bools
    channel: npt.NDArray[np.intp]
    channel_names: tuple[str, ...]
    totals: Floats
    bits: Floats
    gain: Floats
    efficiency: Floats
    most_nats: Floats
    capacity_bps: Floats
    limit_watts: Floats
    same_sender: Bools
    joule_price: Floats
    second_price: float
    delay: RoundDelay
    uploads: SharedUploads

    def point(
        self, shares: Floats, watts: Floats, upload_shares: Floats, upload_watts: Floats
    ) -> Point:
        upload_times = self.uploads.times(upload_shares, upload_watts)
        times = self.times(shares, watts)
        return Point(shares, watts, times, upload_shares, upload_watts, upload_times)

    @property
    def has_partner(self) -> Bools:
        """Whether the sender of a direction sends on another one, too. (J)"""
        return np.asarray(self.radio & (self.same_sender.sum(axis=1) > 1))

    def round_seconds(self, point: Point) -> Floats:
        """Returns the round time of each cluster, without T_fixed: docs/scheduling.md (6)."""
        seconds = self.delay.round_seconds(point.times)
        uploading = np.zeros_like(seconds)
        np.maximum.at(uploading, self.uploads.cluster, point.upload_times)
        return np.asarray(seconds + uploading)

    def equal_shares(self) -> Floats:
        """Returns the share of each link if its channel is split equally. (m)"""
        users = np.bincount(self.channel, minlength=len(self.totals))
        return np.asarray((self.totals / users)[self.channel])

    def times(self, shares: Floats, watts: Floats) -> Floats:
        """Returns the transfer times for shares (m) and powers (J): docs/scheduling.md (1) and (3). (J)"""
        both = np.concatenate([shares, shares])
        with np.errstate(divide="ignore", invalid="ignore"):
            nats = np.minimum(np.log1p(watts * self.gain / both), self.most_nats)
            hertz_rate = self.efficiency * both * nats / math.log(2)
            rate = np.where(self.radio, hertz_rate, np.minimum(both, self.capacity_bps))
            return np.where(rate > 0, self.bits / rate, math.inf)

    def least_watts(self, shares: Floats, times: Floats) -> Floats:
        """Returns the least powers that reach these times, within their limits; 0 on wires. (J)

        This is the inverse of docs/scheduling.md (1).
        """
        both = np.concatenate([shares, shares])
        signal = np.expm1(
            np.minimum(self.bits * math.log(2) / (self.efficiency * both * times), 700.0)
        )
        gain = np.where(self.radio, self.gain, math.inf)
        return np.asarray(np.minimum(signal * both / gain, self.limit_watts))

    def objective(self, point: Point) -> float:
        """Returns the part of docs/scheduling.md (13) that depends on shares and powers."""
        joules = self.joule_price @ (point.watts * point.times)
        joules += self.uploads.joule_price @ (point.upload_watts * point.upload_times)
        return self.second_price * float(self.round_seconds(point).max()) + float(joules)

    def applied(self, plans: RoundPlan, point: Point) -> RoundPlan:
        """Returns the plans with the shares and powers of a point."""
        links = [list(plan.links) for plan in plans]
        for i, (n, position) in enumerate(self.positions):
            links[n][position] = replace(
                links[n][position],
                share=float(point.shares[i]),
                forward_watts=float(point.watts[i]),
                backward_watts=float(point.watts[len(self.positions) + i]),
            )
        uploads = [list(plan.uploads) for plan in plans]
        for i, (n, stage) in enumerate(self.uploads.positions):
            share, watts = float(point.upload_shares[i]), float(point.upload_watts[i])
            uploads[n][stage] = UploadPlan(share, watts)
        return tuple(
            replace(plan, links=tuple(given), uploads=tuple(uploading))
            for plan, given, uploading in zip(plans, links, uploads, strict=True)
        )

    def powers(self, plans: RoundPlan) -> Floats:
        """Returns the powers of the plans on the shared links. (J)"""
        given = [plans[n].links[i] for n, i in self.positions]
        return np.array(
            [link.forward_watts for link in given] + [link.backward_watts for link in given]
        )


def shared_links(problem: RoundProblem, plans: RoundPlan) -> SharedLinks | None:
    """Collects the links that share channels; returns `None` if there are none or nothing is sent.

    The shares and powers of the plans do not matter on these links. On all other links they count.

    Args:
        plans: With the uploads of `with_soonest_uploads`.
    """
    positions = [
        (n, i)
        for n, (cluster, plan) in enumerate(zip(problem.clusters, plans, strict=True))
        if cluster.channel is not None and problem.model.activation_bytes
        for i in range(len(plan.links))
    ]
    if not positions:
        return None
    uploads = _shared_uploads(problem, plans)
    names = sorted({str(problem.clusters[n].channel) for n, _ in positions})
    count = len(positions)
    columns = {name: np.zeros(2 * count) for name in ("bits", "gain", "limit", "joules")}
    senders = [(n, i) for n, i in positions] + [(n, i + 1) for n, i in positions]  # as stages
    efficiency, capacity = np.ones(2 * count), np.full(2 * count, math.inf)
    most_nats = np.full(2 * count, math.inf)
    for at, key in enumerate(positions):
        plan = plans[key[0]]
        sent = 8 * problem.mini_batch / plan.num_parts * problem.model.activation_bytes
        for j, (link, host) in zip((at, count + at), _ends(problem, plans, key), strict=True):
            columns["bits"][j] = sent * CODECS[plan.links[key[1]].codec].bytes_ratio
            if isinstance(link, RadioLink):
                columns["gain"][j] = link.gain / link.noise_watts_per_hertz
                columns["limit"][j] = host.max_transmit_watts
                columns["joules"][j] = host.joule_weight * problem.local_steps * plan.num_parts
                efficiency[j] = link.efficiency
                most_nats[j] = link.most_bits_per_hertz * math.log(2)
            else:
                capacity[j] = link.capacity_bps
    return SharedLinks(
        positions=tuple(positions),
        radio=columns["gain"] > 0,
        channel=np.array([names.index(str(problem.clusters[n].channel)) for n, _ in positions]),
        channel_names=tuple(names),
        totals=np.array([problem.channels[name] for name in names]),
        bits=columns["bits"],
        gain=columns["gain"],
        efficiency=efficiency,
        most_nats=most_nats,
        capacity_bps=capacity,
        limit_watts=columns["limit"],
        same_sender=np.array([[one == other for other in senders] for one in senders]),
        joule_price=columns["joules"],
        second_price=problem.penalty_weight / problem.reference_seconds,
        delay=_round_delay(
            problem, plans, {key: at for at, key in enumerate(positions)}, set(uploads.cluster)
        ),
        uploads=uploads,
    )


def _shared_uploads(problem: RoundProblem, plans: RoundPlan) -> SharedUploads:
    positions, rows = [], []
    for n, (cluster, plan) in enumerate(zip(problem.clusters, plans, strict=True)):
        hosts = cluster.hosts
        stages = [(k, plan.stages[k]) for k in upload_stages(problem, cluster, plan)]
        if not any(hosts[stage.host_id].joule_weight for _, stage in stages):
            continue  # Full power is best.
        for k, stage in stages:
            host, link = (
                hosts[stage.host_id],
                cluster.links[stage.host_id, cluster.edge_server.host_id],
            )
            assert isinstance(link, RadioLink)
            bits = push_bits(problem, plan.upload_codec, stage.start_unit, stage.stop_unit)
            positions.append((n, k))
            rows.append(
                (
                    problem.channels[cluster.channel or ""],
                    bits / link.efficiency,
                    link.gain / link.noise_watts_per_hertz,
                    link.most_bits_per_hertz * math.log(2),
                    host.max_transmit_watts,
                    host.joule_weight,
                )
            )
    columns = np.array(rows).reshape(-1, 6).T
    return SharedUploads(
        tuple(positions), np.array([n for n, _ in positions], dtype=np.intp), *columns
    )


def _round_delay(
    problem: RoundProblem,
    plans: RoundPlan,
    index: Mapping[LinkPosition, int],
    uploading: Collection[int],
) -> RoundDelay:
    num_clusters, count = len(plans), len(index)
    constant, repeats, least = (np.zeros(num_clusters) for _ in range(3))
    times = np.zeros((num_clusters, 2 * count))
    # Each row has a cluster, a constant, a factor and directions.
    rows: list[tuple[int, float, float, list[int]]] = []
    prediction, edge_seconds = predict(problem, plans), other_edge_seconds(problem, plans)
    for n, (cluster, plan) in enumerate(zip(problem.clusters, plans, strict=True)):
        predicted = prediction.clusters[n]
        computes = [stage.compute_seconds for stage in predicted.stages]
        links = [
            _without_transfer(problem, plans, (n, i)) if (n, i) in index else link
            for i, link in enumerate(predicted.links)
        ]
        shared = [
            (i, (index[n, i], count + index[n, i])) for i in range(len(links)) if (n, i) in index
        ]
        passes = plan.num_parts if problem.update_per_micro_batch else 1
        loops = latency_loops(
            computes, [stage.deferred_seconds for stage in predicted.stages], links
        )
        constant[n] = (
            problem.local_steps * passes * (loops[0] + cluster.step_seconds)
            + predicted.push_seconds
            + predicted.fetch_seconds
            + predicted.migrate_seconds / problem.migration_horizon_rounds
        )
        if n in uploading:
            constant[n] -= max(seconds for seconds, _ in sending_seconds(problem, cluster, plan))
        for _, pair in shared:
            times[n, pair] = problem.local_steps * passes
        if problem.update_per_micro_batch or plan.num_parts == 1:
            # No micro-batch follows another one, so there is no bottleneck.
            constant[n] += (
                0.0 if problem.update_per_micro_batch else problem.local_steps * edge_seconds[n]
            )
            continue
        repeats[n] = problem.local_steps * (plan.num_parts - 1)
        own = [link.load_seconds for i, link in enumerate(links) if (n, i) not in index]
        least[n] = max([*computes, *own])
        if edge_seconds[n]:
            least[n] = max(least[n], computes[-1] + edge_seconds[n] / (plan.num_parts - 1))
        for i, pair in shared:
            coding = links[i].forward_seconds
            if plan.takes_turns or isinstance(_ends(problem, plans, (n, i))[0][0], RadioLink):
                rows.append((n, 2 * coding, 1.0, list(pair)))
            else:
                rows.extend((n, coding, 1.0, [j]) for j in pair)
        for k, stage in enumerate(plan.stages):
            if stage.in_flight < plan.num_micro_batches:
                after = [j for i, pair in shared if i >= k for j in pair]
                window = parts_in_window(stage.in_flight, plan.num_slices)
                rows.append((n, loops[k] / window, 1 / window, after))
    row_times = np.zeros((len(rows), 2 * count))
    for r, (_, _, factor, directions) in enumerate(rows):
        row_times[r, directions] = factor
    return RoundDelay(
        constant,
        times,
        repeats,
        least,
        np.array([row[0] for row in rows], dtype=np.intp),
        np.array([row[1] for row in rows], dtype=np.float64),
        row_times,
    )


def _ends(
    problem: RoundProblem, plans: RoundPlan, key: LinkPosition
) -> tuple[tuple[Link, Host], tuple[Link, Host]]:
    """Returns both directions of a link, each with the host that sends."""
    cluster, stages = problem.clusters[key[0]], plans[key[0]].stages
    first, second = stages[key[1]].host_id, stages[key[1] + 1].host_id
    hosts = cluster.hosts
    return (cluster.links[first, second], hosts[first]), (
        cluster.links[second, first],
        hosts[second],
    )


def _without_transfer(problem: RoundProblem, plans: RoundPlan, key: LinkPosition) -> LinkPrediction:
    """Returns the times of a link without the transfer times: only coding and latency remain."""
    plan = plans[key[0]]
    raw_bytes = problem.mini_batch / plan.num_parts * problem.model.activation_bytes
    coding = raw_bytes * CODECS[plan.links[key[1]].codec].seconds_per_byte
    round_trip = _ends(problem, plans, key)[0][0].round_trip_seconds
    return LinkPrediction(coding, coding, round_trip, coding)
