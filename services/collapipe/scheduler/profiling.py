"""Asks hosts what they can do, before anything is trained: blocks by timing them, links by probing them."""

import itertools
import logging
import threading
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field

from collapipe.allocation import RoundPlan
from collapipe.errors import CollapipeError
from collapipe.job import JobConfig
from collapipe.rpc import ChannelPool, call
from collapipe.scheduler.host_registry import JobHosts
from collapipe.scheduler.knowledge import (
    BlockKnowledge,
    HostKnowledge,
    Knowledge,
    LinkKnowledge,
)
from collapipe.scheduler.round_problem import link_pairs
from collapipe.v1 import (
    device_agent_pb2,
    device_agent_pb2_grpc,
    link_pb2,
    link_pb2_grpc,
    plan_pb2,
    scheduler_pb2,
)

logger = logging.getLogger(__name__)

_PROFILE_LENGTH = 64
"""Tokens of the samples that a profile runs, unless the job's are shorter."""

_PROFILE_SECONDS = 120.0
"""Deadline of a profile: importing a model family on a slow device takes most of it."""

_LINKS_A_ROUND = 4
"""A probe takes a third of a second, and what a link carries meanwhile from the streams beside it."""

_PROBE_SECONDS = 25.0
"""Deadline of a probe: well under a second on a link that works, seconds on a very slow one."""


def profile_hosts(
    job: JobConfig, model: plan_pb2.ModelSpec, hosts: JobHosts, channels: ChannelPool
) -> Knowledge:
    """Times a block on every device, unless nothing depends on it; a speed that the operator states wins.

    Raises:
        CollapipeError: A device did not answer.
    """
    devices = [device for cluster in hosts.clusters for device in cluster.devices]
    knowledge = Knowledge(
        hosts={
            device.host_id: HostKnowledge(seconds_per_sample=1 / (device.speed or 1.0))
            for device in devices
        }
    )
    by_speed = job.schedule.strategy in ("dssra", "titanic", "proportional", "vanilla_fl")
    needs_speed = by_speed and not all(device.speed for device in devices)
    needs_memory = job.schedule.strategy == "dssra" or any(d.memory_bytes for d in devices)
    if not (needs_speed or needs_memory):
        return knowledge
    with ThreadPoolExecutor(len(devices), "profile") as executor:
        profiles = list(
            executor.map(lambda device: _profile(job, model, device, channels), devices)
        )
    for device, profile in zip(devices, profiles, strict=True):
        knowledge.hosts[device.host_id] = HostKnowledge(
            seconds_per_sample=1 / device.speed if device.speed else profile.seconds_per_sample,
            seconds_per_micro_batch=0.0 if device.speed else profile.seconds_per_micro_batch,
            busy_watts=device.busy_watts,
            origin="profile",
            profiled_seconds_per_sample=0.0 if device.speed else profile.seconds_per_sample,
        )
    knowledge.block = BlockKnowledge(
        state_bytes=max(profile.state_bytes for profile in profiles),
        stash_bytes_per_sample=max(profile.stash_bytes_per_sample for profile in profiles),
    )
    return knowledge


