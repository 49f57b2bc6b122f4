"""Uses of models, deletions and returns to earlier commits that the scheduler refuses, puts off, or does by itself."""

import queue
import threading
from collections.abc import Callable, Iterator
from concurrent import futures
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from planned_jobs import hosts, job, serving

from collapipe.data.rows import READING_VERSION
from collapipe.errors import CancelledError, NotFoundError, WrongStateError
from collapipe.rpc import ChannelPool, Security
from collapipe.scheduler import model_use
from collapipe.scheduler import servicer as scheduler_servicer
from collapipe.scheduler.events import Event
from collapipe.scheduler.host_registry import EDGE_SERVER, HostRegistry
from collapipe.scheduler.job_documents import JobDocument, RoundDocument
from collapipe.scheduler.job_runner import JobRunner
from collapipe.scheduler.job_store import JobStore
from collapipe.scheduler.model_use import ModelUse
from collapipe.scheduler.retention import Retention
from collapipe.scheduler.servicer import SchedulerServicer
from collapipe.v1 import edge_server_pb2, edge_server_pb2_grpc, plan_pb2, scheduler_pb2
from collapipe.v1.model_use_pb2 import ModelOutput
from collapipe.v1.plan_pb2 import Plan, Stage
from collapipe.v1.scheduler_pb2 import UseModelStart

LIMIT_SECONDS = 60.0
MakeUse = Callable[[Iterator[bytes]], ModelUse]


@pytest.fixture
def registry() -> HostRegistry:
    return HostRegistry()


@pytest.fixture
def make_use(
    store: JobStore,
    document: JobDocument,
    registry: HostRegistry,
    channels: ChannelPool,
    monkeypatch: pytest.MonkeyPatch,
) -> MakeUse:
    """Makes impatient uses of a job whose only round ran on two devices."""
    monkeypatch.setattr(model_use, "SIGN_OF_LIFE_SECONDS", 0.02)
    monkeypatch.setattr(model_use, "_CLIENT_SILENCE_SECONDS", 0.1)
    document.num_rounds_committed = 1
    document.vocabulary_digest, document.reading_version = "ab" * 32, READING_VERSION
    store.save(document)
    stages = [Stage(host_id=host_id) for host_id in ("control-unit", "device-0", "device-1")]
    plans = [Plan(plan_id="plan", stages=stages)]
    record = RoundDocument(attempt=0, plans=plans, decision={}, total_steps=1)
    store.save_round(document.job_id, 0, record)
    start = UseModelStart(job_id=document.job_id)
    return lambda chunks: ModelUse(start, chunks, registry, store, channels)


@pytest.fixture
def use(make_use: MakeUse) -> ModelUse:
    return make_use(iter(()))


def run_until_it_ends(use: ModelUse) -> None:
    turn = threading.Thread(target=use.run, daemon=True)
    turn.start()
    turn.join(LIMIT_SECONDS)
    assert not turn.is_alive()


def test_client_that_takes_nothing_loses_its_turn(
    use: ModelUse, monkeypatch: pytest.MonkeyPatch
) -> None:
    def answers() -> Iterator[ModelOutput]:
        yield ModelOutput(waiting_for="the first answer")
        use._calls.sleep()
        yield ModelOutput(waiting_for="another answer")

    monkeypatch.setattr(use, "_run", answers)
    use._has_turn.set()
    outputs = use.outputs(lambda: "")
    assert next(outputs).waiting_for == "the first answer"
    run_until_it_ends(use)
    with pytest.raises(CancelledError, match=r"take an answer for 0\.1 s"):
        next(outputs)


def test_client_that_sends_no_more_of_its_file_loses_its_turn(make_use: MakeUse) -> None:
    asked, arrived = threading.Event(), threading.Event()

    def chunks() -> Iterator[bytes]:
        yield b"the first rows"
        asked.set()
        arrived.wait(LIMIT_SECONDS)

    use = make_use(chunks())
    sent = use._sent_chunks()
    assert next(sent) == b"the first rows"
    sender = threading.Thread(target=lambda: list(sent), daemon=True)
    sender.start()
    assert asked.wait(LIMIT_SECONDS)
    run_until_it_ends(use)
    with pytest.raises(CancelledError, match="send its file"):
        use._calls.sleep()
    arrived.set()
    sender.join(LIMIT_SECONDS)
    assert not sender.is_alive()


