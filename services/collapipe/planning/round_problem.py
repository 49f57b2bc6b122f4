"""Builds the optimisation problem of a round from the job, its hosts and what is known about them."""

import itertools
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from collapipe.allocation import (
    BlockShare,
    ClusterProblem,
    Convergence,
    Host,
    ModelCost,
    RadioLink,
    RoundPlan,
    RoundProblem,
    WiredLink,
    exchange_bps,
    push_overlap,
)
from collapipe.codec_table import UploadCodecName
from collapipe.job import JobConfig, divisors, recompute_options
from collapipe.planning.job_hosts import ClusterHosts, JobHosts
from collapipe.planning.knowledge import HostKnowledge, Knowledge, LinkKnowledge
from collapipe.traffic_shaping.radio_driver import NOMINAL_BANDWIDTH_HZ
from collapipe.v1 import plan_pb2, scheduler_pb2
from collapipe.work_shares import WEIGHTS_SHARE

_STATE_PER_WEIGHT = 4
"""Training keeps a weight, a gradient and two moments for each weight: docs/scheduling.md (10)."""

_EMPTY_BLOB_BYTES = 16
"""Size of the trained weights of a unit that has none."""

_EMBEDDING_GUESS = 0.05
"""Work of an embedding, in layers."""


@dataclass(frozen=True)
class ModelSizes:
    """Sizes of a model."""

    num_blocks: int
    unit_bytes: tuple[int, ...]
    """Bytes of the trained weights of each unit, in unit order."""
    frozen_bytes: tuple[int, ...]
    """Bytes of the frozen weights of each unit, in unit order."""
    hidden_size: int
    """Values in the activation of one token."""
    period: int = 1
    """Blocks of a layer."""
    frozen_memory_share: float = 1.0
    """Memory of a block's frozen weights, divided by their bytes: less than 1 if hosts quantise them."""

    @property
    def block_bytes(self) -> float:
        """Size of the trained weights of the mean block."""
        return _mean_block(self.unit_bytes)

    @property
    def block_frozen_bytes(self) -> float:
        """Size of the frozen weights of the mean block."""
        return _mean_block(self.frozen_bytes)

    @property
    def first_trained_unit(self) -> int:
        """The first unit with trained weights."""
        return next(i for i, size in enumerate(self.unit_bytes) if size > _EMPTY_BLOB_BYTES)

    @property
    def head_blocks(self) -> float:
        """Size of the head in blocks, which is also a guess of its work until a round has measured it."""
        whole = [sum(sizes) for sizes in zip(self.unit_bytes, self.frozen_bytes, strict=True)]
        return whole[-1] / _mean_block(whole)


def _mean_block(unit_bytes: Sequence[int]) -> float:
    """Returns the mean size of the blocks, at least 1."""
    return max(statistics.mean(unit_bytes[1:-1]), 1.0)


def _shares(unit_bytes: Sequence[int], period: int) -> list[float]:
    """Returns the mean size of each block of a layer, divided by that of all blocks."""
    blocks, mean = unit_bytes[1:-1], _mean_block(unit_bytes)
    return [statistics.mean(blocks[position::period]) / mean for position in range(period)]


def _micro_batch_options(job: JobConfig) -> tuple[int, ...]:
    """Returns the numbers of micro-batches that the strategy may choose from, in ascending order."""
    # With an update for each micro-batch, another number of micro-batches would change the training.
    if job.schedule.strategy != "dssra" or job.training.update_per == "micro_batch":
        return (job.schedule.num_micro_batches,)
    return tuple(divisors(job.training.mini_batch))


def _slice_options(job: JobConfig) -> tuple[int, ...]:
    """Returns the numbers of slices that the strategy may choose from, without repeated ones."""
    options = tuple(dict.fromkeys(job.schedule.sequence_slices))
    return options if job.schedule.strategy == "dssra" else options[:1]


