"""Devices in doubt are left out where their cluster has others, and each has its reason."""

from dataclasses import replace

import pytest

from collapipe.job_life.failing_clusters import PATIENCE
from collapipe.job_life.job_devices import (
    Device,
    JobDevices,
    LeftOut,
    Why,
    begin_round,
    choose,
    forgive,
    refuse_newcomers,
    use,
)

NUM_ROUNDS = 7


def device(host_id: str, cluster: int = 0, process: str = "first", **more: bool) -> Device:
    return Device(host_id, cluster, process, **more)


def left_out(devices: JobDevices, *present: Device, needs_all: bool = False) -> dict[str, LeftOut]:
    return choose(devices, present, NUM_ROUNDS, needs_all=needs_all)[1]


def restarted(host_id: str, number: int) -> JobDevices:
    """A job that has used as many processes of a device, one after the other."""
    devices = JobDevices()
    for index in range(number + 1):
        devices, _ = choose(
            devices, [device(host_id, process=str(index))], NUM_ROUNDS, needs_all=False
        )
        devices = use(devices, {0: [host_id]}, {host_id: str(index)})
    return devices


def test_devices_without_a_fault_take_part() -> None:
    assert left_out(JobDevices(), device("a"), device("b")) == {}


@pytest.mark.parametrize(
    ("devices", "is_suspect", "reason"),
    [
        (JobDevices(), True, LeftOut(Why.SUSPECTED)),
        (JobDevices(not_finite=frozenset("a")), False, LeftOut(Why.NOT_FINITE)),
        (JobDevices(not_finite=frozenset("a")), True, LeftOut(Why.NOT_FINITE)),
        (restarted("a", int(PATIENCE)), False, LeftOut(Why.RESTARTS, NUM_ROUNDS + 1)),
    ],
)
def test_device_in_doubt_takes_part_only_without_others_in_its_cluster(
    devices: JobDevices, is_suspect: bool, reason: LeftOut
) -> None:
    doubtful = device("a", process=str(int(PATIENCE)), is_suspect=is_suspect)
    assert left_out(devices, doubtful, device("b")) == {"a": reason}
    assert left_out(devices, doubtful, device("b", cluster=1)) == {}
    assert left_out(devices, doubtful, device("b", is_suspect=True)) == {}
    devices = replace(devices, takes_doubtful=True, used={0: frozenset("a")})
    assert left_out(devices, doubtful, device("b")) == {}


def test_devices_in_doubt_take_part_until_all_that_were_used_are_there_without_doubt() -> None:
    devices = use(JobDevices(takes_doubtful=True), {0: ["a", "b"]}, {})
    suspect = device("a", is_suspect=True)
    for present in ([device("a")], [suspect, device("b"), device("c")]):
        devices, left = choose(devices, present, NUM_ROUNDS, needs_all=False)
        assert (left, devices.takes_doubtful) == ({}, True)
    devices, _ = choose(devices, [device("a"), device("b")], NUM_ROUNDS, needs_all=False)
    assert not devices.takes_doubtful
    assert left_out(devices, suspect, device("b")).keys() == {"a"}


def test_device_that_sent_a_value_that_is_not_finite_takes_part_if_the_job_needs_all() -> None:
    devices = JobDevices(not_finite=frozenset("a"))
    assert left_out(devices, device("a"), device("b"), needs_all=True) == {}


def test_device_that_restarts_takes_part_if_the_job_would_wait_for_it() -> None:
    devices = restarted("a", int(PATIENCE))
    present = device("a", process=str(int(PATIENCE))), device("b")
    assert left_out(devices, *present, needs_all=True) == {}
    assert left_out(restarted("a", int(PATIENCE) - 1), *present).keys() == {"a"}, (
        "the last one counts"
    )


def test_newcomer_with_which_no_plan_was_possible_never_takes_part() -> None:
    devices = use(JobDevices(), {0: ["a"], 1: ["b"]}, {})
    processes = dict.fromkeys(["a", "b", "new"], "1")
    devices = refuse_newcomers(begin_round(devices, {}, processes))
    assert (devices.newcomers, devices.no_plan) == (set(), {"new"})
    alone = left_out(replace(devices, takes_doubtful=True), device("new"))
    assert alone == {"new": LeftOut(Why.NO_PLAN)}


def test_used_devices_are_remembered_by_cluster() -> None:
    devices = use(use(JobDevices(), {0: ["a"], 1: ["b"]}, {}), {0: ["c"]}, {})
    assert devices.used == {0: {"a", "c"}, 1: {"b"}}
    assert devices.all_used == {"a", "b", "c"}


def test_blamed_device_is_forgiven_once_and_a_restarted_one_at_once() -> None:
    devices = JobDevices(unreached={"a": "first", "b": "first"})
    devices, blamed = forgive(devices, {"a": "first", "b": "second", "c": "first"})
    assert blamed == ["a"]
    assert forgive(devices, {"a": "first", "b": "first"})[1] == []
