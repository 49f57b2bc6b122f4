"""The scheduler and the other hosts: do they answer, how far are they, and do the clocks agree."""

import socket
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from grpc_health.v1 import health_pb2, health_pb2_grpc

from collapipe.errors import CollapipeError
from collapipe.rpc import Security, call, open_channel
from collapipe.v1.scheduler_pb2 import (
    HOST_ROLE_EDGE_SERVER,
    HostStatus,
)
from collapipe_client.client import CollaPipeClient
from collapipe_client.doctor.box_settings import Role
from collapipe_client.doctor.check import Check

_CONNECT_SECONDS = 3.0
_CALL_SECONDS = 5.0
_ROUND_TRIPS = 3
_HEARTBEAT_SECONDS = 4.0
"""Twice the interval in which hosts send heartbeats."""
_POLL_SECONDS = 0.05


def check_scheduler(address: str, hosts: list[HostStatus] | CollapipeError) -> Check:
    """Does the scheduler answer, and who is there."""
    if isinstance(hosts, CollapipeError):
        return Check("scheduler", "fail", f"{address}: {hosts}", "start it, or correct --scheduler")
    silent = [status.host.host_id for status in hosts if not status.alive]
    found = f"{address}: {len(hosts) - len(silent)} hosts alive"
    if silent:
        return Check(
            "scheduler", "warn", f"{found}, silent: {', '.join(silent)}", "look into their logs"
        )
    return Check("scheduler", "ok", found)


def peers_of(
    role: Role | None, cluster_index: int, hosts: Iterable[HostStatus]
) -> list[HostStatus]:
    """The living hosts that a box of this role calls or is called by.

    Args:
        role: Of this box; `None` for all hosts.
        cluster_index: Of this box: devices and control units know those of their cluster, and the edge server.
        hosts: As the scheduler lists them.
    """
    alive = [status for status in hosts if status.alive]
    if role not in ("device-agent", "control-unit"):
        return alive
    return [
        status
        for status in alive
        if status.host.role == HOST_ROLE_EDGE_SERVER or status.host.cluster_index == cluster_index
    ]


@dataclass(frozen=True)
class PeerFacts:
    """What reaching a host led to; later fields are empty when an earlier step failed.

    Args:
        unresolved: Why its name is not known here; empty when it is.
        unreachable: Why no connection came about; empty when one did.
        round_trip_seconds: Shortest time to connect.
        health: What its service says of itself, "SERVING" when all is well; else what went wrong.
    """

    unresolved: str = ""
    unreachable: str = ""
    round_trip_seconds: float = 0.0
    health: str = ""


def reach(address: str, security: Security) -> PeerFacts:
    """Resolves a host, connects to it, and asks its service."""
    host, _, port = address.rpartition(":")
    try:
        found = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_STREAM)
    except (OSError, ValueError) as error:
        return PeerFacts(unresolved=str(error))
    resolved = (str(found[0][4][0]), int(port))
    seconds = []
    for _ in range(_ROUND_TRIPS):
        before = time.monotonic()
        try:
            with socket.create_connection(resolved, timeout=_CONNECT_SECONDS):
                seconds.append(time.monotonic() - before)
        except TimeoutError:
            return PeerFacts(unreachable="no answer")
        except OSError as error:
            return PeerFacts(unreachable=error.strerror or str(error))
    with open_channel(address, security) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        try:
            answer = call(stub.Check, health_pb2.HealthCheckRequest(), address, _CALL_SECONDS)
        except CollapipeError as error:
            return PeerFacts(round_trip_seconds=min(seconds), health=str(error))
    state = health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status)
    return PeerFacts(round_trip_seconds=min(seconds), health=state)


def check_peer(host_id: str, address: str, peer: PeerFacts) -> Check:
    """Can this box call a host as its peers do."""
    name = f"peer: {host_id}"
    host, _, port = address.rpartition(":")
    if peer.unresolved:
        return Check(
            name,
            "fail",
            f"{address}: the name {host!r} is not known here ({peer.unresolved})",
            f"give it to the network's DNS, or: echo 'ADDRESS {host}' | sudo tee -a /etc/hosts",
        )
    if peer.unreachable == "no answer":
        return Check(
            name,
            "fail",
            f"{address}: no answer",
            f"on {host}, let TCP port {port} through the firewall (sudo ufw allow {port}/tcp), and see that it is "
            "switched on",
        )
    if peer.unreachable:
        return Check(
            name,
            "fail",
            f"{address}: {peer.unreachable}",
            f"on {host}, look into the service's log; its `advertise` must lead to it from here",
        )
    round_trip = f"{peer.round_trip_seconds * 1000:.1f} ms"
    if peer.health != "SERVING":
        return Check(
            name,
            "fail",
            f"{address}: connected in {round_trip}, but: {peer.health}",
            f"look into its log on {host}; see that both use certificates of one authority (--tls-ca) and that its "
            f"certificate names {host}",
        )
    return Check(name, "ok", f"{address}: serves, round trip {round_trip}")


def check_peers(hosts: list[HostStatus], security: Security) -> list[Check]:
    """Reaches all of them, side by side."""
    if not hosts:
        return []
    addresses = [status.host.address for status in hosts]
    with ThreadPoolExecutor(min(8, len(hosts))) as pool:
        found = list(pool.map(lambda address: reach(address, security), addresses))
    return [
        check_peer(status.host.host_id, status.host.address, facts)
        for status, facts in zip(hosts, found, strict=True)
    ]


def clock_offset(
    client: CollaPipeClient,
    clock: Callable[[], float] = time.time,
    pause: Callable[[float], None] = time.sleep,
) -> tuple[float, float] | None:
    """How far this clock is ahead of the scheduler's, in seconds, and how uncertain that is.

    The scheduler says when it last heard of each host, on its own clock. Asked until a host is heard of anew, it so
    names a moment between the last two questions.

    Returns:
        `None` when no host sends heartbeats.

    Raises:
        CollapipeError: The scheduler does not answer.
    """
    asked = clock()
    before = _last_seen(client)
    deadline = asked + _HEARTBEAT_SECONDS
    while asked < deadline and before:
        pause(_POLL_SECONDS)
        asking = clock()
        now = _last_seen(client)
        answered = clock()
        for host_id, seen in now.items():
            # the scheduler makes it of two clocks: it wavers by milliseconds
            if seen - before.get(host_id, seen) > 0.5:
                return (asked + answered) / 2 - seen, (answered - asked) / 2
        asked = asking
    return None


def _last_seen(client: CollaPipeClient) -> dict[str, float]:
    return {
        status.host.host_id: status.last_seen.ToMilliseconds() / 1000
        for status in client.hosts()
        if status.alive
    }


def ask_hosts(client: CollaPipeClient) -> list[HostStatus] | CollapipeError:
    """The hosts that the scheduler knows, or why it does not say."""
    try:
        return client.hosts()
    except CollapipeError as error:
        return error
