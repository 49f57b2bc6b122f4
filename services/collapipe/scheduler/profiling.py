"""Measures hosts and links: profiles time a block on a host, probes measure the rate of a link."""

import logging
import statistics
import threading
from collections import deque
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field, replace
from typing import Any

from collapipe.allocation import RoundPlan
from collapipe.errors import CancelledError, CollapipeError, PeerLostError
from collapipe.job import JobConfig
from collapipe.planning.decisions import hosts_of, link_shares
from collapipe.planning.job_hosts import JobHosts
from collapipe.planning.knowledge import HostKnowledge, Knowledge, LinkKnowledge
from collapipe.planning.round_problem import blocks_beyond_devices, link_pairs
from collapipe.rpc import ChannelPool, impossible_value
from collapipe.v1 import (
    link_pb2,
    link_pb2_grpc,
    plan_pb2,
    profile_pb2,
    profile_pb2_grpc,
    scheduler_pb2,
)

logger = logging.getLogger(__name__)

_BY_SPEED = ("dssra", "titanic", "titanic_best", "proportional", "vanilla_fl")
"""Strategies that need the speeds of devices."""

_PROFILE_SECONDS = 240.0
"""Deadline of a profile. On a slow device most of it is needed to import the model's code."""

_MOST_SHARES = 16
"""A layer has one block or two."""

_PROFILES_AT_ONCE = 100
_PROBES_AT_ONCE = 16
"""Threads that wait for hosts. If hundreds of them had answers at once, heartbeats would wait for seconds."""

_PROBES_PER_ROUND = 4
"""A probe takes a third of a second and slows down the streams of the round, so there are only a few."""

_PROBE_SECONDS = 25.0
"""Deadline of a probe. A probe takes less than a second on a good link, and seconds on a very slow one."""


Ask = Callable[[Any, Any, str, float], Any]
"""Calls a method with a request to a host within some seconds, as `HostCalls.ask` does."""


def profile_hosts(
    job: JobConfig,
    model: plan_pb2.ModelSpec,
    hosts: JobHosts,
    channels: ChannelPool,
    ask: Ask,
    known: Knowledge | None = None,
) -> Knowledge:
    """Times a block on every host that may run blocks, if a decision depends on it. A configured speed takes precedence.

    With the strategy `dssra`, it also probes the links.

    Args:
        known: What is known already. It stays, and is completed for hosts and links that it lacks.

    Raises:
        CollapipeError: A host did not answer.
    """
    knowledge = known.model_copy(deep=True) if known is not None else Knowledge()
    profiled = [host for host in _may_run_blocks(job, hosts) if host.host_id not in knowledge.hosts]
    by_speed = job.schedule.strategy in _BY_SPEED
    needs_speed = by_speed and not all(host.speed for host in profiled)
    needs_memory = job.schedule.strategy == "dssra" or any(host.memory_bytes for host in profiled)
    knowledge.hosts |= {
        host.host_id: HostKnowledge(seconds_per_sample=1 / (host.speed or 1.0)) for host in profiled
    }
    if profiled and (needs_speed or needs_memory):
        with ThreadPoolExecutor(min(len(profiled), _PROFILES_AT_ONCE), "profile") as executor:
            profiles = list(
                executor.map(lambda host: _profile(job, model, host, channels, ask), profiled)
            )
        for host, profile in zip(profiled, profiles, strict=True):
            knowledge.hosts[host.host_id] = HostKnowledge(
                seconds_per_sample=1 / host.speed if host.speed else profile.seconds_per_sample,
                seconds_per_micro_batch=0.0 if host.speed else profile.seconds_per_micro_batch,
                busy_watts=host.busy_watts,
                source="profile",
                profiled_seconds_per_sample=0.0 if host.speed else profile.seconds_per_sample,
            )
        if known is None:
            knowledge.block_state_bytes = max(profile.state_bytes for profile in profiles)
            knowledge.block_stash_bytes = max(p.stash_bytes_per_sample for p in profiles)
            knowledge.work_shares = _mean_shares([profile.work_shares for profile in profiles])
            knowledge.stash_shares = _mean_shares([profile.stash_shares for profile in profiles])
    if job.schedule.strategy == "dssra":
        known_links = {name for name, link in knowledge.links.items() if link.capacity_bps}
        knowledge.links |= probe_links(hosts, channels, ask, known_links)
    return knowledge


