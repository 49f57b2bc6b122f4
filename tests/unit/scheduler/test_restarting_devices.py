"""A device whose restarts end attempts, and how a job goes on without it."""

import itertools
from types import SimpleNamespace
from typing import Any

import pytest
from planned_jobs import Source, hosts, published

from collapipe.errors import InvalidInputError
from collapipe.rpc import ChannelPool
from collapipe.scheduler.events import EventLog
from collapipe.scheduler.host_registry import HostRegistry
from collapipe.scheduler.job_documents import JobDocument
from collapipe.scheduler.job_runner import JobRunner
from collapipe.scheduler.job_store import JobStore
from collapipe.scheduler.telemetry_window import Telemetry
from collapipe.v1 import scheduler_pb2
from collapipe.v1.scheduler_pb2 import Host


def test_device_that_registers_anew_in_each_attempt_ends_only_a_few(
    document: JobDocument,
    store: JobStore,
    events: EventLog,
    channels: ChannelPool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    registry = HostRegistry()
    present = hosts(2)
    for host in present.by_id.values():
        registry.register(host)
    runner = JobRunner(document, registry, store, channels, events, Telemetry(Source(), 1.0))
    # The job has run before, so that fewer devices will do.
    monkeypatch.setattr(runner, "_planned_hosts", lambda: {0: {"device-0", "device-1"}})
    monkeypatch.setattr(runner._calls, "sleep", lambda seconds=0.0: None)
    numbers = itertools.count()
    taken: list[set[str]] = []

    def prepare() -> None:
        chosen = runner._choice.hosts
        assert chosen is not None
        processes = {device.host_id: device.incarnation for device in chosen.devices}
        taken.append({device.host_id for device in chosen.devices})
        liar = Host()
        liar.CopyFrom(present.by_id["device-0"])
        liar.incarnation = str(next(numbers))
        registry.register(liar)
        rounds: Any = SimpleNamespace(state_holders=processes, num_rounds=0)
        runner._begin_round(rounds, SimpleNamespace(hosts=chosen, take_hosts=lambda _: None))  # type: ignore[arg-type]
        raise InvalidInputError("the device takes no part any more")

    monkeypatch.setattr(runner, "_prepare", prepare)
    with pytest.raises(InvalidInputError):
        runner._run_attempts()
    assert taken == [{"device-0", "device-1"}] * 3 + [{"device-1"}]
    left_out = scheduler_pb2.INCIDENT_CODE_HOST_LEFT_OUT
    (told,) = [one.incident for one in published(events) if one.incident.code == left_out]
    assert list(told.host_ids) == ["device-0"] and "3 times" in told.message
