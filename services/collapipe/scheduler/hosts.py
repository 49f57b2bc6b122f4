"""Who is registered: the state, a lock and a clock."""

import logging
import threading
import time

from collapipe.job import JobConfig
from collapipe.scheduler import host_registry
from collapipe.telemetry import metrics
from collapipe.v1 import scheduler_pb2

logger = logging.getLogger(__name__)

HEARTBEAT_SECONDS = 2.0
SILENCE_SECONDS = 5 * HEARTBEAT_SECONDS
"""A host that has sent no heartbeat for so long is not alive: several were lost, not one."""


class Hosts:
    """The registered hosts."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._registry: host_registry.Registry = {}

    def register(self, host: scheduler_pb2.Host) -> None:
        """Makes a host known."""
        with self._lock:
            before = self._registry.get(host.host_id)
            if before is not None and before.host.incarnation != host.incarnation:
                logger.info(
                    "%s registered anew from %s, before from %s: it was restarted, or two processes share its identity",
                    host.host_id,
                    host.address,
                    before.host.address,
                )
            self._registry = host_registry.register(self._registry, host, time.monotonic())
            self._count()

    def heartbeat(self, host_id: str, incarnation: str) -> None:
        """Notes a sign of life; raises `NotFoundError` or `WrongStateError`."""
        with self._lock:
            self._registry = host_registry.heartbeat(
                self._registry, host_id, incarnation, time.monotonic()
            )
            self._count()

    def for_job(self, job: JobConfig) -> tuple[host_registry.JobHosts | None, list[str]]:
        """The hosts of a job, or what is missing."""
        with self._lock:
            hosts = host_registry.alive(self._registry, time.monotonic(), SILENCE_SECONDS)
        return host_registry.choose_hosts(hosts, job)

    def statuses(self) -> list[scheduler_pb2.HostStatus]:
        """Every host that ever registered."""
        now, wall_clock = time.monotonic(), time.time()
        with self._lock:
            known_hosts = list(self._registry.values())
        statuses = []
        for known in known_hosts:
            silence = now - known.last_seen
            status = scheduler_pb2.HostStatus(host=known.host, alive=silence <= SILENCE_SECONDS)
            status.last_seen.FromMilliseconds(int((wall_clock - silence) * 1000))
            statuses.append(status)
        return statuses

    def metrics_addresses(self) -> list[str]:
        """Where the hosts that are alive serve /metrics."""
        with self._lock:
            hosts = host_registry.alive(self._registry, time.monotonic(), SILENCE_SECONDS)
        return [host.metrics_address for host in hosts if host.metrics_address]

    def _count(self) -> None:
        hosts = host_registry.alive(self._registry, time.monotonic(), SILENCE_SECONDS)
        for role in (
            host_registry.DEVICE_AGENT,
            host_registry.CONTROL_UNIT,
            host_registry.EDGE_SERVER,
        ):
            name = scheduler_pb2.HostRole.Name(role).removeprefix("HOST_ROLE_").lower()
            metrics.HOSTS.labels(name).set(sum(host.role == role for host in hosts))
