"""Tests of the deletions that the scheduler refuses, puts off, or does by itself."""

import queue
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from collapipe.errors import WrongStateError
from collapipe.job import DataConfig, JobConfig, TaskConfig
from collapipe.rpc import ChannelPool, Security
from collapipe.scheduler import servicer as scheduler_servicer
from collapipe.scheduler.host_registry import HostRegistry
from collapipe.scheduler.job_runner import JobRunner
from collapipe.scheduler.job_store import JobStore
from collapipe.scheduler.retention import Retention
from collapipe.scheduler.servicer import SchedulerServicer
from collapipe.v1 import scheduler_pb2
from collapipe.v1.scheduler_pb2 import (
    CancelJobRequest,
    DeleteJobRequest,
    HeartbeatRequest,
    SubmitJobRequest,
    UseModelRequest,
    UseModelStart,
)


class _Context:
    """The side of gRPC of a call in plain text."""

    def auth_context(self) -> dict[str, Any]:
        return {}

    def peer(self) -> str:
        return "ipv4:10.0.0.7:4321"

    def add_callback(self, callback: object) -> bool:
        return True


CONTEXT: Any = _Context()


class Scheduler:
    """A scheduler without hosts, whose jobs end when a test says so."""

    def __init__(self, directory: Path, retention: Retention) -> None:
        self.jobs = JobStore(directory)
        self.registry = HostRegistry()
        self.ends = threading.Semaphore(0)
        self._started: queue.SimpleQueue[str] = queue.SimpleQueue()
        self.servicer = SchedulerServicer(
            self.jobs,
            ChannelPool(Security.insecure()),
            self.registry,
            None,  # type: ignore[arg-type]
            retention=retention,
            jobs_at_once=8,
        )

    def run(self, runner: JobRunner) -> None:
        """Stands for the run of a job."""
        runner._progress.set_state(scheduler_pb2.JOB_STATE_RUNNING, "")
        self._started.put(runner.job_id)
        assert self.ends.acquire(timeout=20)
        runner._progress.end(scheduler_pb2.JOB_STATE_SUCCEEDED, "")
        runner._events.close()

    def submit(self, name: str = "job") -> str:
        job = JobConfig(
            name=name,
            task=TaskConfig(kind="classification"),
            data=DataConfig(source="stdlib_docstrings"),
        )
        request = SubmitJobRequest(config_json=job.to_json())
        return self.servicer.SubmitJob(request, CONTEXT).job_id

    def wait_until_runs(self, job_id: str) -> None:
        """Returns when the scheduler has done with everything before this job."""
        while self._started.get(timeout=20) != job_id:
            pass

    def finish(self, name: str = "job") -> str:
        """Runs a job to its end, and waits until nothing uses it."""
        job_id = self.submit(name)
        self.ends.release()
        with self.servicer._changed:
            assert self.servicer._changed.wait_for(lambda: not self.servicer._is_used(job_id), 20)
        return job_id

    def delete(self, job_id: str) -> None:
        self.servicer.DeleteJob(DeleteJobRequest(job_id=job_id), CONTEXT)

    def deleted(self) -> list[str]:
        self.registry.register(scheduler_pb2.Host(host_id="host", incarnation="1"))
        request = HeartbeatRequest(host_id="host", incarnation="1")
        return list(self.servicer.Heartbeat(request, CONTEXT).deleted_job_ids)


@pytest.fixture
def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    made: list[Scheduler] = []
    monkeypatch.setattr(JobRunner, "run", lambda runner: made[-1].run(runner))

    @contextmanager
    def start(retention: Retention = Retention(100, 0)) -> Iterator[Scheduler]:  # noqa: B008
        made.append(Scheduler(tmp_path, retention))
        try:
            yield made[-1]
        finally:
            made[-1].ends.release(10)
            made[-1].servicer.close()

    yield start


def test_running_job_and_queued_job_are_not_deleted(make: Any) -> None:
    with make() as scheduler:
        running, queued = scheduler.submit(), scheduler.submit()
        scheduler.wait_until_runs(running)
        for job_id, state in ((running, "running"), (queued, "queued")):
            with pytest.raises(WrongStateError, match=rf"is {state}, .*jobs cancel {job_id}"):
                scheduler.delete(job_id)
        scheduler.servicer.CancelJob(CancelJobRequest(job_id=queued), CONTEXT)
        scheduler.delete(queued)
        assert [job.job_id for job in scheduler.jobs.all()] == [running]
        assert scheduler.deleted() == [queued]


def test_deletion_names_the_caller_in_the_log(make: Any, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    with make() as scheduler:
        job_id = scheduler.finish()
        scheduler.delete(job_id)
    assert f"job {job_id} was deleted: ipv4:10.0.0.7:4321 asked for it" in caplog.text


def test_job_whose_model_is_used_is_deleted_after_the_use(
    make: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scheduler_servicer, "_RELEASE_SECONDS", 0.1)
    with make() as scheduler:
        used, other = scheduler.finish("used"), scheduler.finish("other")
        running = scheduler.submit()
        start = UseModelRequest(start=UseModelStart(job_id=used))
        outputs = scheduler.servicer.UseModel(iter([start]), CONTEXT)
        next(outputs)  # It waits behind the running job.
        with pytest.raises(WrongStateError, match=f"job {used} is used at the moment"):
            scheduler.delete(used)
        scheduler.delete(other)
        outputs.close()
        scheduler.ends.release()
        last = scheduler.submit()
        scheduler.wait_until_runs(last)
        scheduler.delete(used)
        assert [job.job_id for job in scheduler.jobs.all()] == [running, last]


def test_old_jobs_go_when_a_job_ends_and_when_the_scheduler_starts(
    make: Any, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    with make(Retention(2, 0)) as scheduler:
        ended = [scheduler.finish() for _ in range(3)]
        scheduler.wait_until_runs(scheduler.submit())
        assert scheduler.deleted() == ended[:1]
        assert f"job {ended[0]} was deleted: --keep-jobs 2: 2 jobs ended after it" in caplog.text
    with make(Retention(1, 0)) as scheduler:
        assert ended[1] in scheduler.deleted()


def test_old_job_whose_model_is_used_stays_until_the_use_has_ended(make: Any) -> None:
    with make(Retention(1, 0)) as scheduler:
        used = scheduler.finish("used")
        newer = scheduler.submit("newer")
        scheduler.wait_until_runs(newer)
        start = UseModelRequest(start=UseModelStart(job_id=used))
        outputs = scheduler.servicer.UseModel(iter([start]), CONTEXT)
        next(outputs)  # It waits behind the newer job.
        last = scheduler.submit("last")
        scheduler.servicer._queue.rotate(1)  # The use now waits behind the last job, too.
        scheduler.ends.release()
        scheduler.wait_until_runs(last)
        assert {job.job_id for job in scheduler.jobs.all()} == {used, newer, last}
        outputs.close()
        scheduler.ends.release()
        probe = scheduler.submit()
        scheduler.wait_until_runs(probe)
        assert {job.job_id for job in scheduler.jobs.all()} == {last, probe}
