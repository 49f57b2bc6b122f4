"""Checks that the scheduler and the other hosts answer, and that the clocks agree."""

import socket
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor

from collapipe.errors import CollapipeError
from collapipe.rpc import Security, check_serves, open_channel
from collapipe.v1.scheduler_pb2 import HOST_ROLE_EDGE_SERVER, HostStatus
from collapipe_client.client import CollaPipeClient
from collapipe_client.doctor.box_settings import Role
from collapipe_client.doctor.check import Check

_CONNECT_SECONDS = 3.0
_CALL_SECONDS = 5.0
_ROUND_TRIPS = 3
_HEARTBEAT_SECONDS = 4.0
"""Twice the interval between the heartbeats of a host."""
_POLL_SECONDS = 0.05
_NEW_HEARTBEAT_SECONDS = 0.5
"""With a smaller difference it is the same heartbeat, because the reported times have small errors."""


def ask_hosts(client: CollaPipeClient) -> list[HostStatus] | CollapipeError:
    """Returns the hosts that the scheduler knows, or the error if it does not answer."""
    try:
        return client.hosts()
    except CollapipeError as error:
        return error


def check_scheduler(address: str, hosts: list[HostStatus] | CollapipeError) -> Check:
    """Checks that the scheduler answers and that all its hosts are alive."""
    if isinstance(hosts, CollapipeError):
        return Check.fail("scheduler", f"{address}: {hosts}", "start it, or correct --scheduler")
    silent = [
        f"{s.host.host_id} ({s.refusal})" if s.refusal else s.host.host_id
        for s in hosts
        if not s.alive
    ]
    found = f"{address}: {len(hosts) - len(silent)} hosts alive"
    if silent:
        found = f"{found}, silent: {', '.join(silent)}"
        return Check.warn("scheduler", found, "read the logs of the silent hosts")
    return Check.ok("scheduler", found)


def peers_of(
    role: Role | None, cluster_index: int, hosts: Iterable[HostStatus]
) -> list[HostStatus]:
    """Returns the live hosts that communicate with a box.

    Devices and control units communicate with their own cluster and the edge server. Every other role, and
    `None`, has all live hosts as peers.
    """
    alive = [status for status in hosts if status.alive]
    if role not in ("device-agent", "control-unit"):
        return alive
    return [
        status
        for status in alive
        if status.host.role == HOST_ROLE_EDGE_SERVER or status.host.cluster_index == cluster_index
    ]


def check_peer(host_id: str, address: str, security: Security) -> Check:
    """Resolves the name of a host, connects to it, and asks its health service."""
    name = f"peer: {host_id}"
    host, _, port = address.rpartition(":")
    try:
        found = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_STREAM)
        round_trip = f"{1000 * _round_trip_seconds(str(found[0][4][0]), int(port)):.1f} ms"
    except (socket.gaierror, ValueError) as error:
        return Check.fail(
            name,
            f"{address}: the name {host!r} is not known here ({error})",
            f"add the name to the network's DNS, or: echo 'ADDRESS {host}' | sudo tee -a /etc/hosts",
        )
    except TimeoutError:
        return Check.fail(
            name,
            f"{address}: no answer",
            f"on {host}, let TCP port {port} through the firewall (sudo ufw allow {port}/tcp), and see that the "
            "machine is switched on",
        )
    except OSError as error:
        return Check.fail(
            name,
            f"{address}: {error.strerror or error}",
            f"on {host}, read the service's log; this machine must be able to reach the address in `advertise`",
        )
    with open_channel(address, security) as channel:
        try:
            check_serves(channel, address, _CALL_SECONDS)
        except CollapipeError as error:
            return Check.fail(
                name,
                f"{address}: connected in {round_trip}, but: {error}",
                f"read the service's log on {host}; both machines need certificates of one authority (--tls-ca), and the "
                f"other machine's certificate must name {host}",
            )
    return Check.ok(name, f"{address}: serves, round trip {round_trip}")


def _round_trip_seconds(host: str, port: int) -> float:
    """Returns the shortest time to connect."""
    seconds = []
    for _ in range(_ROUND_TRIPS):
        start = time.monotonic()
        with socket.create_connection((host, port), timeout=_CONNECT_SECONDS):
            seconds.append(time.monotonic() - start)
    return min(seconds)


def check_peers(hosts: list[HostStatus], security: Security) -> list[Check]:
    """Checks all hosts in parallel."""
    if not hosts:
        return []
    with ThreadPoolExecutor(min(8, len(hosts))) as pool:
        checks = [
            pool.submit(check_peer, status.host.host_id, status.host.address, security)
            for status in hosts
        ]
    return [check.result() for check in checks]


def clock_offset(
    client: CollaPipeClient,
    clock: Callable[[], float] = time.time,
    pause: Callable[[float], None] = time.sleep,
) -> tuple[float, float] | None:
    """Measures how far this clock is ahead of the scheduler's.

    The scheduler reports the arrival of each host's last heartbeat on its own clock. This function asks until
    there is a new heartbeat, which has then arrived between the last two questions.

    Returns:
        The offset and its uncertainty in seconds; `None` if no host sends heartbeats.

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
            if seen - before.get(host_id, seen) > _NEW_HEARTBEAT_SECONDS:
                return (asked + answered) / 2 - seen, (answered - asked) / 2
        asked = asking
    return None


def _last_seen(client: CollaPipeClient) -> dict[str, float]:
    return {
        status.host.host_id: status.last_seen.ToMilliseconds() / 1000
        for status in client.hosts()
        if status.alive
    }
