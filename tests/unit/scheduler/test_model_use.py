"""A use of a model ends its turn if its client holds it up, and waits for hosts that have not registered yet."""

import threading
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

from collapipe.errors import CancelledError
from collapipe.job import DataConfig, JobConfig, TaskConfig
from collapipe.rpc import ChannelPool, Security
from collapipe.scheduler import model_use
from collapipe.scheduler.host_registry import HostRegistry
from collapipe.scheduler.job_store import JobStore, RoundDocument
from collapipe.scheduler.model_use import ModelUse
from collapipe.v1.model_use_pb2 import ModelOutput
from collapipe.v1.plan_pb2 import Plan, Stage
from collapipe.v1.scheduler_pb2 import UseModelStart

from .jobs import hosts


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_use, "SIGN_OF_LIFE_SECONDS", 0.02)
    monkeypatch.setattr(model_use, "_CLIENT_SILENCE_SECONDS", 0.1)


@pytest.fixture
def registry() -> HostRegistry:
    return HostRegistry()


@pytest.fixture
def jobs(tmp_path: Path) -> JobStore:
    """Has one job, whose only round ran on two devices."""
    jobs = JobStore(tmp_path)
    job = JobConfig(
        task=TaskConfig(kind="classification"), data=DataConfig(source="stdlib_docstrings")
    )
    document = jobs.create(job)
    document.num_rounds_committed = 1
    document.vocabulary_digest = "ab" * 32
    jobs.save(document)
    stages = [Stage(host_id=host_id) for host_id in ("control-unit", "device-0", "device-1")]
    plans = [Plan(plan_id="plan", stages=stages)]
    jobs.save_round(
        document.job_id, 0, RoundDocument(attempt=0, plans=plans, decision={}, total_steps=1)
    )
    return jobs


def make_use(jobs: JobStore, registry: HostRegistry, chunks: Iterable[bytes] = ()) -> ModelUse:
    start = UseModelStart(job_id=jobs.all()[0].job_id)
    return ModelUse(start, iter(chunks), registry, jobs, ChannelPool(Security.insecure()))


def run_turn(use: ModelUse) -> threading.Thread:
    turn = threading.Thread(target=use.run, daemon=True)
    turn.start()
    return turn


def test_client_that_takes_no_answer_loses_its_turn(
    jobs: JobStore, registry: HostRegistry, monkeypatch: pytest.MonkeyPatch
) -> None:
    use = make_use(jobs, registry)

    def answers() -> Iterator[ModelOutput]:
        yield ModelOutput(waiting_for="the first answer")
        use._calls.sleep()
        yield ModelOutput(waiting_for="another answer")

    monkeypatch.setattr(use, "_run", answers)
    turn = run_turn(use)
    outputs = use.outputs(lambda: "")
    assert next(outputs).waiting_for == "the first answer"
    turn.join(60)
    assert not turn.is_alive()
    with pytest.raises(CancelledError, match=r"the client did not take an answer for 0\.1 s"):
        next(outputs)


def test_client_that_sends_no_more_of_its_file_loses_its_turn(
    jobs: JobStore, registry: HostRegistry
) -> None:
    arrived = threading.Event()

    def chunks() -> Iterator[bytes]:
        yield b"the first rows"
        arrived.wait(60)

    use = make_use(jobs, registry, chunks())
    sent = use._sent_chunks()
    assert next(sent) == b"the first rows"
    sender = threading.Thread(target=lambda: list(sent), daemon=True)
    sender.start()
    turn = run_turn(use)
    turn.join(60)
    assert not turn.is_alive()
    with pytest.raises(CancelledError, match="the client did not send its file"):
        use._calls.sleep()
    arrived.set()
    sender.join(60)
    assert not sender.is_alive()


def test_use_waits_for_planned_hosts_that_have_not_registered_yet(
    jobs: JobStore, registry: HostRegistry
) -> None:
    use, all_hosts = make_use(jobs, registry), hosts(2)
    early = [host for host in all_hosts.by_id.values() if host.host_id != "device-1"]
    for host in early:
        registry.register(host)
    waiting = use._wait_for_hosts(jobs.all()[0])
    assert next(waiting).waiting_for == "device-1"
    registry.register(all_hosts.by_id["device-1"])
    with pytest.raises(StopIteration) as found:
        next(waiting)
    assert found.value.value.by_id.keys() == all_hosts.by_id.keys()


def test_use_does_not_wait_for_hosts_that_are_gone(
    jobs: JobStore, registry: HostRegistry, monkeypatch: pytest.MonkeyPatch
) -> None:
    all_hosts = hosts(2)
    for host in all_hosts.by_id.values():
        registry.register(host)
    there = [host for host in registry.alive() if host.host_id != "device-1"]
    monkeypatch.setattr(registry, "alive", lambda: there)
    with pytest.raises(StopIteration) as found:
        next(make_use(jobs, registry)._wait_for_hosts(jobs.all()[0]))
    assert "device-1" not in found.value.value.by_id