def test_use_waits_for_planned_hosts_that_have_not_registered_yet(
    use: ModelUse, document: JobDocument, registry: HostRegistry
) -> None:
    by_id = hosts(2).by_id
    for host_id in by_id.keys() - {"device-1"}:
        registry.register(by_id[host_id])
    waiting = use._wait_for_hosts(document)
    assert next(waiting).waiting_for == "device-1"
    registry.register(by_id["device-1"])
    with pytest.raises(StopIteration) as found:
        next(waiting)
    assert found.value.value.by_id.keys() == by_id.keys()


def test_use_does_not_wait_for_hosts_that_are_gone(
    use: ModelUse, document: JobDocument, registry: HostRegistry, monkeypatch: pytest.MonkeyPatch
) -> None:
    for host in hosts(2).by_id.values():
        registry.register(host)
    there = [host for host in registry.alive() if host.host_id != "device-1"]
    monkeypatch.setattr(registry, "alive", lambda: there)
    with pytest.raises(StopIteration) as found:
        next(use._wait_for_hosts(document))
    assert "device-1" not in found.value.value.by_id


CONTEXT: Any = Mock(auth_context=dict, peer=lambda: "ipv4:10.0.0.7:4321")
"""The side of gRPC of a call in plain text."""


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
        assert self.ends.acquire(timeout=LIMIT_SECONDS)
        runner._progress.end(scheduler_pb2.JOB_STATE_SUCCEEDED, "")
        runner._events.close()

    def submit(self, name: str = "job", *, resume: bool = False, cluster: int = 0) -> str:
        config = job(more={"name": name, "use_clusters": [cluster]})
        request = scheduler_pb2.SubmitJobRequest(config_json=config.to_json(), resume=resume)
        return self.servicer.SubmitJob(request, CONTEXT).job_id

    def wait_until_runs(self, job_id: str) -> None:
        """Returns when the scheduler has done with everything before this job."""
        while self._started.get(timeout=LIMIT_SECONDS) != job_id:
            pass

    def wait_until_unused(self, job_id: str) -> None:
        with self.servicer._changed:
            is_free = self.servicer._changed.wait_for(
                lambda: not self.servicer._is_used(job_id), LIMIT_SECONDS
            )
        assert is_free

    def finish(self, name: str = "job") -> str:
        """Runs a job to its end."""
        job_id = self.submit(name)
        self.ends.release()
        self.wait_until_unused(job_id)
        return job_id

    def use(self, job_id: str) -> Any:
        """Begins to use a model, and returns the outputs after the first one."""
        start = scheduler_pb2.UseModelRequest(start=scheduler_pb2.UseModelStart(job_id=job_id))
        outputs = self.servicer.UseModel(iter([start]), CONTEXT)
        next(outputs)
        return outputs

    def delete(self, job_id: str) -> None:
        self.servicer.DeleteJob(scheduler_pb2.DeleteJobRequest(job_id=job_id), CONTEXT)

    def deleted(self) -> list[str]:
        self.registry.register(scheduler_pb2.Host(host_id="host", incarnation="1"))
        request = scheduler_pb2.HeartbeatRequest(host_id="host", incarnation="1")
        return list(self.servicer.Heartbeat(request, CONTEXT).deleted_job_ids)

    def go_back(self, job_id: str) -> int:
        """Goes back to the first commit. Returns the number of committed rounds."""
        request = scheduler_pb2.RollBackJobRequest(job_id=job_id, num_rounds=1)
        *_, answer = self.servicer.RollBackJob(request, CONTEXT)
        return answer.job.num_rounds_committed

    def job_ids(self) -> list[str]:
        return [document.job_id for document in self.jobs.all()]


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


@pytest.fixture
def scheduler(make: Any) -> Iterator[Scheduler]:
    with make() as started:
        yield started


