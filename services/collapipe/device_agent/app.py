"""Starts a device agent."""

import grpc
from pydantic import Field

from collapipe.device_agent.servicer import DeviceAgentServicer
from collapipe.emulation.device_profiles import DeviceProfile, device_profile
from collapipe.emulation.emulation_file import EmulationFile
from collapipe.service_process import Running
from collapipe.stage_host import (
    HostResources,
    StageHostSettings,
    StageServicer,
    start_stage_host,
)
from collapipe.v1 import device_agent_pb2_grpc, scheduler_pb2, stage_pb2_grpc


class DeviceAgentSettings(StageHostSettings):
    """Settings of a device agent."""

    cluster_index: int = Field(default=0, ge=0, description="Cluster of this device.")
    memory_bytes: int | None = Field(
        default=None,
        ge=0,
        description="Memory for training; 0 for no limit. By default the memory of the emulated device, else no limit.",
    )
    speed: float = Field(
        default=0.0,
        ge=0,
        description="Samples that one block processes in a second, until rounds measure it; 0 measures it before the first round.",
    )
    energy_budget_joules: float = Field(
        default=0.0,
        ge=0,
        description="Average energy that a round may cost; 0 for a device on mains power.",
    )
    busy_watts: float = Field(
        default=0.0,
        ge=0,
        description="Power beyond idle while it computes, where no sensor measures it. By default that of the emulated "
        "device, else unknown.",
    )


def describe_host(
    settings: DeviceAgentSettings, emulated: DeviceProfile | None
) -> scheduler_pb2.Host:
    """Returns what the device registers. The profile of an emulated device replaces missing settings."""
    memory_bytes = settings.memory_bytes
    if memory_bytes is None:
        memory_bytes = emulated.memory_bytes if emulated else 0
    return scheduler_pb2.Host(
        role=scheduler_pb2.HOST_ROLE_DEVICE_AGENT,
        cluster_index=settings.cluster_index,
        memory_bytes=memory_bytes,
        speed=settings.speed,
        energy_budget_joules=settings.energy_budget_joules,
        busy_watts=settings.busy_watts or (emulated.busy_watts if emulated else 0.0),
    )


def start(settings: DeviceAgentSettings, metrics_address: str) -> Running:
    """Starts serving."""
    device = EmulationFile(settings.emulation).current().devices.get(settings.host_id)
    host = describe_host(settings, device_profile(device.profile) if device else None)

    def add_services(server: grpc.Server, resources: HostResources, address: str) -> None:
        stage_pb2_grpc.add_StageServiceServicer_to_server(StageServicer(resources), server)
        device_agent_pb2_grpc.add_DeviceAgentServiceServicer_to_server(
            DeviceAgentServicer(resources), server
        )

    return start_stage_host(settings, metrics_address, host, None, add_services)
