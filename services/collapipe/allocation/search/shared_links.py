"""What design (13) is of the times on links that share channels, everything else in a plan being given."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from collapipe.allocation.round_model.prediction import (
    LinkPrediction,
    head_load_seconds,
    predict,
)
from collapipe.allocation.round_model.problem import (
    Host,
    Link,
    RadioLink,
    RoundPlan,
    RoundProblem,
)
from collapipe.codecs import CODECS

Vector: TypeAlias = NDArray[np.float64]
_Key: TypeAlias = tuple[int, int]  # cluster and link


@dataclass(frozen=True)
class DelayRows:
    """Design (5) and (6) as functions of the times of J directions, in seconds.

    Cluster n of N takes `constant[n] + times[n] @ t + repeats[n] * z[n]` seconds of a round, and its bottleneck z[n] is
    the largest of `least[n]` and its rows `row_constant[r] + row_times[r] @ t`.

    Args:
        constant, repeats, least: (N).
        times: (N, J).
        row_cluster: Whose bottleneck a row bounds, (R).
        row_constant: (R).
        row_times: (R, J).
    """

    constant: Vector
    times: Vector
    repeats: Vector
    least: Vector
    row_cluster: NDArray[np.intp]
    row_constant: Vector
    row_times: Vector

    def bottlenecks(self, times: Vector) -> Vector:
        """Bottleneck of each cluster, (N)."""
        found: Vector = self.least.copy()
        np.maximum.at(found, self.row_cluster, self.row_constant + self.row_times @ times)
        return found

    def round_seconds(self, times: Vector) -> Vector:
        """What each cluster adds to the maximum of design (6), (N)."""
        worst = self.bottlenecks(times)
        found: Vector = self.constant + self.times @ times + self.repeats * worst
        return found


@dataclass(frozen=True)
class SharedLinks:
    """The links of a plan that share channels.

    With m links, vectors over directions have J = 2 m entries: forward of every link, then backward. Times are seconds
    of a micro-batch on the link, without coding.

    Args:
        positions: Cluster and link of each, (m).
        radio: Which directions are radios, (J).
        channel: Index of its channel, (m).
        channel_names: The channels.
        totals: What each channel shares.
        bits: That a micro-batch puts on the link, (J).
        gain: h / (N0 + I0): times W over Hz it is the signal to noise ratio; 0 on wires, (J).
        efficiency: Of design (1), (J).
        capacity_bps: Of wires; infinite on radios, (J).
        limit_watts: Of the transmitter; 0 on wires, (J).
        joule_weight: What a joule of a micro-batch costs in design (13), (J).
        delay_weight: What a second of the round costs: V / tau_ref.
        delay: The delay as a function of times.
    """

    positions: tuple[_Key, ...]
    radio: NDArray[np.bool_]
    channel: NDArray[np.intp]
    channel_names: tuple[str, ...]
    totals: Vector
    bits: Vector
    gain: Vector
    efficiency: Vector
    capacity_bps: Vector
    limit_watts: Vector
    joule_weight: Vector
    delay_weight: float
    delay: DelayRows

    def equal_shares(self) -> Vector:
        """What each link has when its channel is split equally, (m)."""
        users = np.bincount(self.channel, minlength=len(self.totals))
        return np.asarray((self.totals / users)[self.channel])

    def times(self, shares: Vector, watts: Vector) -> Vector:
        """Times of all directions: design (1) and (3). Shares are (m), powers (J)."""
        both = np.concatenate([shares, shares])
        with np.errstate(divide="ignore", invalid="ignore"):
            hertz_rate = self.efficiency * both * np.log1p(watts * self.gain / both) / math.log(2)
            rate = np.where(self.radio, hertz_rate, np.minimum(both, self.capacity_bps))
            return np.where(rate > 0, self.bits / rate, math.inf)

    def least_watts(self, shares: Vector, times: Vector) -> Vector:
        """The least powers that meet these times, within their limits: design (1) inverted; 0 on wires, (J)."""
        both = np.concatenate([shares, shares])
        signal = np.expm1(
            np.minimum(self.bits * math.log(2) / (self.efficiency * both * times), 700.0)
        )
        gain = np.where(self.radio, self.gain, math.inf)
        return np.asarray(np.minimum(signal * both / gain, self.limit_watts))

    def objective(self, times: Vector, watts: Vector) -> float:
        """Design (13) but for what no share or power changes."""
        seconds = float(self.delay.round_seconds(times).max())
        return self.delay_weight * seconds + float(self.joule_weight @ (watts * times))

    def applied(self, plans: RoundPlan, shares: Vector, watts: Vector) -> RoundPlan:
        """The plans with these shares and powers on these links."""
        links = [list(plan.links) for plan in plans]
        for i, (n, position) in enumerate(self.positions):
            links[n][position] = replace(
                links[n][position],
                share=float(shares[i]),
                forward_watts=float(watts[i]),
                backward_watts=float(watts[len(self.positions) + i]),
            )
        return tuple(
            replace(plan, links=tuple(given)) for plan, given in zip(plans, links, strict=True)
        )

    def powers(self, plans: RoundPlan) -> Vector:
        """What the plans give the transmitters of these links, (J)."""
        given = [plans[n].links[i] for n, i in self.positions]
        return np.array(
            [link.forward_watts for link in given] + [link.backward_watts for link in given]
        )


def shared_links(problem: RoundProblem, plans: RoundPlan) -> SharedLinks | None:
    """Collects the links that share channels; `None` where there are none or nothing is sent.

    What the plans say of shares and powers does not matter on these links, and counts on all others.
    """
    positions = [
        (n, i)
        for n, (cluster, plan) in enumerate(zip(problem.clusters, plans, strict=True))
        if cluster.channel is not None and problem.model.activation_bytes
        for i in range(len(plan.links))
    ]
    if not positions:
        return None
    names = sorted({str(problem.clusters[n].channel) for n, _ in positions})
    count = len(positions)
    columns = {name: np.zeros(2 * count) for name in ("bits", "gain", "limit", "joules")}
    efficiency, capacity = np.ones(2 * count), np.full(2 * count, math.inf)
    for at, key in enumerate(positions):
        plan = plans[key[0]]
        sent = 8 * problem.mini_batch / plan.num_micro_batches * problem.model.activation_bytes
        for j, (link, host) in zip((at, count + at), _ends(problem, plans, key), strict=True):
            columns["bits"][j] = sent * CODECS[plan.links[key[1]].codec].bytes_ratio
            if isinstance(link, RadioLink):
                columns["gain"][j] = link.gain / link.noise_watts_per_hertz
                columns["limit"][j] = host.max_transmit_watts
                columns["joules"][j] = (
                    host.joule_weight * problem.local_steps * plan.num_micro_batches
                )
                efficiency[j] = link.efficiency
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
        capacity_bps=capacity,
        limit_watts=columns["limit"],
        joule_weight=columns["joules"],
        delay_weight=problem.penalty_weight / problem.reference_seconds,
        delay=_delay_rows(problem, plans, {key: at for at, key in enumerate(positions)}),
    )


def _delay_rows(problem: RoundProblem, plans: RoundPlan, index: Mapping[_Key, int]) -> DelayRows:
    num_clusters, count = len(plans), len(index)
    constant, repeats, least = (np.zeros(num_clusters) for _ in range(3))
    times = np.zeros((num_clusters, 2 * count))
    rows: list[tuple[int, float, float, list[int]]] = []  # cluster, constant, factor, directions
    prediction = predict(problem, plans)
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
        passes = plan.num_micro_batches if problem.update_per_micro_batch else 1
        loop = sum(computes) + sum(map(_loop_seconds, links))
        constant[n] = (
            problem.local_steps * passes * (loop + cluster.step_seconds)
            + predicted.gather_seconds
            + cluster.upload_seconds
            + predicted.migrate_seconds / problem.migration_horizon_rounds
        )
        for _, pair in shared:
            times[n, pair] = problem.local_steps * passes
        if problem.update_per_micro_batch or plan.num_micro_batches == 1:
            continue  # micro-batches do not follow each other: nothing waits for a bottleneck
        repeats[n] = problem.local_steps * (plan.num_micro_batches - 1)
        own = [link.load_seconds for i, link in enumerate(links) if (n, i) not in index]
        least[n] = max([*computes, *own])
        if plan.stages[-1].host_id == cluster.edge_server.host_id:
            least[n] = max(least[n], head_load_seconds(problem, plans, n))
        for i, pair in shared:
            coding = links[i].forward_seconds
            if isinstance(_ends(problem, plans, (n, i))[0][0], RadioLink):
                rows.append((n, 2 * coding, 1.0, list(pair)))
            else:
                rows.extend((n, coding, 1.0, [j]) for j in pair)
        for k, stage in enumerate(plan.stages):
            if stage.in_flight < plan.num_micro_batches:
                rest = sum(computes[k:]) + sum(map(_loop_seconds, links[k:]))
                after = [j for i, pair in shared if i >= k for j in pair]
                rows.append((n, rest / stage.in_flight, 1 / stage.in_flight, after))
    row_times = np.zeros((len(rows), 2 * count))
    for r, (_, _, factor, directions) in enumerate(rows):
        row_times[r, directions] = factor
    return DelayRows(
        constant,
        times,
        repeats,
        least,
        np.array([row[0] for row in rows], dtype=np.intp),
        np.array([row[1] for row in rows], dtype=np.float64),
        row_times,
    )


def _ends(
    problem: RoundProblem, plans: RoundPlan, key: _Key
) -> tuple[tuple[Link, Host], tuple[Link, Host]]:
    """Both directions of a link, each with the host that sends."""
    cluster, stages = problem.clusters[key[0]], plans[key[0]].stages
    first, second = stages[key[1]].host_id, stages[key[1] + 1].host_id
    hosts = cluster.hosts
    return (cluster.links[first, second], hosts[first]), (
        cluster.links[second, first],
        hosts[second],
    )


def _without_transfer(problem: RoundProblem, plans: RoundPlan, key: _Key) -> LinkPrediction:
    """What is left of a link's times when it carries any amount at once: coding and latency."""
    plan = plans[key[0]]
    raw_bytes = problem.mini_batch / plan.num_micro_batches * problem.model.activation_bytes
    coding = raw_bytes * CODECS[plan.links[key[1]].codec].seconds_per_byte
    round_trip = _ends(problem, plans, key)[0][0].round_trip_seconds
    return LinkPrediction(coding, coding, round_trip, coding)


def _loop_seconds(link: LinkPrediction) -> float:
    return link.forward_seconds + link.backward_seconds + link.round_trip_seconds