def without_unknown(
    job: JobConfig, hosts: JobHosts, knowledge: Knowledge, preferred: Collection[str]
) -> JobHosts | None:
    """Leaves out devices about which too little is known for a decision. Returns `None` if a cluster would have no device.

    Args:
        preferred: Ids of devices that stay if the link between two devices is unknown.
    """
    clusters = []
    for cluster in hosts.clusters:
        taken: list[scheduler_pb2.Host] = []
        for device in sorted(cluster.devices, key=lambda d: d.host_id not in preferred):
            pairs: list[tuple[str, str]] = []
            if job.schedule.strategy == "dssra":
                extended = replace(cluster, devices=(*taken, device))
                pairs = link_pairs(extended, hosts.edge_server)
            if device.host_id in knowledge.hosts and all(
                ">".join(pair) in knowledge.links for pair in pairs
            ):
                taken.append(device)
        if not taken:
            return None
        ids = {device.host_id for device in taken}
        devices = tuple(device for device in cluster.devices if device.host_id in ids)
        clusters.append(replace(cluster, devices=devices))
    return JobHosts(hosts.edge_server, tuple(clusters))


def _may_run_blocks(job: JobConfig, hosts: JobHosts) -> list[scheduler_pb2.Host]:
    on_control_units, on_edge_server = blocks_beyond_devices(job, hosts)
    return [
        *hosts.devices,
        *(cluster.control_unit for cluster in hosts.clusters if on_control_units),
        *([hosts.edge_server] if on_edge_server else []),
    ]


def _mean_shares(shares: Sequence[Sequence[float]]) -> list[float]:
    """Returns the mean of all devices for each block of a layer. Leaves out each device that reports another
    number of blocks than most devices do."""
    usual = statistics.mode(map(len, shares))
    return [
        statistics.mean(each) for each in zip(*(s for s in shares if len(s) == usual), strict=True)
    ]


