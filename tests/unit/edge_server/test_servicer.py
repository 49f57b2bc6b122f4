"""Tests of calls about jobs that were deleted, train at the same time or were left by a killed process."""

import shutil
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import grpc
import pytest

from collapipe.edge_server.servicer import EdgeServerServicer
from collapipe.errors import NotFoundError, WrongStateError
from collapipe.rpc import ChannelPool, Security
from collapipe.stage_host import HostResources
from collapipe.stage_runtime import CPU
from collapipe.traffic_shaping.outgoing_links import OutgoingLinks
from collapipe.v1.edge_server_pb2 import ExportModelRequest, PushedUnit, PushUnitRequest
from collapipe.v1.plan_pb2 import Attempt
from collapipe.weights.blob_cache import BlobCache
from collapipe.weights.blob_store import JobStores

STAYS = cast(grpc.ServicerContext, SimpleNamespace(add_callback=lambda callback: True))
"""The side of gRPC of a call whose caller stays."""


@pytest.fixture
def stores(tmp_path: Path, prepared_job: Path) -> JobStores:
    """Has one job, with its initial model."""
    shutil.copytree(prepared_job, tmp_path / "jobs" / "job")
    return JobStores(tmp_path)


@pytest.fixture
def servicer(stores: JobStores) -> Iterator[EdgeServerServicer]:
    with ExitStack() as stack:
        channels = ChannelPool(Security.insecure())
        stack.callback(channels.close)
        links = OutgoingLinks.unlimited("edge-server")
        resources = HostResources(CPU, channels, links, BlobCache(), stores)
        yield EdgeServerServicer(stores, resources)


def test_export_keeps_its_job_until_it_has_ended(
    stores: JobStores, servicer: EdgeServerServicer
) -> None:
    answers = servicer.ExportModel(ExportModelRequest(job_id="job"), STAYS)
    pieces = [next(answers)]
    assert not stores.delete_job("job")
    pieces += answers
    assert stores.delete_job("job")
    sizes = {piece.file_name: piece.total_bytes for piece in pieces if piece.file_name}
    assert "model.safetensors" in sizes
    assert sum(sizes.values()) == sum(len(piece.chunk) for piece in pieces)


def test_late_calls_about_a_deleted_job_are_refused_and_make_no_directory(
    stores: JobStores, servicer: EdgeServerServicer, tmp_path: Path
) -> None:
    servicer._expect_pushes("job", frozenset({0}))  # as if the job had run last
    assert stores.delete_job("job")
    unit = PushedUnit(attempt=Attempt(job_id="job"), total_bytes=3)
    for answers in (
        servicer.ExportModel(ExportModelRequest(job_id="job"), STAYS),
        servicer.PushUnit(iter([PushUnitRequest(unit=unit)]), STAYS),
    ):
        with pytest.raises(NotFoundError, match="job job"):
            next(answers)
    assert not (tmp_path / "jobs" / "job").exists()


def test_pushes_of_a_job_are_dropped_when_another_job_takes_one_of_its_clusters(
    servicer: EdgeServerServicer, tmp_path: Path
) -> None:
    for name in ("left", "right", "next"):
        shutil.copytree(tmp_path / "jobs" / "job", tmp_path / "jobs" / name)
    servicer._expect_pushes("left", frozenset({0, 1}))
    servicer._expect_pushes("right", frozenset({2}))
    left, right = servicer._pushed_units("left"), servicer._pushed_units("right")
    assert left is not right
    servicer._expect_pushes("right", frozenset({2}))  # The next attempt of the same job.
    servicer._expect_pushes("next", frozenset({1}))
    assert servicer._pushed_units("right") is right
    with pytest.raises(WrongStateError, match="'left' .* next, right"):
        servicer._pushed_units("left")


def test_started_edge_server_deletes_what_a_killed_one_has_received(tmp_path: Path) -> None:
    left = tmp_path / "jobs/job/pushed/cluster-0-unit-5"
    left.parent.mkdir(parents=True)
    left.touch()
    EdgeServerServicer(JobStores(tmp_path), cast(HostResources, SimpleNamespace(channels=None)))
    assert not left.parent.exists()
