"""Tests of jobs that run at the same time, because they share no cluster, and of those that wait for them."""

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from killed_processes import kill, restart
from reference.tiny_jobs import make_job
from stored_jobs import stored_commit

from collapipe.job import JobConfig
from collapipe.v1.scheduler_pb2 import (
    JOB_STATE_PREPARING,
    JOB_STATE_QUEUED,
    JOB_STATE_RUNNING,
    JOB_STATE_SUCCEEDED,
    JobStatus,
)
from collapipe_client import LocalTestbed
from collapipe_client.client import CollaPipeClient
from integration.running import run_job

pytestmark = pytest.mark.timeout(300)

FOR_EVER = {"rounds": 100_000}


@pytest.fixture(scope="module")
def own_testbed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalTestbed]:
    with LocalTestbed([1, 1], tmp_path_factory.mktemp("testbed")) as testbed:
        testbed.wait_until_registered()
        yield testbed


@pytest.fixture
def client(own_testbed: LocalTestbed) -> Iterator[CollaPipeClient]:
    """Cancels what a test leaves behind."""
    with own_testbed.client() as client:
        yield client
        for job in client.jobs():
            if job.state in (JOB_STATE_QUEUED, JOB_STATE_PREPARING, JOB_STATE_RUNNING):
                client.cancel(job.job_id)
                wait_until(client, job.job_id, lambda status: False)


@pytest.fixture
def make(tmp_path: Path) -> Callable[..., JobConfig]:
    """Makes jobs that differ only in what a test asks for."""

    def make(name: str, clusters: list[int], **training: Any) -> JobConfig:
        num_rows = [21] * len(clusters)
        folder = tmp_path / name  # Another job may read its files just now.
        folder.mkdir()
        return make_job(
            folder, num_rows=num_rows, training=training, name=name, use_clusters=clusters
        )

    return make


def wait_until(
    client: CollaPipeClient, job_id: str, reached: Callable[[JobStatus], bool]
) -> JobStatus:
    """Watches a job until a status fits, or the job ends. Returns the last status."""
    last = JobStatus()
    for event in client.watch(job_id):
        if event.HasField("status"):
            last = event.status
            if reached(last):
                return last
    return last


def runs(status: JobStatus) -> bool:
    return status.state == JOB_STATE_RUNNING


def weights(testbed: LocalTestbed, job_id: str) -> list[str]:
    """Returns the digests of the last committed weights of a job."""
    commit = stored_commit(testbed.workspace.state / "edge-server", job_id)
    return [unit.weights_digest for unit in commit.global_units]


def test_jobs_without_a_common_cluster_run_at_once_with_the_bits_of_a_job_alone(
    own_testbed: LocalTestbed, client: CollaPipeClient, make: Callable[..., JobConfig]
) -> None:
    alone = run_job(own_testbed, make("alone", [0], rounds=4))
    long = client.submit(make("long", [1], **FOR_EVER))
    wait_until(client, long, runs)
    short = run_job(own_testbed, make("short", [0], rounds=4))
    assert client.find_job("long").state == JOB_STATE_RUNNING
    assert short.losses(0) == alone.losses(0)
    assert weights(own_testbed, short.job_id) == weights(own_testbed, alone.job_id)
    hosts = {stage.host_id for plan in short.plans(0) for stage in plan.stages}
    other_hosts = {stage.host_id for stage in client.plans(long, 0)[0].stages}
    assert hosts & other_hosts == {"edge-server"}


def test_job_waits_for_its_clusters_and_is_not_overtaken_by_jobs_that_want_them(
    client: CollaPipeClient, make: Callable[..., JobConfig]
) -> None:
    first = client.submit(make("first", [0], **FOR_EVER))
    wait_until(client, first, runs)
    both = client.submit(make("both", [0, 1]))
    last = client.submit(make("last", [1]))
    for job_id, blocker in ((both, first), (last, both)):
        status = wait_until(client, job_id, lambda status: bool(status.message))
        assert status.state == JOB_STATE_QUEUED
        assert status.message.startswith(f"waits for job {blocker} of client:")
        assert re.search(
            r" to end \(\d+ of \d+ rounds are committed, .* (left|yet)\)$", status.message
        )
    client.cancel(first)
    for job_id in (both, last):
        assert wait_until(client, job_id, lambda s: False).state == JOB_STATE_SUCCEEDED
    ended = {job.job_id: job.ended_at.ToNanoseconds() for job in client.jobs()}
    assert ended[first] <= ended[both] <= ended[last]


def test_job_whose_hosts_are_missing_holds_up_no_other(
    own_testbed: LocalTestbed, client: CollaPipeClient, make: Callable[..., JobConfig]
) -> None:
    stuck = client.submit(make("stuck", [7]))
    wait_until(client, stuck, lambda status: status.trouble.waiting)
    run_job(own_testbed, make("other", [0]))
    status = client.find_job("stuck")
    assert status.state == JOB_STATE_PREPARING
    assert [host.wanted for host in status.trouble.missing] == [
        "a control unit for cluster 7",
        "1 more device in cluster 7 (have 0)",
    ]


def test_model_is_used_while_a_job_runs_on_another_cluster(
    own_testbed: LocalTestbed, client: CollaPipeClient, make: Callable[..., JobConfig]
) -> None:
    trained = run_job(own_testbed, make("trained", [1]))
    running = client.submit(make("running", [0], **FOR_EVER))
    wait_until(client, running, runs)
    events = client.watch(running)
    next(event for event in events if event.HasField("round_committed"))
    assert list(client.predict(trained.job_id, ["road river"]))
    assert client.find_job("running").state == JOB_STATE_RUNNING
    before = client.find_job("running").num_rounds_committed
    num_rounds = (e.round_committed.num_rounds for e in events if e.HasField("round_committed"))
    assert next(number for number in num_rounds if number > before)


def test_both_jobs_go_on_bit_for_bit_after_a_kill_of_the_scheduler(
    own_testbed: LocalTestbed, client: CollaPipeClient, make: Callable[..., JobConfig]
) -> None:
    undisturbed = run_job(own_testbed, make("undisturbed", [0], rounds=6))
    jobs = [client.submit(make(f"disturbed-{index}", [index], rounds=6)) for index in (0, 1)]
    for job_id in jobs:
        wait_until(client, job_id, runs)
    kill(own_testbed, "scheduler")
    restart(own_testbed, "scheduler")
    for job_id in jobs:
        status = wait_until(client, job_id, lambda status: False)
        assert status.state == JOB_STATE_SUCCEEDED, status.message
        assert weights(own_testbed, job_id) == weights(own_testbed, undisturbed.job_id)
