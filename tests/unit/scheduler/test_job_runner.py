"""The loop of a job: what is told and stored when it is cancelled, stopped or fails outside of a round."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from planned_jobs import Source, hosts, published

from collapipe.errors import AttemptFailedError, InfeasibleError
from collapipe.rpc import ChannelPool
from collapipe.scheduler.events import EventLog
from collapipe.scheduler.host_registry import HostRegistry
from collapipe.scheduler.job_documents import JobDocument
from collapipe.scheduler.job_runner import JobRunner
from collapipe.scheduler.job_store import JobStore
from collapipe.scheduler.telemetry_window import Telemetry
from collapipe.v1 import scheduler_pb2
from collapipe.v1.scheduler_pb2 import IncidentCode

FAILED = scheduler_pb2.INCIDENT_CODE_ATTEMPT_FAILED
WAITING = scheduler_pb2.INCIDENT_CODE_WAITING_FOR_HOSTS
GIVEN_UP = scheduler_pb2.INCIDENT_CODE_JOB_GIVEN_UP


class Clock:
    """A clock that moves when the job waits."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.waits: list[float] = []
        self.on_wait: Callable[[], None] = lambda: None

    def monotonic(self) -> float:
        return self.now

    def time(self) -> float:
        return self.now

    def sleep(self, seconds: float = 0.2) -> None:
        self.now += seconds
        if seconds:
            self.waits.append(seconds)
            self.on_wait()


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr("collapipe.scheduler.job_runner.time", clock)
    return clock


@pytest.fixture
def runner(
    document: JobDocument,
    store: JobStore,
    events: EventLog,
    channels: ChannelPool,
    clock: Clock,
    monkeypatch: pytest.MonkeyPatch,
) -> JobRunner:
    """Runs a job whose hosts are there. Its waits take no time."""
    registry = HostRegistry()
    for host in hosts(2).by_id.values():
        registry.register(host)
    runner = JobRunner(document, registry, store, channels, events, Telemetry(Source(), 1.0))
    sleep = runner._calls.sleep

    def wait(seconds: float = 0.2) -> None:
        clock.sleep(seconds)
        sleep(0)

    monkeypatch.setattr(runner._calls, "sleep", wait)
    return runner


def fails(monkeypatch: pytest.MonkeyPatch, runner: JobRunner, error: BaseException) -> None:
    """Makes each attempt fail when the job is prepared."""

    def prepare(*arguments: Any) -> None:
        raise error

    monkeypatch.setattr(runner._preparation, "prepare", prepare)


def incidents(events: EventLog) -> list[IncidentCode]:
    return [each.incident.code for each in published(events) if each.HasField("incident")]


@pytest.mark.parametrize("text", ["the edge server has other weights", ""])
def test_failed_attempts_are_counted_and_told_whatever_their_error_says(
    runner: JobRunner,
    document: JobDocument,
    events: EventLog,
    clock: Clock,
    monkeypatch: pytest.MonkeyPatch,
    text: str,
) -> None:
    fails(monkeypatch, runner, AttemptFailedError(text))
    runner.run()
    assert document.state == scheduler_pb2.JOB_STATE_FAILED
    assert clock.waits == [0.5, 1.0, 2.0, 4.0, 8.0, 15.0, 15.0], "up to 60 s"
    codes = incidents(events)
    assert (codes.count(FAILED), codes.count(GIVEN_UP)) == (8, 1)
    assert document.attempt == 8


@pytest.mark.parametrize("is_stopped", [True, False])
def test_job_that_is_ended_between_two_attempts_keeps_what_its_last_failure_said(
    runner: JobRunner,
    document: JobDocument,
    events: EventLog,
    clock: Clock,
    monkeypatch: pytest.MonkeyPatch,
    is_stopped: bool,
) -> None:
    fails(monkeypatch, runner, AttemptFailedError("no weights"))
    clock.on_wait = runner.stop if is_stopped else lambda: runner.cancel("cancelled by a test")
    runner.run()
    state = scheduler_pb2.JOB_STATE_QUEUED if is_stopped else scheduler_pb2.JOB_STATE_CANCELLED
    assert (document.state, document.attempt) == (state, 1)
    assert ("stopped" if is_stopped else "cancelled by a test") in document.message
    statuses = [each.status for each in published(events) if each.HasField("status")]
    assert not any("cancelled" in status.trouble.failure for status in statuses)
    assert max(status.trouble.num_failures for status in statuses) == 2
    assert incidents(events) == [FAILED, FAILED]


def test_full_disk_at_the_beginning_of_an_attempt_is_a_failure_of_it(
    runner: JobRunner, document: JobDocument, events: EventLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    fails(monkeypatch, runner, AttemptFailedError("no weights"))
    begin, errors = runner._progress.begin_attempt, [OSError(28, "the disk is full")]

    def begin_attempt() -> None:
        if errors:
            raise errors.pop()
        fails(monkeypatch, runner, InfeasibleError("too large"))
        begin()

    monkeypatch.setattr(runner._progress, "begin_attempt", begin_attempt)
    runner.run()
    told = [each.incident.message for each in published(events) if each.HasField("incident")]
    assert len(told) == 3 and "no weights" in told[0]
    assert "could not use its disk" in told[1] and "too large" in told[2]
    assert (document.state, document.attempt) == (scheduler_pb2.JOB_STATE_FAILED, 1)


def test_bug_ends_the_job_and_its_events(
    runner: JobRunner, document: JobDocument, events: EventLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    def store_copied() -> None:
        raise KeyError("another bug")

    def prepare() -> None:
        rounds = SimpleNamespace(state=SimpleNamespace(has_plan=True), store_copied=store_copied)
        monkeypatch.setattr(runner, "_rounds", rounds)
        raise KeyError("a bug")

    monkeypatch.setattr(runner, "_prepare", prepare)
    runner.run()
    assert document.state == scheduler_pb2.JOB_STATE_FAILED and "KeyError" in document.message
    assert all(event is not None for event in events.watch(1.0)), "whoever watches would wait"
    assert runner._calls.is_cancelled


def test_job_without_hosts_says_what_it_waits_for_and_gives_up(
    document: JobDocument,
    store: JobStore,
    events: EventLog,
    channels: ChannelPool,
    clock: Clock,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    runner = JobRunner(document, HostRegistry(), store, channels, events, Telemetry(Source(), 1.0))
    monkeypatch.setattr(runner._calls, "sleep", clock.sleep)
    runner.run()
    limit = runner._job.schedule.wait_for_hosts_seconds
    assert sum(clock.waits) == pytest.approx(limit, abs=0.5)
    assert incidents(events) == [WAITING, GIVEN_UP]
    told = [each.incident.message for each in published(events) if each.HasField("incident")]
    assert all("an edge server" in message for message in told)
    assert f"wait_for_hosts_seconds allows {limit:g} s" in document.message
