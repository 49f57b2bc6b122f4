"""Starts a device agent."""

import grpc
from pydantic import Field

from collapipe.service_process import Running
from collapipe.stage_host import (
    HostResources,
    StageHostSettings,
    StageServicer,
    frozen_weights,
    start_stage_host,
)
from collapipe.v1 import scheduler_pb2, stage_pb2_grpc


class DeviceAgentSettings(StageHostSettings):
    """Settings of a device agent."""

    cluster_index: int = Field(default=0, ge=0, description="Cluster of this device.")


def start(settings: DeviceAgentSettings, metrics_address: str) -> Running:
    """Starts serving."""
    host = scheduler_pb2.Host(
        role=scheduler_pb2.HOST_ROLE_DEVICE_AGENT, cluster_index=settings.cluster_index
    )

    def add_services(server: grpc.Server, resources: HostResources, address: str) -> None:
        stage_pb2_grpc.add_StageServiceServicer_to_server(StageServicer(resources), server)

    frozen = frozen_weights(settings)
    return start_stage_host(settings, metrics_address, host, None, frozen, add_services)
