"""How long weights and optimizer states take to move in a round: docs/scheduling.md (6)."""

import math
from collections.abc import Iterator
from dataclasses import dataclass

from collapipe.allocation.round_model.problem import (
    ClusterPlan,
    ClusterProblem,
    Host,
    RoundProblem,
)
from collapipe.codec_table import UPLOAD_CODECS, UploadCodecName

_DEAD_LINK_BPS = 1.0
"""Rate for moves over a link whose probe failed: never worth it, but finite, because the search subtracts times."""


def moved_units(cluster: ClusterProblem, host_id: str, start_unit: int, stop_unit: int) -> int:
    """Returns how many units of a range the host did not hold under the previous plan."""
    if cluster.previous is None:
        return 0
    held: set[int] = set()
    for stage in cluster.previous.stages:
        if stage.host_id == host_id:
            held.update(range(stage.start_unit, stage.stop_unit))
    return sum(unit not in held for unit in range(start_unit, stop_unit))


@dataclass(frozen=True)
class WeightsSeconds:
    """T_push, T_fetch and T_migrate of (6), or what some units add to them."""

    push: float
    fetch: float
    migrate: float

    def __add__(self, other: "WeightsSeconds") -> "WeightsSeconds":
        return WeightsSeconds(
            self.push + other.push, self.fetch + other.fetch, self.migrate + other.migrate
        )

    def per_round(self, problem: RoundProblem) -> float:
        """Returns what they add to the time of a round: a migration counts over its horizon."""
        return self.push + self.fetch + self.migrate / problem.migration_horizon_rounds


def weights_seconds(
    problem: RoundProblem,
    cluster: ClusterProblem,
    host: Host,
    codec_name: UploadCodecName,
    start_unit: int,
    stop_unit: int,
) -> WeightsSeconds:
    """Returns what units on a host add to (6). The edge server neither pushes nor fetches."""
    units = (start_unit, stop_unit)
    migrate = migrate_seconds(problem, cluster, host, *units)
    if host.host_id == cluster.edge_server.host_id:
        return WeightsSeconds(0.0, 0.0, migrate)
    push = push_seconds(problem, host, codec_name, *units)
    return WeightsSeconds(push, fetch_seconds(problem, host, *units), migrate)


def push_seconds(
    problem: RoundProblem,
    host: Host,
    codec_name: UploadCodecName,
    start_unit: int,
    stop_unit: int,
) -> float:
    """Returns the part of a host in T_push of (6), if the hosts take turns with the rates `push_bps`."""
    bits = push_bits(problem, codec_name, start_unit, stop_unit)
    coding = coding_seconds(problem, codec_name, start_unit, stop_unit)
    return transfer_seconds(bits, host.push_bps) + coding


def push_bits(
    problem: RoundProblem, codec_name: UploadCodecName, start_unit: int, stop_unit: int
) -> float:
    """Returns the bits of the new weights of units."""
    ratio = UPLOAD_CODECS[codec_name].bytes_ratio
    return 8 * ratio * problem.model.weights_bytes(start_unit, stop_unit)


def coding_seconds(
    problem: RoundProblem, codec_name: UploadCodecName, start_unit: int, stop_unit: int
) -> float:
    """Returns the time to encode and decode the new weights of units."""
    raw_bytes = problem.model.weights_bytes(start_unit, stop_unit)
    return raw_bytes * UPLOAD_CODECS[codec_name].seconds_per_byte


def sending_seconds(
    problem: RoundProblem, cluster: ClusterProblem, plan: ClusterPlan
) -> list[tuple[float, float]]:
    """Returns for how long the host of each stage sends its new weights, and its power: (9). The edge server sends none."""
    hosts, edge_server = cluster.hosts, cluster.edge_server.host_id
    sending = []
    for k, stage in enumerate(plan.stages):
        host, seconds, watts = hosts[stage.host_id], 0.0, 0.0
        if stage.host_id != edge_server:
            rate, watts = host.push_bps, host.push_watts
            if plan.uploads:
                link, upload = cluster.links[stage.host_id, edge_server], plan.uploads[k]
                rate, watts = link.rate_bps(upload.share, upload.watts), upload.watts
            bits = push_bits(problem, plan.upload_codec, stage.start_unit, stage.stop_unit)
            seconds = transfer_seconds(bits, rate)
        sending.append((seconds, watts))
    return sending


def fetch_seconds(problem: RoundProblem, host: Host, start_unit: int, stop_unit: int) -> float:
    """Returns the part of a host in T_fetch of (6): with several clusters, it fetches the average of its units."""
    if len(problem.clusters) == 1:
        return 0.0
    bits = 8 * problem.model.weights_bytes(start_unit, stop_unit)
    return transfer_seconds(bits, host.fetch_bps)


def moved_states(
    problem: RoundProblem, cluster: ClusterProblem, host: Host, start_unit: int, stop_unit: int
) -> Iterator[tuple[str, float]]:
    """Yields what a host needs of units that are new on it, besides the weights of `fetch_seconds`.

    Before the first round these are the initial weights, which the edge server has. Later it is the optimizer
    state, and with one cluster the weights, from the host that had the unit. The edge server has all weights. Frozen
    weights count before the first round and later, because the scheduler does not know which hosts kept them.

    Yields:
        The id of the sender, and bytes.
    """
    model, one_cluster = problem.model, len(problem.clusters) == 1
    edge_server = cluster.edge_server.host_id
    has_weights = host.host_id == edge_server or not one_cluster

    def weights(first: int, stop: int) -> float:
        frozen = 0.0 if host.host_id == edge_server else model.frozen_bytes(first, stop)
        return frozen + (0.0 if has_weights else model.weights_bytes(first, stop))

    if cluster.previous is None:
        if needed := weights(start_unit, stop_unit):
            yield edge_server, needed
        return
    for stage in cluster.previous.stages:
        first, stop = max(start_unit, stage.start_unit), min(stop_unit, stage.stop_unit)
        if first < stop and stage.host_id != host.host_id:
            known = (stage.host_id, host.host_id) in cluster.links
            sender = stage.host_id if known else edge_server
            if sender != host.host_id:
                yield sender, model.optimizer_bytes(first, stop) + weights(first, stop)


def migrate_seconds(
    problem: RoundProblem, cluster: ClusterProblem, host: Host, start_unit: int, stop_unit: int
) -> float:
    """Returns the part of a host in T_migrate of (6).

    The edge server sends to all hosts at once, with the rates of T_fetch. Another sender has the whole channel.
    """
    channel = problem.channels.get(cluster.channel or "", math.inf)
    seconds = 0.0
    for sender, num_bytes in moved_states(problem, cluster, host, start_unit, stop_unit):
        rate = host.fetch_bps
        if sender != cluster.edge_server.host_id:
            link = cluster.links[sender, host.host_id]
            rate = link.rate_bps(channel, cluster.hosts[sender].max_transmit_watts)
            rate = max(rate, _DEAD_LINK_BPS)
        seconds += transfer_seconds(8 * num_bytes, rate)
    return seconds


def transfer_seconds(bits: float, rate_bps: float) -> float:
    """Returns the time of a transfer. It is 0 without bits, whatever the rate, and infinite at a rate of 0."""
    if not bits:
        return 0.0
    return bits / rate_bps if rate_bps > 0 else math.inf