def test_only_the_last_jobs_that_are_over_keep_their_events_in_memory(
    scheduler: Scheduler, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scheduler_servicer, "_KEPT_LOGS", 2)
    first, second = scheduler.finish("first"), scheduler.finish("second")
    scheduler.submit("first", resume=True)
    scheduler.ends.release()
    scheduler.wait_until_unused(first)
    third = scheduler.finish("third")
    log = scheduler.servicer.log
    assert log(first) and log(third) and log(second) is None
    request = scheduler_pb2.WatchJobRequest(job_id=second)
    (event,) = scheduler.servicer.WatchJob(request, CONTEXT)
    assert event.status.state == scheduler_pb2.JOB_STATE_SUCCEEDED
    assert scheduler.jobs.find_events(second)


def test_running_job_and_queued_job_are_not_deleted(scheduler: Scheduler) -> None:
    running, queued = scheduler.submit(), scheduler.submit()
    scheduler.wait_until_runs(running)
    for job_id, state in ((running, "running"), (queued, "queued")):
        with pytest.raises(WrongStateError, match=rf"{state}.*cancel {job_id}"):
            scheduler.delete(job_id)
    scheduler.servicer.CancelJob(scheduler_pb2.CancelJobRequest(job_id=queued), CONTEXT)
    scheduler.delete(queued)
    assert scheduler.job_ids() == [running]
    assert scheduler.deleted() == [queued]