def _upload_codecs(job: JobConfig) -> tuple[UploadCodecName, ...]:
    """Returns the codecs of uploads that the strategy may choose from."""
    codecs = tuple(job.training.upload_codecs)
    return codecs if job.schedule.strategy == "dssra" else codecs[:1]


@dataclass(frozen=True)
class _Round:
    """What the problems of all clusters of a round need.

    Args:
        previous, earlier: As in `build_problem`.
        edge_server: The edge server as `describe` describes it.
        describe: Describes a host, from it and the time of a block if nobody has profiled it.
    """

    job: JobConfig
    hosts: JobHosts
    knowledge: Knowledge
    previous: RoundPlan
    earlier: Sequence[plan_pb2.Plan]
    cost: ModelCost
    edge_server: Host
    describe: Callable[..., Host]


def _cluster_problem(of_round: _Round, index: int) -> ClusterProblem:
    """Builds the part of a cluster."""
    job, knowledge = of_round.job, of_round.knowledge
    cluster, edge_server = of_round.hosts.clusters[index], of_round.edge_server
    options, upload_codecs = _micro_batch_options(job), _upload_codecs(job)
    slices = _slice_options(job)
    if of_round.earlier:
        earlier = of_round.earlier[index]
        options = (earlier.num_micro_batches,)
        kept = earlier.upload_codec or "fp32"
        upload_codecs = tuple(name for name in job.training.upload_codecs if name == kept)
        recorded = earlier.num_slices or 1
        slices = (recorded,) if recorded in job.schedule.sequence_slices else slices
    links = _links(cluster, of_round.hosts.edge_server, knowledge)
    shared = _shared_channel(job, links)
    before = of_round.previous[index] if of_round.previous else None
    # Before the first round, all hosts may get equally much.
    overlap = 1.0 + len(cluster.devices)
    if before is not None:
        overlap = push_overlap(of_round.cost, links, edge_server.host_id, before)
    with_rates = partial(
        _with_weights_rates,
        edge_server=edge_server,
        links=links,
        knowledge=knowledge,
        overlap=overlap,
        channel=math.inf if shared is None else shared,
    )
    guessed = _fastest_sample_seconds(cluster, knowledge)
    return ClusterProblem(
        control_unit=with_rates(of_round.describe(cluster.control_unit, guessed)),
        devices=tuple(with_rates(of_round.describe(device)) for device in cluster.devices),
        edge_server=edge_server,
        links=links,
        micro_batch_options=options,
        channel=None if shared is None else f"cluster {index}",
        previous=before,
        step_seconds=knowledge.step_seconds.get(index, 0.0),
        upload_codecs=upload_codecs or _upload_codecs(job),
        slice_options=slices,
        weight=1 / len(of_round.hosts.clusters),
    )


def _shared_channel(
    job: JobConfig, links: Mapping[tuple[str, str], WiredLink | RadioLink]
) -> float | None:
    """Returns what the hosts of a cluster share: hertz with radio links, else bits per second. `None` if they share nothing."""
    if any(isinstance(link, RadioLink) for link in links.values()):
        return job.schedule.channel_bandwidth_hz or NOMINAL_BANDWIDTH_HZ
    return job.schedule.channel_rate_bps


