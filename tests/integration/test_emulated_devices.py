"""Tests emulated devices: they are slower, but compute the same results."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from reference.tiny_jobs import make_job

from collapipe.emulation.device_profiles import DEVICE_PROFILES
from collapipe.emulation.emulation_file import EmulatedDevice, Emulation
from collapipe.v1.scheduler_pb2 import Host
from collapipe_client import Device, LocalTestbed
from collapipe_client.emulation_check import EmulationReading
from integration.exactness import check_equals_reference
from integration.running import run_job

PI = DEVICE_PROFILES["raspberry-pi-4"]
SCALE = 10.0


def make_emulation(slowdown: float) -> Emulation:
    device = EmulatedDevice(profile="raspberry-pi-4", slowdown=slowdown)
    return Emulation(devices={"device-0-0": device}, time_scale=SCALE)


@pytest.fixture(scope="module")
def emulated(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalTestbed]:
    """Two devices, of which only the first is emulated."""
    devices = [Device(energy_budget_joules=50.0), Device()]
    folder = tmp_path_factory.mktemp("emulated")
    with LocalTestbed([devices], folder, emulation=make_emulation(1.0)) as testbed:
        testbed.wait_until_registered()
        yield testbed


def test_emulated_device_registers_its_memory_its_watts_and_its_budget(
    emulated: LocalTestbed,
) -> None:
    with emulated.client() as client:
        hosts: dict[str, Host] = {status.host.host_id: status.host for status in client.hosts()}
    pi, other = hosts["device-0-0"], hosts["device-0-1"]
    assert (pi.memory_bytes, pi.busy_watts) == (PI.memory_bytes, PI.busy_watts)
    assert pi.energy_budget_joules == 50
    assert (other.memory_bytes, other.busy_watts) == (0, 0)


def test_training_on_an_emulated_device_is_slower_and_equals_the_reference(
    emulated: LocalTestbed, tmp_path: Path
) -> None:
    job = make_job(tmp_path, devices_per_cluster=2)

    training, schedule = job.training, job.schedule
    micro_batches = training.rounds * training.local_steps * schedule.num_micro_batches
    for slowdown in (1.0, 3.0):
        emulated.emulate(make_emulation(slowdown))
        before = EmulationReading.of(emulated)
        finished = run_job(emulated, job)
        growth = EmulationReading.of(emulated) - before
        check_equals_reference(job, finished)
        least = micro_batches * SCALE * slowdown * PI.seconds_per_micro_batch
        assert growth.busy_seconds >= least
