"""What one client may ask of the scheduler, and what it is told at the limit."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from planned_jobs import job, serving

from collapipe.certificates import Identity
from collapipe.errors import InfeasibleError, InvalidInputError
from collapipe.job import JobConfig
from collapipe.rpc import ChannelPool, Security
from collapipe.scheduler.client_limits import MOST_JOB_BYTES, MOST_WAITING_JOBS, read_job
from collapipe.scheduler.host_registry import HostRegistry
from collapipe.scheduler.job_runner import JobRunner
from collapipe.scheduler.job_store import JobStore
from collapipe.scheduler.retention import Retention
from collapipe.scheduler.servicer import SchedulerServicer
from collapipe.v1 import scheduler_pb2, scheduler_pb2_grpc
from collapipe_client import CollaPipeClient


def context_of(client: str) -> Any:
    """Returns the side of gRPC of a call by mutual TLS."""
    uri = Identity.parse(client).uri.encode()
    properties = {"transport_security_type": [b"ssl"], "peer_uri": [uri]}
    return Mock(auth_context=lambda: properties, peer=lambda: "ipv4:10.0.0.7:4321")


@pytest.fixture
def scheduler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[SchedulerServicer]:
    """A scheduler on which no job ever begins."""
    monkeypatch.setattr(SchedulerServicer, "_turns", lambda self: iter(()))
    monkeypatch.setattr(JobRunner, "run", lambda runner: None)
    servicer = SchedulerServicer(
        JobStore(tmp_path),
        ChannelPool(Security.insecure()),
        HostRegistry(),
        None,  # type: ignore[arg-type]
        retention=Retention(100, 0),
        jobs_at_once=8,
    )
    yield servicer
    servicer.close()


def submit(scheduler: SchedulerServicer, client: str, *, resume: bool = False) -> str:
    request = scheduler_pb2.SubmitJobRequest(config_json=job().to_json(), resume=resume)
    return scheduler.SubmitJob(request, context_of(client)).job_id


def test_only_so_many_jobs_of_one_client_wait_and_those_of_others_may_still(
    scheduler: SchedulerServicer,
) -> None:
    first, second, *_ = [submit(scheduler, "client:greedy") for _ in range(MOST_WAITING_JOBS)]
    limit = rf"client:greedy has {MOST_WAITING_JOBS} .* {MOST_WAITING_JOBS} may"
    with pytest.raises(InfeasibleError, match=limit):
        submit(scheduler, "client:greedy")
    submit(scheduler, "client:other")
    scheduler.cancel(first)
    # A resumed job waits, too.
    submit(scheduler, "client:greedy")
    with pytest.raises(InfeasibleError, match=limit):
        submit(scheduler, "client:greedy", resume=True)
    scheduler.cancel(second)
    submit(scheduler, "client:greedy")


def test_refusals_reach_the_client_as_what_they_are(scheduler: SchedulerServicer) -> None:
    add = scheduler_pb2_grpc.add_SchedulerServiceServicer_to_server
    large = job(more={"model": {"config": {"note": "x" * MOST_JOB_BYTES}}})
    with (
        serving(scheduler, add) as address,
        CollaPipeClient(address, Security.insecure()) as client,
    ):
        for call in (client.submit, client.check_resume):
            with pytest.raises(InvalidInputError, match=rf"\d bytes .* {MOST_JOB_BYTES} "):
                call(large)
        for _ in range(MOST_WAITING_JOBS):
            client.submit(job())
        with pytest.raises(InfeasibleError, match=str(MOST_WAITING_JOBS)):
            client.submit(job())
        with pytest.raises(InvalidInputError, match="WatchJob.* 65536"):
            next(client.watch("x" * 70_000))


def test_job_that_only_its_defaults_make_too_large_is_refused_before_it_is_stored() -> None:
    small = '{"task": {"kind": "classification"}, "model": {"config": {"note": "%s"}}}'
    assert read_job(small % "x").model.config == {"note": "x"}
    text = small % ("x" * (MOST_JOB_BYTES - len(small)))
    assert len(text) <= MOST_JOB_BYTES < len(JobConfig.from_json(text).to_json())
    with pytest.raises(InvalidInputError, match=str(MOST_JOB_BYTES)):
        read_job(text)


def test_list_of_jobs_reads_no_job_file_again(
    store: JobStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A large one takes many milliseconds."""
    read: list[str] = []
    from_json = JobConfig.from_json

    def count(text: str) -> JobConfig:
        read.append(text)
        return from_json(text)

    monkeypatch.setattr(JobConfig, "from_json", count)
    config = job(training={"rounds": 3})
    document = store.create(config)
    for _ in range(3):
        (status,) = store.statuses()
        assert (status.name, status.num_rounds) == ("job", 3)
    assert len(read) == 1
    document.state = scheduler_pb2.JOB_STATE_FAILED
    store.reopen(job(training={"rounds": 5}))
    (status,) = store.statuses()
    assert status.num_rounds == 5
