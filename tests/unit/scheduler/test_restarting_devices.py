"""Devices whose restarts end attempts, and how a job goes on without them."""

import itertools
from types import SimpleNamespace
from typing import Any

import pytest

from collapipe.rpc import ChannelPool
from collapipe.scheduler.events import EventLog
from collapipe.scheduler.failing_clusters import LONGEST_PAUSE
from collapipe.scheduler.host_registry import HostRegistry
from collapipe.scheduler.job_runner import JobRunner
from collapipe.scheduler.job_store import JobDocument, JobStore
from collapipe.scheduler.restarting_devices import RestartingDevices, pause_after
from collapipe.scheduler.telemetry_window import Telemetry
from collapipe.v1 import scheduler_pb2
from collapipe.v1.scheduler_pb2 import Host

from .jobs import Source, hosts, published


def restart(devices: RestartingDevices, number: int, num_rounds: int) -> set[str]:
    """Lets a device take part, and then start again. Returns the devices to leave out."""
    devices.takes_part([Host(host_id="a", incarnation=str(number)), Host(host_id="b")])
    after = [Host(host_id="a", incarnation=str(number + 1)), Host(host_id="b")]
    devices.look(after, num_rounds)
    return set(devices.look(after, num_rounds))


def test_pause_begins_with_the_third_restart_and_doubles_up_to_a_limit() -> None:
    pauses = [pause_after(number) for number in (1, 2, 2.9, 3, 4, 5, 7, 8, 1e6)]
    assert pauses == [0, 0, 0, 1, 2, 4, 16, LONGEST_PAUSE, LONGEST_PAUSE]


def test_device_takes_part_again_after_new_rounds_and_is_left_out_for_longer_next_time() -> None:
    devices = RestartingDevices()
    assert [restart(devices, number, 7) for number in range(3)] == [set(), set(), {"a"}]
    assert "8 rounds" in devices.look([], 7)["a"]
    assert devices.look([], 8) == {}
    assert restart(devices, 3, 8) == {"a"}
    assert devices.look([], 9) and not devices.look([], 10)


def test_ten_new_rounds_make_up_for_one_restart() -> None:
    devices = RestartingDevices()
    for number in range(20):
        assert not restart(devices, number, number)
        for _ in range(10):
            devices.committed([Host(host_id="a")])


def test_restart_of_a_device_that_took_no_part_does_not_count() -> None:
    devices = RestartingDevices()
    for number in range(10):
        assert not devices.look([Host(host_id="a", incarnation=str(number))], 0)


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

    def attempt() -> None:
        chosen = runner._wait_for_hosts()
        runner._restarting.takes_part(chosen.devices)
        taken.append({device.host_id for device in chosen.devices})
        liar = Host()
        liar.CopyFrom(present.by_id["device-0"])
        liar.incarnation = str(next(numbers))
        registry.register(liar)
        rounds: Any = SimpleNamespace(state_holders=taken[-1], num_rounds=0)
        runner._begin_round(rounds, SimpleNamespace(hosts=chosen, take_hosts=lambda _: None))  # type: ignore[arg-type]

    monkeypatch.setattr(runner, "_run_attempt", attempt)
    runner._run_attempts()
    assert taken == [{"device-0", "device-1"}] * 3 + [{"device-1"}]
    left_out = scheduler_pb2.INCIDENT_CODE_HOST_LEFT_OUT
    (told,) = [one.incident for one in published(events) if one.incident.code == left_out]
    assert list(told.host_ids) == ["device-0"] and "3 times" in told.message
