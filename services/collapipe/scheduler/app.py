"""Wires the scheduler and serves it."""

from pathlib import Path

import grpc
from pydantic import Field

from collapipe.process import Running, ServiceSettings, run_service
from collapipe.rpc import ChannelPool, serve
from collapipe.scheduler.job_store import JobStore
from collapipe.scheduler.servicer import SchedulerServicer
from collapipe.v1 import scheduler_pb2_grpc


class SchedulerSettings(ServiceSettings):
    """Settings of the scheduler."""

    state_dir: Path = Field(description="Directory of its state; survives restarts.")


def start(settings: SchedulerSettings, metrics_address: str) -> Running:
    """Starts serving."""
    channels = ChannelPool(settings.security)
    servicer = SchedulerServicer(JobStore(settings.state_dir), channels)

    def add_services(server: grpc.Server, address: str) -> None:
        scheduler_pb2_grpc.add_SchedulerServiceServicer_to_server(servicer, server)

    server = serve(settings.listen, settings.security, add_services)

    def drain() -> None:
        servicer.close()
        server.drain()
        channels.close()

    return Running(server.address, drain)


def main() -> None:
    """Runs the process."""
    run_service("scheduler", SchedulerSettings, start)
