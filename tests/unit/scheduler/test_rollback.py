"""How the scheduler keeps a job and uses of its model away from a commit that changes; tests/integration goes back."""

import threading
import time
from collections.abc import Iterator
from concurrent import futures
from pathlib import Path
from unittest.mock import Mock

import grpc
import pytest

from collapipe.errors import WrongStateError
from collapipe.rpc import ChannelPool, Security
from collapipe.scheduler.host_registry import EDGE_SERVER, HostRegistry
from collapipe.scheduler.job_store import JobStore
from collapipe.scheduler.retention import Retention
from collapipe.scheduler.servicer import SchedulerServicer
from collapipe.v1 import edge_server_pb2, edge_server_pb2_grpc, plan_pb2, scheduler_pb2

from .jobs import job

LIMIT_SECONDS = 20.0
PLAIN_TEXT = Mock(auth_context=dict)
"""The context of a call without TLS."""


class BlockedEdgeServer(edge_server_pb2_grpc.EdgeServerServiceServicer):
    """An edge server that goes back only when it may."""

    def __init__(self) -> None:
        self.asked = threading.Event()
        self.may_go_on = threading.Event()

    def RollBack(self, request, context):  # type: ignore[no-untyped-def]
        self.asked.set()
        assert self.may_go_on.wait(LIMIT_SECONDS)
        commit = plan_pb2.Commit(num_rounds=request.num_rounds, attempt=request.attempt)
        yield edge_server_pb2.RollBackResponse(commit=commit)


@pytest.fixture
def edge() -> Iterator[tuple[BlockedEdgeServer, scheduler_pb2.Host]]:
    servicer = BlockedEdgeServer()  # type: ignore[abstract]
    server = grpc.server(futures.ThreadPoolExecutor(2))
    edge_server_pb2_grpc.add_EdgeServerServiceServicer_to_server(servicer, server)
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    host = scheduler_pb2.Host(host_id="edge", role=EDGE_SERVER, address=address, incarnation="1")
    yield servicer, host
    servicer.may_go_on.set()
    server.stop(None).wait()


@pytest.fixture
def jobs(tmp_path: Path) -> JobStore:
    """Has one job, which has succeeded."""
    jobs = JobStore(tmp_path)
    document = jobs.create(job())
    document.state, document.num_rounds_committed = scheduler_pb2.JOB_STATE_SUCCEEDED, 3
    document.vocabulary_digest = "ab" * 32
    jobs.save(document)
    return jobs


@pytest.fixture
def registry() -> HostRegistry:
    return HostRegistry()


@pytest.fixture
def scheduler(jobs: JobStore, registry: HostRegistry) -> Iterator[SchedulerServicer]:
    channels = ChannelPool(Security.insecure())
    servicer = SchedulerServicer(
        jobs, channels, registry, Mock(), jobs_at_once=8, retention=Retention(num_jobs=100, days=0)
    )
    yield servicer
    servicer.close()


def go_back(scheduler: SchedulerServicer, jobs: JobStore) -> scheduler_pb2.RollBackJobResponse:
    request = scheduler_pb2.RollBackJobRequest(job_id=jobs.all()[0].job_id, num_rounds=1)
    *_, answer = scheduler.RollBackJob(request, Mock())
    return answer


def test_job_does_not_go_back_without_an_edge_server(
    scheduler: SchedulerServicer, jobs: JobStore
) -> None:
    for _ in range(2):  # A failure leaves the job free.
        with pytest.raises(WrongStateError, match="without the edge server"):
            go_back(scheduler, jobs)
    (document,) = jobs.all()
    assert (document.num_rounds_committed, document.attempt) == (3, 0)


def test_job_goes_back_although_another_one_has_just_blamed_the_edge_server(
    scheduler: SchedulerServicer,
    jobs: JobStore,
    registry: HostRegistry,
    edge: tuple[BlockedEdgeServer, scheduler_pb2.Host],
) -> None:
    servicer, host = edge
    registry.register(host)
    registry.suspect(host.host_id, "it broke its stream")
    servicer.may_go_on.set()
    assert go_back(scheduler, jobs).job.num_rounds_committed == 1


def test_job_that_is_resumed_while_it_goes_back_waits(
    scheduler: SchedulerServicer,
    jobs: JobStore,
    registry: HostRegistry,
    edge: tuple[BlockedEdgeServer, scheduler_pb2.Host],
) -> None:
    servicer, host = edge
    registry.register(host)
    with futures.ThreadPoolExecutor(1) as thread:
        going = thread.submit(go_back, scheduler, jobs)
        assert servicer.asked.wait(LIMIT_SECONDS)
        with pytest.raises(WrongStateError, match="goes back to an earlier commit already"):
            go_back(scheduler, jobs)
        scheduler.SubmitJob(
            scheduler_pb2.SubmitJobRequest(config_json=job().to_json(), resume=True), PLAIN_TEXT
        )
        with pytest.raises(WrongStateError, match="is queued, and only a job that is over"):
            go_back(scheduler, jobs)
        time.sleep(0.2)  # Without the guard, the job would begin here.
        (document,) = jobs.all()
        assert document.state == scheduler_pb2.JOB_STATE_QUEUED
        servicer.may_go_on.set()
        answer = going.result(LIMIT_SECONDS)
    assert answer.job.num_rounds_committed == 1
    (document,) = jobs.all()
    assert document.last_commit == (1, 1)
    assert document.attempt > 1, "its next commit must be newer"
    events = scheduler.WatchJob(scheduler_pb2.WatchJobRequest(job_id=document.job_id), Mock())
    states = (event.status.state for event in events if event.HasField("status"))
    assert next(s for s in states if s != scheduler_pb2.JOB_STATE_QUEUED)


def test_job_does_not_go_back_while_its_model_is_used(
    scheduler: SchedulerServicer,
    jobs: JobStore,
    registry: HostRegistry,
    edge: tuple[BlockedEdgeServer, scheduler_pb2.Host],
) -> None:
    servicer, host = edge
    start = scheduler_pb2.UseModelStart(job_id=jobs.all()[0].job_id)
    outputs = scheduler.UseModel(iter([scheduler_pb2.UseModelRequest(start=start)]), Mock())
    next(answer for answer in outputs if "an edge server" in answer.output.waiting_for)
    registry.register(host)
    with pytest.raises(WrongStateError, match="is in use"):
        go_back(scheduler, jobs)
    outputs.close()
    servicer.may_go_on.set()
    deadline = time.monotonic() + LIMIT_SECONDS
    while True:  # The turn of the use ends in another thread.
        try:
            assert go_back(scheduler, jobs).job.num_rounds_committed == 1
            break
        except WrongStateError:
            assert time.monotonic() < deadline
            time.sleep(0.05)