def test_job_whose_model_is_used_is_deleted_after_the_use(
    scheduler: Scheduler, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    monkeypatch.setattr(scheduler_servicer, "_RELEASE_SECONDS", 0.1)
    used, other = scheduler.finish("used"), scheduler.finish("other")
    with pytest.raises(NotFoundError, match=other):  # It has ended.
        scheduler.servicer.CancelJob(scheduler_pb2.CancelJobRequest(job_id=other), CONTEXT)
    running = scheduler.submit()
    outputs = scheduler.use(used)  # It waits behind the running job.
    with pytest.raises(WrongStateError, match=used):
        scheduler.delete(used)
    scheduler.delete(other)
    assert f"{other} was deleted: ipv4:10.0.0.7:4321 " in caplog.text
    outputs.close()
    scheduler.ends.release()
    last = scheduler.submit()
    scheduler.wait_until_runs(last)
    scheduler.delete(used)
    assert scheduler.job_ids() == [running, last]


def test_old_jobs_go_at_an_end_and_at_a_start(make: Any, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    with make(Retention(2, 0)) as scheduler:
        ended = [scheduler.finish() for _ in range(3)]
        scheduler.wait_until_runs(scheduler.submit())
        assert scheduler.deleted() == ended[:1]
        assert f"{ended[0]} was deleted: --keep-jobs 2:" in caplog.text
    with make(Retention(1, 0)) as scheduler:
        assert ended[1] in scheduler.deleted()


def test_old_job_whose_model_is_used_stays_until_the_use_has_ended(make: Any) -> None:
    with make(Retention(1, 0)) as scheduler:
        used = scheduler.finish("used")
        newer = scheduler.submit("newer")
        scheduler.wait_until_runs(newer)
        outputs = scheduler.use(used)  # It waits behind the newer job.
        last = scheduler.submit("last")
        scheduler.servicer._queue.rotate(1)  # The use now waits behind the last job, too.
        scheduler.ends.release()
        scheduler.wait_until_runs(last)
        assert set(scheduler.job_ids()) == {used, newer, last}
        outputs.close()
        scheduler.ends.release()
        probe = scheduler.submit()
        scheduler.wait_until_runs(probe)
        assert set(scheduler.job_ids()) == {last, probe}


class EdgeServer(edge_server_pb2_grpc.EdgeServerServiceServicer):
    """An edge server that goes back only when it may."""

    def __init__(self) -> None:
        self.asked, self.may_go_on = threading.Event(), threading.Event()

    def RollBack(self, request: Any, context: Any) -> Iterator[edge_server_pb2.RollBackResponse]:
        self.asked.set()
        assert self.may_go_on.wait(LIMIT_SECONDS)
        commit = plan_pb2.Commit(num_rounds=request.num_rounds, attempt=request.attempt)
        yield edge_server_pb2.RollBackResponse(commit=commit)


@contextmanager
def registered(scheduler: Scheduler) -> Iterator[EdgeServer]:
    """Registers an edge server."""
    servicer = EdgeServer()  # type: ignore[abstract]
    add = edge_server_pb2_grpc.add_EdgeServerServiceServicer_to_server
    with serving(servicer, add) as address:
        scheduler.registry.register(
            scheduler_pb2.Host(host_id="edge", role=EDGE_SERVER, address=address, incarnation="1")
        )
        yield servicer
        servicer.may_go_on.set()


@pytest.fixture
def edge(scheduler: Scheduler) -> Iterator[EdgeServer]:
    with registered(scheduler) as servicer:
        yield servicer


@pytest.fixture
def ended(scheduler: Scheduler) -> str:
    """A job with three commits."""
    job_id = scheduler.finish()
    document = scheduler.jobs.get(job_id)
    document.num_rounds_committed, document.reading_version = 3, READING_VERSION
    document.vocabulary_digest = "ab" * 32
    scheduler.jobs.save(document)
    return job_id


def test_job_does_not_go_back_without_an_edge_server_but_with_one_that_another_job_has_blamed(
    scheduler: Scheduler, ended: str
) -> None:
    for _ in range(2):  # A failure leaves the job free.
        with pytest.raises(WrongStateError, match="edge server"):
            scheduler.go_back(ended)
    document = scheduler.jobs.get(ended)
    assert (document.num_rounds_committed, document.attempt) == (3, 0)
    with registered(scheduler) as edge:
        scheduler.registry.suspect("edge", "it broke its stream")
        edge.may_go_on.set()
        assert scheduler.go_back(ended) == 1


def test_job_resumed_while_going_back_waits(
    scheduler: Scheduler, ended: str, edge: EdgeServer
) -> None:
    with futures.ThreadPoolExecutor(1) as thread:
        going = thread.submit(scheduler.go_back, ended)
        assert edge.asked.wait(LIMIT_SECONDS)
        with pytest.raises(WrongStateError, match="already"):
            scheduler.go_back(ended)
        scheduler.submit(resume=True)
        with pytest.raises(WrongStateError, match="queued"):
            scheduler.go_back(ended)
        # Jobs begin in the order of the queue, so the resumed one is passed over.
        scheduler.wait_until_runs(scheduler.submit("other", cluster=1))
        assert scheduler.servicer.queue() == [ended]
        edge.may_go_on.set()
        assert going.result(LIMIT_SECONDS) == 1
    document = scheduler.jobs.get(ended)
    assert document.last_commit == (1, 1)
    assert document.attempt > 1, "its next commit must be newer"
    scheduler.wait_until_runs(ended)


def test_job_whose_model_is_used_does_not_go_back(
    scheduler: Scheduler, ended: str, edge: EdgeServer
) -> None:
    outputs = scheduler.use(ended)  # It waits for a control unit.
    with pytest.raises(WrongStateError, match="in use"):
        scheduler.go_back(ended)
    outputs.close()
    scheduler.wait_until_unused(ended)
    edge.may_go_on.set()
    assert scheduler.go_back(ended) == 1


def test_events_of_a_run_are_kept_if_the_job_is_resumed_at_once(scheduler: Scheduler) -> None:
    job_id = scheduler.submit("job")
    scheduler.wait_until_runs(job_id)
    runner = scheduler.servicer._runners[job_id]
    runner.log.publish(Event(data_note=scheduler_pb2.DataNote(message="said by the first run")))
    document = scheduler.jobs.get(job_id)
    document.state = scheduler_pb2.JOB_STATE_FAILED  # The run has not told the scheduler yet.
    scheduler.submit("job", resume=True)
    scheduler.servicer._store_events(runner)
    events = scheduler.jobs.find_events(job_id)
    assert events and any("said by the first run" in event["text"] for event in events)


def test_dump_cuts_large_rows_into_messages(scheduler: Scheduler) -> None:
    job_id, text = scheduler.finish(), "x" * 2_500_000
    record = RoundDocument(attempt=0, plans=[], decision={"text": text}, total_steps=1)
    scheduler.jobs.save_round(job_id, 0, record)
    request = scheduler_pb2.DumpJobRequest(job_id=job_id)
    rows = list(scheduler.servicer.DumpJob(request, CONTEXT))
    parts = [row.document_json for row in rows if row.table == "round"]
    assert len(parts) == 3 and all(row.ByteSize() < 2_000_000 for row in rows)
    assert text in "".join(parts)
    with pytest.raises(NotFoundError):
        list(scheduler.servicer.DumpJob(scheduler_pb2.DumpJobRequest(job_id="none"), CONTEXT))
