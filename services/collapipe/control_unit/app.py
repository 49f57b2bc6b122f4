"""Starts a control unit."""

from pathlib import Path

import grpc
from pydantic import Field

from collapipe.control_unit.recorded_rows import RecordedRows
from collapipe.control_unit.servicer import ControlUnitServicer
from collapipe.service_process import Running
from collapipe.stage_host import (
    HostResources,
    StageHostSettings,
    frozen_weights,
    make_data_root,
    start_stage_host,
)
from collapipe.storage_service import StorageServicer
from collapipe.telemetry import metrics
from collapipe.v1 import control_unit_pb2_grpc, scheduler_pb2, storage_pb2_grpc
from collapipe.weights.blob_store import JobStores


class ControlUnitSettings(StageHostSettings):
    """Settings of a control unit."""

    cluster_index: int = Field(default=0, ge=0, description="Cluster of this control unit.")
    state_dir: Path = Field(description="Directory of its state, which survives restarts.")
    data_clients: list[str] = Field(
        default=[],
        description="Names of the clients whose jobs may use the data of this cluster. Without any, all clients may.",
    )


def start(settings: ControlUnitSettings, metrics_address: str) -> Running:
    """Starts serving."""
    make_data_root(settings)
    rows = RecordedRows(settings.state_dir)
    stores = JobStores(settings.state_dir, rows.delete)
    metrics.watch_free_space(settings.state_dir)
    host = scheduler_pb2.Host(
        role=scheduler_pb2.HOST_ROLE_CONTROL_UNIT, cluster_index=settings.cluster_index
    )

    def add_services(server: grpc.Server, resources: HostResources, address: str) -> None:
        storage_pb2_grpc.add_StorageServiceServicer_to_server(
            StorageServicer(stores, rows.dump), server
        )
        control_unit_pb2_grpc.add_ControlUnitServiceServicer_to_server(
            ControlUnitServicer(resources, stores, rows, address, settings.data_clients), server
        )

    frozen = frozen_weights(settings)
    return start_stage_host(settings, metrics_address, host, stores, frozen, add_services)