def build_problem(
    job: JobConfig,
    model: ModelSizes,
    hosts: JobHosts,
    knowledge: Knowledge,
    *,
    round_index: int,
    previous: RoundPlan = (),
    earlier: Sequence[plan_pb2.Plan] = (),
) -> RoundProblem:
    """Builds the problem of one round.

    Args:
        previous: The plans of the last committed round; empty before the first one.
        earlier: The plans of an earlier attempt at this round. A retry keeps their micro-batches, slices and codecs of
            uploads, because others would change the result of the training. What the job does not allow any more is
            chosen anew, and so are lossy codecs of links. So with these a retry may end at other bits. Empty if there was
            none.
    """
    schedule = job.schedule
    on_control_units, on_edge_server = blocks_beyond_devices(job, hosts)
    cost = _model_cost(job, model, knowledge)
    # Looking at all links for each of 1,000 hosts would take seconds.
    any_radio = any(link.gain is not None for link in knowledge.links.values())
    describe = partial(_host, job, knowledge, any_radio=any_radio)
    fastest = min(_fastest_sample_seconds(cluster, knowledge) for cluster in hosts.clusters)
    edge_server = describe(hosts.edge_server, fastest)
    of_round = _Round(job, hosts, knowledge, previous, earlier, cost, edge_server, describe)
    clusters = tuple(_cluster_problem(of_round, index) for index in range(len(hosts.clusters)))
    channels = {
        each.channel: _shared_channel(job, each.links) or 0.0
        for each in clusters
        if each.channel is not None
    }
    return RoundProblem(
        clusters=clusters,
        model=cost,
        mini_batch=job.training.mini_batch,
        local_steps=job.training.local_steps,
        channels=channels,
        codecs=schedule.codecs if schedule.strategy == "dssra" else schedule.codecs[:1],
        in_flight_limit=schedule.in_flight,
        update_per_micro_batch=job.training.update_per == "micro_batch",
        convergence=Convergence(
            constants=schedule.convergence_constants,
            weight=schedule.convergence_weight,
            limit=schedule.max_convergence_term or math.inf,
            num_rounds=job.training.rounds,
        ),
        penalty_weight=schedule.penalty_weight,
        reference_seconds=knowledge.reference_seconds or 1.0,
        migration_horizon_rounds=schedule.migration_horizon_rounds,
        fixed_seconds=knowledge.fixed_seconds,
        round_index=round_index,
        blocks_on_control_unit=on_control_units,
        blocks_on_edge_server=on_edge_server,
        recompute_options=recompute_options(job.training.recompute),
    )


def blocks_beyond_devices(job: JobConfig, hosts: JobHosts) -> tuple[bool, bool]:
    """Returns whether blocks may run on control units, and on the edge server.

    A host other than a device must say how much memory it gives. Otherwise it might get more than it can hold. With
    `averaging.secure`, the edge server gets none, because it would see what each cluster has trained in them.
    """
    if job.schedule.paper_placement or job.schedule.strategy != "dssra":
        return False, False
    control_units = [cluster.control_unit for cluster in hosts.clusters]
    on_edge_server = bool(hosts.edge_server.memory_bytes) and not job.averaging.secure
    return all(host.memory_bytes for host in control_units), on_edge_server


def link_pairs(cluster: ClusterHosts, edge_server: scheduler_pb2.Host) -> list[tuple[str, str]]:
    """Returns every (sender, receiver) of a cluster between which activations or weights may travel."""
    devices = [device.host_id for device in cluster.devices]
    control_unit, edge = cluster.control_unit.host_id, edge_server.host_id
    pairs = list(itertools.permutations([*devices, control_unit], 2))
    for host in (*devices, control_unit):
        pairs += [(host, edge), (edge, host)]
    return pairs


def _fastest_sample_seconds(cluster: ClusterHosts, knowledge: Knowledge) -> float:
    return min(knowledge.hosts[device.host_id].seconds_per_sample for device in cluster.devices)


def _host(
    job: JobConfig,
    knowledge: Knowledge,
    host: scheduler_pb2.Host,
    guessed_seconds: float = 0.0,
    *,
    any_radio: bool,
) -> Host:
    """Describes a host.

    Args:
        guessed_seconds: Time of a block on a host that nobody has profiled.
        any_radio: Whether the job has any radio link.
    """
    known = knowledge.hosts.get(host.host_id) or HostKnowledge()
    seconds, end_seconds = known.seconds_per_sample or guessed_seconds, known.end_seconds_per_sample
    deferred_share = 0.0
    if job.training.split_backward:
        deferred_share = known.deferred_share or WEIGHTS_SHARE
    return Host(
        host_id=host.host_id,
        seconds_per_sample=seconds,
        seconds_per_micro_batch=known.seconds_per_micro_batch,
        end_unit_work=end_seconds / seconds if end_seconds and seconds else None,
        deferred_share=deferred_share,
        memory_bytes=host.memory_bytes or None,
        busy_watts=known.busy_watts or host.busy_watts,
        idle_watts=host.idle_watts,
        energy_budget_joules=host.energy_budget_joules or None,
        backlog=knowledge.backlogs.get(host.host_id, 0.0),
        max_transmit_watts=host.max_transmit_watts if any_radio else 0.0,
    )


