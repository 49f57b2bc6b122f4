"""Wires a device agent and serves it."""

import grpc
from pydantic import Field

from collapipe.device_agent.servicer import DeviceAgentServicer
from collapipe.process import Running, run_service
from collapipe.stage_service import (
    HostResources,
    StageHostSettings,
    StageServicer,
    start_stage_host,
)
from collapipe.v1 import device_agent_pb2_grpc, scheduler_pb2, stage_pb2_grpc


class DeviceAgentSettings(StageHostSettings):
    """Settings of a device agent."""

    cluster_index: int = Field(default=0, ge=0, description="The cluster that it belongs to.")
    memory_bytes: int = Field(default=0, ge=0, description="Memory for training; 0 for no limit.")
    speed: float = Field(
        default=0.0, ge=0, description="Samples that one block processes a second; 0 measures it."
    )


def start(settings: DeviceAgentSettings, metrics_address: str) -> Running:
    """Starts serving."""
    host = scheduler_pb2.Host(
        role=scheduler_pb2.HOST_ROLE_DEVICE_AGENT,
        cluster_index=settings.cluster_index,
        memory_bytes=settings.memory_bytes,
        speed=settings.speed,
    )

    def add_services(server: grpc.Server, resources: HostResources, address: str) -> None:
        stage_pb2_grpc.add_StageServiceServicer_to_server(StageServicer(resources), server)
        device_agent_pb2_grpc.add_DeviceAgentServiceServicer_to_server(
            DeviceAgentServicer(resources.device), server
        )

    return start_stage_host(settings, metrics_address, host, None, add_services)


def main() -> None:
    """Runs the process."""
    run_service("device-agent", DeviceAgentSettings, start)
