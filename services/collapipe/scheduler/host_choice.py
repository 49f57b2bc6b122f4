"""Chooses the hosts of a job among those that send heartbeats."""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from collapipe.job import JobConfig
from collapipe.job_life import job_devices
from collapipe.job_life.failing_clusters import PATIENCE
from collapipe.job_life.job_devices import Device, JobDevices, LeftOut, Why
from collapipe.planning.job_hosts import ClusterHosts, JobHosts
from collapipe.scheduler.host_registry import (
    CONTROL_UNIT,
    DEVICE_AGENT,
    EDGE_SERVER,
    HostRegistry,
)
from collapipe.v1 import scheduler_pb2


@dataclass(frozen=True)
class Gap:
    """Hosts of one role in one cluster of the deployment that a job asks for and lacks."""

    role: scheduler_pb2.HostRole
    cluster_index: int
    text: str

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True)
class Choice:
    """The hosts of a job, chosen among those that sent heartbeats when it looked.

    Args:
        devices: What the job knows of devices after the look.
        hosts: `None` if the job cannot run with those that are there.
        missing: What it asks for beyond them.
        left_out: Why devices that send heartbeats do not take part, by host id. The text is empty for a suspect: its suspicion was
            told already.
    """

    devices: JobDevices
    hosts: JobHosts | None = None
    missing: Sequence[str | Gap] = ()
    left_out: Mapping[str, str] = field(default_factory=dict)


def choose(
    job: JobConfig,
    devices: JobDevices,
    registry: HostRegistry,
    num_rounds: int,
    preferred: Collection[str],
    *,
    fewer: bool,
) -> Choice:
    """Chooses among the hosts that send heartbeats.

    Args:
        devices: What the job knows of devices.
        num_rounds: The most rounds that the job has ever committed.
        preferred, fewer: As in `choose_hosts`. With the strategy `manual`, a job needs all its devices.
    """
    present = registry.alive()
    trusted = {host.host_id for host in registry.alive(suspects=False)}
    is_manual = job.schedule.strategy == "manual"
    devices, left_out = job_devices.choose(
        devices,
        [
            Device(h.host_id, h.cluster_index, h.incarnation, h.host_id not in trusted)
            for h in present
            if h.role == DEVICE_AGENT
        ],
        num_rounds,
        needs_all=is_manual or not fewer,
    )
    alive = [host for host in present if host.host_id not in left_out]
    used = devices.all_used
    if is_manual and used:  # The job file has a number of blocks for each of these devices.
        alive = [h for h in alive if h.role != DEVICE_AGENT or h.host_id in used]
    hosts: JobHosts | None
    missing: Sequence[str | Gap]
    hosts, missing = choose_hosts(alive, job, preferred=preferred, fewer=fewer and not is_manual)
    if hosts is not None and is_manual and (lost := lacking_hosts(job, devices, hosts, missing)):
        hosts, missing = None, lost
    reasons = {host_id: _say_left_out(why) for host_id, why in left_out.items()}
    return Choice(devices, hosts, missing, reasons)


def lacking_hosts(
    job: JobConfig, devices: JobDevices, hosts: JobHosts, missing: Sequence[str | Gap]
) -> list[str | Gap]:
    """Returns the ids of missing devices that the job used before and has room for. If there are none, returns what the job file asks
    for beyond the present hosts."""
    lost: list[str | Gap] = [
        host_id
        for index, cluster in enumerate(hosts.clusters)
        if len(cluster.devices) < (job.num_devices(index) or math.inf)
        for host_id in sorted(
            devices.used.get(index, frozenset()) - devices.no_plan - hosts.by_id.keys()
        )
    ]
    return lost or list(missing)


def choose_hosts(
    alive: Sequence[scheduler_pb2.Host],
    job: JobConfig,
    *,
    preferred: Collection[str] = (),
    fewer: bool = False,
) -> tuple[JobHosts | None, list[Gap]]:
    """Returns the hosts that take part in a job, and what is missing.

    The hosts are `None` if the job cannot run without the missing ones.

    Args:
        preferred: Ids of hosts that take part before others. The rest follows in registration order.
        fewer: Whether a cluster may have fewer devices than the job asks for, but at least one.
    """
    missing = []
    edge_server = next((host for host in alive if host.role == EDGE_SERVER), None)
    if edge_server is None:
        missing.append(Gap(EDGE_SERVER, 0, "an edge server"))
    clusters = []
    for index, host_cluster in enumerate(job.host_clusters):
        members = [host for host in alive if host.cluster_index == host_cluster]
        control_unit = next((host for host in members if host.role == CONTROL_UNIT), None)
        if control_unit is None:
            text = f"a control unit for cluster {host_cluster}"
            missing.append(Gap(CONTROL_UNIT, host_cluster, text))
        devices = [host for host in members if host.role == DEVICE_AGENT]
        wanted = job.num_devices(index)
        lacking = max(1, wanted or 1) - len(devices)
        if lacking > 0:
            noun = "device" if lacking == 1 else "devices"
            text = f"{lacking} more {noun} in cluster {host_cluster} (have {len(devices)})"
            missing.append(Gap(DEVICE_AGENT, host_cluster, text))
        if control_unit is not None and devices and (fewer or lacking <= 0):
            ordered = sorted(devices, key=lambda device: device.host_id not in preferred)
            chosen = {device.host_id for device in ordered[:wanted]}
            clusters.append(
                ClusterHosts(control_unit, tuple(d for d in devices if d.host_id in chosen))
            )
    if edge_server is None or len(clusters) < job.clusters:
        return None, missing
    return JobHosts(edge_server, tuple(clusters)), missing


def _say_left_out(reason: LeftOut) -> str:
    """Says why a device does not take part, as `Choice.left_out` does."""
    match reason.why:
        case Why.RESTARTS:
            return (
                f"it has restarted at least {PATIENCE:g} times while the job used it, so it takes part again when {reason.until} rounds "
                "are committed: look at its log"
            )
        case Why.NO_PLAN:
            return "no plan was possible with it"
        case Why.NOT_FINITE:
            return "it sent values that are not finite"
        case _:
            return ""