def _with_weights_rates(
    host: Host,
    edge_server: Host,
    links: Mapping[tuple[str, str], WiredLink | RadioLink],
    knowledge: Knowledge,
    overlap: float,
    channel: float,
) -> Host:
    """Returns a host with the measured rates of its weights. Before the first measurement, the links give them."""

    def rate(sender: Host, receiver: Host) -> float:
        known = knowledge.links.get(f"{sender.host_id}>{receiver.host_id}")
        if known is not None and known.weights_bps is not None:
            return known.weights_bps
        return exchange_bps(links[sender.host_id, receiver.host_id], sender, overlap, channel)

    return replace(
        host,
        push_bps=rate(host, edge_server),
        fetch_bps=rate(edge_server, host),
        push_watts=host.max_transmit_watts,
    )


def _links(
    cluster: ClusterHosts, edge_server: scheduler_pb2.Host, knowledge: Knowledge
) -> dict[tuple[str, str], WiredLink | RadioLink]:
    links: dict[tuple[str, str], WiredLink | RadioLink] = {}
    for sender, receiver in link_pairs(cluster, edge_server):
        known = knowledge.links.get(f"{sender}>{receiver}") or LinkKnowledge()
        if known.gain is not None and known.noise_watts_per_hertz is not None:
            links[sender, receiver] = RadioLink(
                known.gain, known.noise_watts_per_hertz, known.round_trip_seconds, known.efficiency
            )
        else:
            links[sender, receiver] = WiredLink(known.capacity_bps, known.round_trip_seconds)
    return links


def _model_cost(job: JobConfig, model: ModelSizes, knowledge: Knowledge) -> ModelCost:
    unknown = [1.0] * model.period
    pattern = zip(
        knowledge.work_shares or unknown,
        _shares(model.unit_bytes, model.period),
        knowledge.stash_shares or unknown,
        _shares(model.frozen_bytes, model.period),
        strict=True,
    )
    has_frozen = any(model.frozen_bytes)
    state = _STATE_PER_WEIGHT * model.block_bytes
    return ModelCost(
        num_blocks=model.num_blocks,
        # A profile knows the first layer only, and LoRA may train others.
        block_state_bytes=state if has_frozen else knowledge.block_state_bytes or state,
        block_stash_bytes=knowledge.block_stash_bytes,
        activation_bytes=knowledge.activation_bytes,
        # Guesses, until a round has measured the times of the embedding and the head.
        embedding_work=_EMBEDDING_GUESS * model.period,
        head_work=model.head_blocks,
        embedding_state_bytes=_STATE_PER_WEIGHT * model.unit_bytes[0],
        head_state_bytes=_STATE_PER_WEIGHT * model.unit_bytes[-1],
        embedding_stash_bytes=knowledge.activation_bytes,
        head_stash_bytes=model.head_blocks * knowledge.block_stash_bytes,
        embedding_frozen_bytes=model.frozen_bytes[0],
        block_frozen_bytes=model.block_frozen_bytes if has_frozen else 0.0,
        head_frozen_bytes=model.frozen_bytes[-1],
        frozen_memory_share=model.frozen_memory_share,
        first_trained_unit=model.first_trained_unit,
        lossy_uploads=_upload_codecs(job) != ("fp32",),
        keeps_base=job.privacy.is_on or job.averaging.secure,
        keeps_moments=job.may_leave_out_clusters,
        pattern=tuple(BlockShare(*shares) for shares in pattern),
    )
