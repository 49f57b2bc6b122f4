"""The scheduler's decisions about hosts, as pure functions of a registry and a clock reading."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from collapipe.errors import NotFoundError, WrongStateError
from collapipe.job import JobConfig
from collapipe.v1 import scheduler_pb2

DEVICE_AGENT = scheduler_pb2.HOST_ROLE_DEVICE_AGENT
CONTROL_UNIT = scheduler_pb2.HOST_ROLE_CONTROL_UNIT
EDGE_SERVER = scheduler_pb2.HOST_ROLE_EDGE_SERVER


@dataclass(frozen=True)
class KnownHost:
    """A host that has registered; `last_seen` is a reading of the scheduler's clock, in seconds."""

    host: scheduler_pb2.Host
    last_seen: float


Registry = Mapping[str, KnownHost]
"""Hosts by identity, in the order in which they first registered."""


@dataclass(frozen=True)
class ClusterHosts:
    """Who takes part in one cluster; devices in registration order."""

    control_unit: scheduler_pb2.Host
    devices: tuple[scheduler_pb2.Host, ...]


@dataclass(frozen=True)
class JobHosts:
    """Who takes part in a job."""

    edge_server: scheduler_pb2.Host
    clusters: tuple[ClusterHosts, ...]


def register(registry: Registry, host: scheduler_pb2.Host, now: float) -> Registry:
    """Makes a host known; one that comes back after a restart keeps its place."""
    return {**registry, host.host_id: KnownHost(host, now)}


def heartbeat(registry: Registry, host_id: str, incarnation: str, now: float) -> Registry:
    """Notes a sign of life.

    Raises:
        NotFoundError: The host is not registered.
        WrongStateError: Another incarnation of it is.
    """
    known = registry.get(host_id)
    if known is None:
        raise NotFoundError(f"host {host_id!r} is not registered: register it again")
    if known.host.incarnation != incarnation:
        raise WrongStateError(
            f"host {host_id!r} was registered by another process since: give each host its own --host-id, or "
            "end one of the two"
        )
    return {**registry, host_id: replace(known, last_seen=now)}


def alive(registry: Registry, now: float, silence_seconds: float) -> list[scheduler_pb2.Host]:
    """Hosts that were heard of lately, in registration order."""
    return [known.host for known in registry.values() if now - known.last_seen <= silence_seconds]


def choose_hosts(
    hosts: list[scheduler_pb2.Host], job: JobConfig
) -> tuple[JobHosts | None, list[str]]:
    """Chooses who takes part in a job.

    Args:
        hosts: Hosts that are alive.
        job: The job.

    Returns:
        The hosts and an empty list; or `None`, and what is missing, in words.
    """
    missing = []
    edge_server = next((host for host in hosts if host.role == EDGE_SERVER), None)
    if edge_server is None:
        missing.append("an edge server")
    clusters = []
    for index in range(job.clusters):
        members = [host for host in hosts if host.cluster_index == index]
        control_unit = next((host for host in members if host.role == CONTROL_UNIT), None)
        if control_unit is None:
            missing.append(f"a control unit for cluster {index}")
        devices = [host for host in members if host.role == DEVICE_AGENT]
        wanted = job.num_devices(index)
        needed = max(1, wanted or 1)
        if len(devices) < needed:
            lacking = needed - len(devices)
            noun = "device" if lacking == 1 else "devices"
            missing.append(f"{lacking} more {noun} in cluster {index} (have {len(devices)})")
        if control_unit is not None:
            clusters.append(ClusterHosts(control_unit, tuple(devices[:wanted])))
    if missing or edge_server is None:
        return None, missing
    return JobHosts(edge_server, tuple(clusters)), []