def probe_links(
    hosts: JobHosts, channels: ChannelPool, ask: Ask, known: Collection[str] = ()
) -> dict[str, LinkKnowledge]:
    """Probes every link that a plan may use, and returns the results by "sender>receiver".

    Links with the names in `known` are left out.

    A host takes part in only one probe at a time, because simultaneous probes would share its network
    interface and measure each other. A link whose probe fails gets rate 0, so no plan uses it.

    Raises:
        CancelledError: The job was cancelled.
    """
    by_id = hosts.by_id
    # By each of the two hosts. A dict keeps the order of its keys.
    waiting: dict[str, dict[tuple[str, str], None]] = {host_id: {} for host_id in by_id}
    for pair in _all_pairs(hosts):
        if ">".join(pair) not in known:
            waiting[pair[0]][pair] = waiting[pair[1]][pair] = None
    running: dict[Future[LinkKnowledge], tuple[str, str]] = {}
    found: dict[str, LinkKnowledge] = {}
    idle, freed = set(by_id), list(by_id)
    with ThreadPoolExecutor(min(len(by_id) // 2, _PROBES_AT_ONCE), "probe") as executor:
        while True:
            # Only the links of hosts that have just become idle can begin. With 1,000 devices, looking at all waiting links
            # after each probe would take minutes.
            for host_id in freed:
                next_pair = next(filter(idle.issuperset, waiting[host_id]), None)
                if next_pair is not None:
                    idle.difference_update(next_pair)
                    for end in next_pair:
                        del waiting[end][next_pair]
                    sender, receiver = (by_id[end] for end in next_pair)
                    running[executor.submit(_probe, sender, receiver, channels, ask)] = next_pair
            if not running:
                return found
            done, _ = wait(running, return_when=FIRST_COMPLETED)
            freed = [host_id for future in done for host_id in running[future]]
            idle.update(freed)
            for future in done:
                found[">".join(running.pop(future))] = future.result()


@dataclass
class IdleMeasurements:
    """Measurements of idle devices and links: those that a round did not use."""

    seconds_per_sample: dict[str, float] = field(default_factory=dict)
    """Profiled time of a block, by device."""
    links: dict[str, LinkKnowledge] = field(default_factory=dict)
    """Probe results, by "sender>receiver"."""


class Explorer:
    """Measures idle devices and links while a round runs: devices without blocks, links without a stream.

    Otherwise a device or link that was slow once would never be used again. In each round, all idle devices
    are profiled, and the idle links with the oldest probes are probed.
    """

    def __init__(
        self,
        job: JobConfig,
        model: plan_pb2.ModelSpec,
        hosts: JobHosts,
        channels: ChannelPool,
        ask: Ask,
    ) -> None:
        self._job = job
        self._model = model
        self._channels = channels
        self._ask = ask
        self._oldest_probes_first: deque[tuple[str, str]] = deque()
        self.take_hosts(hosts)
        self._running: Future[IdleMeasurements] | None = None
        self._executor = ThreadPoolExecutor(1, "explorer")
        self._closed = threading.Event()

    def take_hosts(self, hosts: JobHosts) -> None:
        """Replaces the hosts."""
        self._hosts, self._devices = hosts.by_id, hosts.devices
        pairs = dict.fromkeys(_all_pairs(hosts))  # Keeps the order, and finds a pair at once.
        probed = dict.fromkeys(pair for pair in self._oldest_probes_first if pair in pairs)
        new = [pair for pair in pairs if pair not in probed]
        self._oldest_probes_first = deque([*new, *probed])

    def start(self, plans: RoundPlan) -> None:
        """Starts to measure what these plans leave idle. Does nothing while earlier measurements run."""
        if self._running is not None:
            return
        used_hosts, used_links = hosts_of(plans), link_shares(plans)
        devices = [d for d in self._devices if d.host_id not in used_hosts and not d.speed]
        links = [pair for pair in self._oldest_probes_first if ">".join(pair) not in used_links]
        links = links[:_PROBES_PER_ROUND]
        for pair in links:
            self._oldest_probes_first.remove(pair)
            self._oldest_probes_first.append(pair)
        if devices or links:
            named = [(self._hosts[sender], self._hosts[receiver]) for sender, receiver in links]
            self._running = self._executor.submit(self._measure, devices, named)

    def collect(self) -> IdleMeasurements:
        """Returns the results since the last call; they are empty while measurements still run."""
        if self._running is None or not self._running.done():
            return IdleMeasurements()
        done, self._running = self._running, None
        try:
            return done.result()
        except Exception:
            # The job can continue without these measurements.
            logger.exception("measuring idle devices and links failed")
            return IdleMeasurements()

    def close(self) -> None:
        """Stops after the measurement that runs now."""
        self._closed.set()
        self._executor.shutdown(wait=False, cancel_futures=True)

    def _measure(
        self,
        devices: Sequence[scheduler_pb2.Host],
        links: Sequence[tuple[scheduler_pb2.Host, scheduler_pb2.Host]],
    ) -> IdleMeasurements:
        found = IdleMeasurements()
        for device in devices:
            if self._closed.is_set():
                return found
            try:
                profile = _profile(self._job, self._model, device, self._channels, self._ask)
            except CollapipeError as error:
                logger.info("profiling %s again failed: %s", device.host_id, error)
                continue
            found.seconds_per_sample[device.host_id] = profile.seconds_per_sample
        for sender, receiver in links:
            if self._closed.is_set():
                return found
            name = f"{sender.host_id}>{receiver.host_id}"
            found.links[name] = _probe(sender, receiver, self._channels, self._ask)
        return found


def _all_pairs(hosts: JobHosts) -> list[tuple[str, str]]:
    return [pair for c in hosts.clusters for pair in link_pairs(c, hosts.edge_server)]


def _profile(
    job: JobConfig,
    model: plan_pb2.ModelSpec,
    host: scheduler_pb2.Host,
    channels: ChannelPool,
    ask: Ask,
) -> profile_pb2.ProfileBlockResponse:
    # Two sizes separate the time per sample from the fixed time per micro-batch.
    size = max(1, job.training.mini_batch // job.schedule.num_micro_batches)
    stub = profile_pb2_grpc.ProfileServiceStub(channels.channel(host.address))
    request = profile_pb2.ProfileBlockRequest(
        model=model,
        micro_batch_sizes=(size, 2 * size) if size == 1 else (size // 2, size),
        sequence_length=job.task.max_length,
    )
    profile: profile_pb2.ProfileBlockResponse = ask(
        stub.ProfileBlock, request, host.host_id, _PROFILE_SECONDS
    )
    wrong = impossible_value(profile, most_characters=0)
    num_shares = max(len(profile.work_shares), len(profile.stash_shares))
    if num_shares > _MOST_SHARES:
        wrong = f"{num_shares} shares, where at most {_MOST_SHARES} are possible"
    if wrong:
        raise PeerLostError(
            host.host_id,
            f"{host.host_id} sent a profile with {wrong}: look at the log of {host.host_id}",
        )
    return profile


def _probe(
    sender: scheduler_pb2.Host, receiver: scheduler_pb2.Host, channels: ChannelPool, ask: Ask
) -> LinkKnowledge:
    stub = link_pb2_grpc.LinkServiceStub(channels.channel(sender.address))
    request = link_pb2.MeasureLinkRequest(host_id=receiver.host_id, address=receiver.address)
    try:
        measured = ask(stub.MeasureLink, request, sender.host_id, _PROBE_SECONDS)
        if wrong := impossible_value(measured, most_characters=0):
            raise PeerLostError(sender.host_id, f"{sender.host_id} sent {wrong}: look at its log")
    except CancelledError:
        raise
    except CollapipeError as error:
        logger.warning(
            "the probe from %s to %s failed, so no plan will use this link: %s",
            sender.host_id,
            receiver.host_id,
            error,
        )
        return LinkKnowledge(capacity_bps=0.0)
    return LinkKnowledge(
        capacity_bps=measured.goodput_bps,
        round_trip_seconds=measured.round_trip_seconds,
        probed_bps=measured.goodput_bps,
    )
