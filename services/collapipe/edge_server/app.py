"""Starts an edge server."""

from pathlib import Path

import grpc
from pydantic import Field

from collapipe.edge_server.commit_store import CommitStore
from collapipe.edge_server.heavy_work import HeavyWork
from collapipe.edge_server.servicer import EdgeServerServicer
from collapipe.service_process import Running
from collapipe.stage_host import (
    HostResources,
    StageHostSettings,
    StageServicer,
    frozen_weights,
    start_stage_host,
)
from collapipe.storage_service import StorageServicer
from collapipe.telemetry import metrics
from collapipe.v1 import edge_server_pb2_grpc, scheduler_pb2, stage_pb2_grpc, storage_pb2_grpc
from collapipe.weights.blob_store import JobStores


class EdgeServerSettings(StageHostSettings):
    """Settings of an edge server."""

    state_dir: Path = Field(
        description="Directory for jobs, models and commits; it must survive restarts."
    )


def start(settings: EdgeServerSettings, metrics_address: str) -> Running:
    """Starts serving."""
    commits = CommitStore(settings.state_dir)
    stores = JobStores(settings.state_dir, commits.delete)
    metrics.watch_free_space(settings.state_dir)
    host = scheduler_pb2.Host(role=scheduler_pb2.HOST_ROLE_EDGE_SERVER)
    heavy_work = HeavyWork()

    def add_services(server: grpc.Server, resources: HostResources, address: str) -> None:
        storage_pb2_grpc.add_StorageServiceServicer_to_server(
            StorageServicer(stores, commits.dump), server
        )
        stage_pb2_grpc.add_StageServiceServicer_to_server(StageServicer(resources), server)
        servicer = EdgeServerServicer(stores, commits, resources, heavy_work)
        edge_server_pb2_grpc.add_EdgeServerServiceServicer_to_server(servicer, server)

    frozen = frozen_weights(settings, keeps_all=True)
    running = start_stage_host(settings, metrics_address, host, stores, frozen, add_services)

    def drain() -> None:
        heavy_work.end()
        running.drain()

    return Running(running.address, drain)
