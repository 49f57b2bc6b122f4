"""Tests of what becomes of a job that the scheduler has deleted while calls about it still arrive."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import grpc
import pytest

from collapipe.edge_server.servicer import EdgeServerServicer
from collapipe.errors import NotFoundError
from collapipe.rpc import ChannelPool, Security, serve, to_error
from collapipe.stage_host import HostResources
from collapipe.stage_runtime import CPU
from collapipe.traffic_shaping.outgoing_links import OutgoingLinks
from collapipe.v1.edge_server_pb2 import ExportModelRequest, PushedUnit, PushUnitRequest
from collapipe.v1.edge_server_pb2_grpc import (
    EdgeServerServiceStub,
    add_EdgeServerServiceServicer_to_server,
)
from collapipe.v1.plan_pb2 import Attempt
from collapipe.weights.blob_cache import BlobCache
from collapipe.weights.blob_store import JobStores

from .edges import Edge

PLAIN = Security.insecure()


@contextmanager
def serving(stores: JobStores) -> Iterator[tuple[EdgeServerServicer, EdgeServerServiceStub]]:
    channels = ChannelPool(PLAIN)
    resources = HostResources(
        CPU, channels, OutgoingLinks.unlimited("edge-server"), BlobCache(), stores
    )
    servicer = EdgeServerServicer(stores, resources)
    server = serve(
        "127.0.0.1:0",
        PLAIN,
        lambda grpc_server, address: add_EdgeServerServiceServicer_to_server(servicer, grpc_server),
    )
    try:
        yield servicer, EdgeServerServiceStub(channels.channel(server.address))
    finally:
        server.drain(0)
        channels.close()


@pytest.fixture
def stores(tmp_path: Path, vocabulary: bytes) -> JobStores:
    """Has one job, with its initial model."""
    Edge(tmp_path / "jobs" / "job", vocabulary).prepare()
    return JobStores(tmp_path)


class _Context:
    """The side of gRPC of a call whose caller stays."""

    def add_callback(self, callback: object) -> bool:
        return True


def test_export_keeps_its_job_until_it_has_ended(stores: JobStores) -> None:
    with serving(stores) as (servicer, _):
        answers = servicer.ExportModel(ExportModelRequest(job_id="job"), _Context())  # type: ignore[arg-type]
        pieces = [next(answers)]
        assert not stores.delete_job("job")
        pieces += answers
        assert stores.delete_job("job")
    sizes = {piece.file_name: piece.total_bytes for piece in pieces if piece.file_name}
    assert "model.safetensors" in sizes
    assert sum(sizes.values()) == sum(len(piece.chunk) for piece in pieces)


def test_late_calls_about_a_deleted_job_are_refused_and_make_no_directory(
    stores: JobStores, tmp_path: Path
) -> None:
    with serving(stores) as (servicer, stub):
        servicer._expect_pushes("job", frozenset({0}))  # as if the job had run last
        assert stores.delete_job("job")
        unit = PushedUnit(attempt=Attempt(job_id="job"), total_bytes=3)
        for call in (
            stub.ExportModel(ExportModelRequest(job_id="job")),
            stub.PushUnit(iter([PushUnitRequest(unit=unit)])),
        ):
            with pytest.raises(grpc.RpcError) as refused:
                list(call)
            error = to_error(refused.value, "edge-server")
            assert isinstance(error, NotFoundError)
            assert "does not know job job" in str(error)
    assert not (tmp_path / "jobs" / "job").exists()