def probe_links(hosts: JobHosts, channels: ChannelPool) -> dict[str, LinkKnowledge]:
    """Probes every link that a plan may use, in both directions; a host takes part in one probe at a time.

    Two at a time would measure each other: they share its links, and a round trip would wait behind the other's burst.
    A link that cannot be probed carries nothing, so no plan uses it.
    """
    by_id = {hosts.edge_server.host_id: hosts.edge_server}
    waiting: list[tuple[str, str]] = []
    for cluster in hosts.clusters:
        by_id |= {host.host_id: host for host in (cluster.control_unit, *cluster.devices)}
        waiting += link_pairs(cluster, hosts.edge_server)
    found: dict[str, LinkKnowledge] = {}
    busy: set[str] = set()
    changed = threading.Condition()

    def next_pair() -> tuple[str, str] | None:
        """Waits for a link whose ends are both free; `None` when none is left."""
        with changed:
            while waiting:
                for pair in waiting:
                    if busy.isdisjoint(pair):
                        waiting.remove(pair)
                        busy.update(pair)
                        return pair
                changed.wait()
            return None

    def probe_some() -> None:
        while pair := next_pair():
            sender, receiver = pair
            try:
                found[f"{sender}>{receiver}"] = _probe(by_id[sender], by_id[receiver], channels)
            finally:
                with changed:
                    busy.difference_update(pair)
                    changed.notify_all()

    with ThreadPoolExecutor(len(by_id) // 2, "probe") as executor:
        for future in [executor.submit(probe_some) for _ in range(len(by_id) // 2)]:
            future.result()
    return found


@dataclass
class Findings:
    """What was found out beside a round.

    Args:
        seconds_per_sample: Of a block, by device.
        links: By "sender>receiver".
    """

    seconds_per_sample: dict[str, float] = field(default_factory=dict)
    links: dict[str, LinkKnowledge] = field(default_factory=dict)


class Explorer:
    """Looks at what a round does not use, while it runs: else what was slow once would never be used again.

    Devices without blocks are profiled anew, and of the links without a stream the few that were not looked at for longest.

    Args:
        job: The job.
        model: Its model.
        hosts: Who takes part.
        channels: To them.
    """

    def __init__(
        self, job: JobConfig, model: plan_pb2.ModelSpec, hosts: JobHosts, channels: ChannelPool
    ) -> None:
        self._job = job
        self._model = model
        self._channels = channels
        self._hosts = {hosts.edge_server.host_id: hosts.edge_server}
        self._devices = [device for cluster in hosts.clusters for device in cluster.devices]
        pairs: list[tuple[str, str]] = []
        for cluster in hosts.clusters:
            self._hosts |= {h.host_id: h for h in (cluster.control_unit, *cluster.devices)}
            pairs += link_pairs(cluster, hosts.edge_server)
        self._stalest = deque(pairs)
        self._running: Future[Findings] | None = None
        self._executor = ThreadPoolExecutor(1, "explorer")
        self._closed = threading.Event()

    def start(self, plans: RoundPlan) -> None:
        """Begins to look at what these plans do not use, unless it is still at it."""
        if self._running is not None:
            return
        working = {stage.host_id for plan in plans for stage in plan.stages}
        used = {
            pair
            for plan in plans
            for before, after in itertools.pairwise(plan.stages)
            for pair in ((before.host_id, after.host_id), (after.host_id, before.host_id))
        }
        idle = [d for d in self._devices if d.host_id not in working and not d.speed]
        unused = [pair for pair in self._stalest if pair not in used][:_LINKS_A_ROUND]
        for pair in unused:
            self._stalest.remove(pair)
            self._stalest.append(pair)
        if idle or unused:
            self._running = self._executor.submit(self._explore, idle, unused)

    def collect(self) -> Findings:
        """What has been found since; nothing while it is still at it."""
        if self._running is None or not self._running.done():
            return Findings()
        done, self._running = self._running, None
        try:
            return done.result()
        except Exception:  # what is looked at beside a job must not end it
            logger.exception("looking at idle devices and links failed")
            return Findings()

    def close(self) -> None:
        """Begins nothing more."""
        self._closed.set()
        self._executor.shutdown(wait=False, cancel_futures=True)

    def _explore(
        self, idle: Sequence[scheduler_pb2.Host], unused: Sequence[tuple[str, str]]
    ) -> Findings:
        found = Findings()
        for device in idle:
            if self._closed.is_set():
                return found
            try:
                profile = _profile(self._job, self._model, device, self._channels)
            except CollapipeError as error:
                logger.info("%s was not profiled again: %s", device.host_id, error)
                continue
            found.seconds_per_sample[device.host_id] = profile.seconds_per_sample
        for sender, receiver in unused:
            if self._closed.is_set():
                return found
            found.links[f"{sender}>{receiver}"] = _probe(
                self._hosts[sender], self._hosts[receiver], self._channels
            )
        return found


def profile_sizes(job: JobConfig) -> Sequence[int]:
    """The micro-batch that the job begins with, and one of another size."""
    size = max(1, job.training.mini_batch // job.schedule.num_micro_batches)
    return (size, 2 * size) if size == 1 else (size // 2, size)


def _profile(
    job: JobConfig, model: plan_pb2.ModelSpec, device: scheduler_pb2.Host, channels: ChannelPool
) -> device_agent_pb2.ProfileBlockResponse:
    stub = device_agent_pb2_grpc.DeviceAgentServiceStub(channels.channel(device.address))
    request = device_agent_pb2.ProfileBlockRequest(
        model=model,
        micro_batch_sizes=profile_sizes(job),
        sequence_length=min(job.task.max_length, _PROFILE_LENGTH),
    )
    return call(stub.ProfileBlock, request, device.host_id, _PROFILE_SECONDS)


def _probe(
    sender: scheduler_pb2.Host, receiver: scheduler_pb2.Host, channels: ChannelPool
) -> LinkKnowledge:
    stub = link_pb2_grpc.LinkServiceStub(channels.channel(sender.address))
    request = link_pb2.MeasureLinkRequest(host_id=receiver.host_id, address=receiver.address)
    try:
        seen = call(stub.MeasureLink, request, sender.host_id, _PROBE_SECONDS)
    except CollapipeError as error:
        logger.warning(
            "%s cannot reach %s, so they will be no neighbours: %s",
            sender.host_id,
            receiver.host_id,
            error,
        )
        return LinkKnowledge(capacity_bps=0.0)
    return LinkKnowledge(
        capacity_bps=seen.goodput_bps,
        round_trip_seconds=seen.round_trip_seconds,
        probed_bps=seen.goodput_bps,
    )
