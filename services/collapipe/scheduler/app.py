"""Starts the scheduler process."""

import logging
import sys
from functools import partial
from pathlib import Path
from typing import Literal

import grpc
from pydantic import Field

from collapipe.certificates import Role
from collapipe.emulation.emulation_file import EmulationFile
from collapipe.errors import InvalidInputError
from collapipe.rpc import ChannelPool, serve
from collapipe.scheduler.host_registry import HostRegistry
from collapipe.scheduler.job_store import JobStore
from collapipe.scheduler.retention import Retention
from collapipe.scheduler.revoked_keys_file import RevokedKeysFile
from collapipe.scheduler.scrape import ScrapeSource
from collapipe.scheduler.servicer import SchedulerServicer
from collapipe.scheduler.telemetry_window import Telemetry, known_hosts
from collapipe.scheduler.web.access import LINK_FILE
from collapipe.scheduler.web.records import Records
from collapipe.scheduler.web.server import WebServer
from collapipe.scheduler.web.snapshot import Snapshots
from collapipe.service_process import Running, ServiceSettings
from collapipe.telemetry import metrics
from collapipe.telemetry.known_hosts import KnownHosts
from collapipe.telemetry.sources import TelemetrySource
from collapipe.telemetry.sources.prometheus import PrometheusSource
from collapipe.traffic_shaping.outgoing_links import OutgoingLinks
from collapipe.traffic_shaping.pacing import PacedShaper
from collapipe.traffic_shaping.radio_driver import EmulatedRadioDriver
from collapipe.v1 import scheduler_pb2_grpc

logger = logging.getLogger(__name__)

_SWITCH_SECONDS = 0.0005
"""How long a thread that computes makes others wait for the interpreter. One thread of gRPC takes in all calls and waits so
for each of them. With Python's 5 ms, a scheduler that plans could take in only 200 calls in a second."""


class SchedulerSettings(ServiceSettings):
    """Settings of the scheduler."""

    state_dir: Path = Field(
        description="Directory for jobs and their progress; it must survive restarts."
    )
    telemetry: Literal["scrape", "prometheus"] = Field(
        default="scrape",
        description="Source of measurements: the scheduler asks the hosts itself, or queries Prometheus.",
    )
    prometheus_url: str = Field(
        default="http://127.0.0.1:9090",
        description="URL of the Prometheus server that scrapes the hosts. With https and mutual TLS, the certificate of the "
        "server must have the role prometheus.",
    )
    telemetry_interval_seconds: float = Field(
        default=1.0,
        gt=0,
        description="Least seconds between two scrapes; with Prometheus, its scrape interval.",
    )
    emulation: Path | None = Field(
        default=None,
        description="JSON file of emulated links. It is read again when it changes.",
    )
    tls_revoked: Path | None = Field(
        default=None,
        description="List of revoked keys, written by `collapipe certs revoke`. It is read again when it changes, and all hosts get it.",
    )
    abandon_jobs: bool = Field(
        default=False,
        description="Mark as failed the jobs that were running or queued when the previous process of the scheduler ended. "
        "Without this flag, they go on.",
    )
    jobs_at_once: int = Field(
        default=8,
        ge=1,
        description="How many jobs and uses of models run at the same time, if they share no cluster. The others wait.",
    )
    keep_jobs: int = Field(
        default=100,
        ge=1,
        description="How many jobs of each client that have ended are kept with their models, those that ended last. Older ones are "
        "deleted on all hosts.",
    )
    keep_jobs_days: float = Field(
        default=0.0,
        ge=0,
        description="Days for which a job is kept after its end; 0 for ever. It is deleted when another job ends, or at a start.",
    )
    keep_jobs_gb: float = Field(
        default=0.0,
        ge=0,
        description="How many GB (1e9 bytes) of the edge server's disk the jobs of each client that have ended may take with their "
        "weights and optimizer states; 0 for any number. Those that ended first are deleted.",
    )

    web: str = Field(
        default="",
        description="Where to serve the page for the browser, host:port; port 0 takes a free port. Empty serves none. On a loopback "
        "address, the file page.json in --state-dir has its key. On others, it is HTTPS.",
    )


def start(settings: SchedulerSettings, metrics_address: str) -> Running:
    """Starts the server and the jobs of the last process."""
    sys.setswitchinterval(_SWITCH_SECONDS)
    emulation = EmulationFile(settings.emulation)
    emulation.current()  # Refuses a file that cannot be used.
    # In the emulation file, every scheduler has the name of its role, which its hosts know.
    links = OutgoingLinks(
        Role.SCHEDULER.value, emulation, PacedShaper(), EmulatedRadioDriver(emulation)
    )
    revoked = _revoked_keys(settings)
    channels = ChannelPool(settings.security, links)
    registry = HostRegistry()
    telemetry = Telemetry(
        _source(settings, registry, channels), settings.telemetry_interval_seconds
    )
    metrics.create_scheduler_series(telemetry.source.name)
    metrics.watch_free_space(settings.state_dir)
    jobs = JobStore(settings.state_dir)
    servicer = SchedulerServicer(
        jobs,
        channels,
        registry,
        telemetry,
        retention=Retention(
            settings.keep_jobs, settings.keep_jobs_days, int(settings.keep_jobs_gb * 1e9)
        ),
        jobs_at_once=settings.jobs_at_once,
        abandon_jobs=settings.abandon_jobs,
    )

    def add_services(server: grpc.Server, address: str) -> None:
        scheduler_pb2_grpc.add_SchedulerServiceServicer_to_server(servicer, server)

    server = serve(settings.listen, settings.security, add_services, links=links)

    page = _serve_page(settings, servicer.snapshots, Records(registry, jobs, channels))

    def drain() -> None:
        if page is not None:
            page.close()
        servicer.close()
        server.drain()
        telemetry.source.close()
        channels.close()
        if revoked is not None:
            revoked.close()
        jobs.close()

    return Running(server.address, drain)


def _serve_page(
    settings: SchedulerSettings, snapshots: Snapshots, records: Records
) -> WebServer | None:
    """Serves the page for the browser, if the settings ask for it. A link of an earlier process is deleted."""
    (settings.state_dir / LINK_FILE).unlink(missing_ok=True)
    if not settings.web:
        return None
    advertised = settings.advertise.rpartition(":")[0].strip("[]")
    page = WebServer(
        settings.web, settings.state_dir, settings.security, snapshots, records, advertised
    )
    logger.info("the page for the browser is at %s", page.url)
    return page


def _revoked_keys(settings: SchedulerSettings) -> RevokedKeysFile | None:
    if not settings.tls_revoked:
        return None
    if settings.insecure:
        raise InvalidInputError("--tls-revoked and --insecure contradict each other: leave one out")
    return RevokedKeysFile(settings.tls_revoked, settings.security)


def _source(
    settings: SchedulerSettings, registry: HostRegistry, channels: ChannelPool
) -> TelemetrySource:
    def known(instance_field: str) -> KnownHosts:
        # Two hosts may have had one address, one after the other.
        return known_hosts([*registry.registered(), *registry.alive()], instance_field)

    if settings.telemetry == "prometheus":
        known_now = partial(known, PrometheusSource.instance_field)
        if settings.insecure:
            return PrometheusSource(settings.prometheus_url, known=known_now)
        return PrometheusSource(
            settings.prometheus_url,
            settings.security.client_context,
            Role.PROMETHEUS.server_name,
            known=known_now,
        )
    return ScrapeSource(
        registry.alive,
        partial(known, ScrapeSource.instance_field),
        channels,
        settings.telemetry_interval_seconds,
    )
