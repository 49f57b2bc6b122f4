"""Wires the scheduler and serves it."""

from pathlib import Path
from typing import Literal

import grpc
from pydantic import Field

from collapipe.rpc import ChannelPool, serve
from collapipe.scheduler.hosts import Hosts
from collapipe.scheduler.job_store import JobStore
from collapipe.scheduler.planner import Telemetry
from collapipe.scheduler.servicer import SchedulerServicer
from collapipe.service_process import Running, ServiceSettings, run_service
from collapipe.telemetry import metrics
from collapipe.telemetry.sources import TelemetrySource
from collapipe.telemetry.sources.prometheus import PrometheusSource
from collapipe.telemetry.sources.scrape import ScrapeSource
from collapipe.v1 import scheduler_pb2_grpc


class SchedulerSettings(ServiceSettings):
    """Settings of the scheduler."""

    state_dir: Path = Field(description="Directory of its state; survives restarts.")
    telemetry: Literal["scrape", "prometheus"] = Field(
        default="scrape",
        description="Where measurements come from: scraped by the scheduler itself, or asked from Prometheus.",
    )
    prometheus_url: str = Field(
        default="http://127.0.0.1:9090", description="Of the Prometheus that scrapes the hosts."
    )
    telemetry_interval_seconds: float = Field(
        default=1.0, gt=0, description="Between two scrapes, also of the Prometheus."
    )


def start(settings: SchedulerSettings, metrics_address: str) -> Running:
    """Starts serving."""
    channels = ChannelPool(settings.security)
    hosts = Hosts()
    telemetry = Telemetry(_source(settings, hosts), settings.telemetry_interval_seconds)
    metrics.create_scheduler_series(telemetry.source.name)
    metrics.watch_free_space(settings.state_dir)
    servicer = SchedulerServicer(JobStore(settings.state_dir), channels, hosts, telemetry)

    def add_services(server: grpc.Server, address: str) -> None:
        scheduler_pb2_grpc.add_SchedulerServiceServicer_to_server(servicer, server)

    server = serve(settings.listen, settings.security, add_services)

    def drain() -> None:
        servicer.close()
        server.drain()
        channels.close()
        telemetry.source.close()

    return Running(server.address, drain)


def _source(settings: SchedulerSettings, hosts: Hosts) -> TelemetrySource:
    if settings.telemetry == "prometheus":
        return PrometheusSource(settings.prometheus_url)
    return ScrapeSource(hosts.metrics_addresses, settings.telemetry_interval_seconds)


def main() -> None:
    """Runs the process."""
    run_service("scheduler", SchedulerSettings, start)
