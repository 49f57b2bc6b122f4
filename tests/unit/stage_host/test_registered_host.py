from typing import Any

from collapipe.emulation.device_profiles import DEVICE_PROFILES, DeviceProfile
from collapipe.stage_host.host import StageHostSettings, describe_resources
from collapipe.v1.scheduler_pb2 import Host

PI = DEVICE_PROFILES["raspberry-pi-5"]


def registered(emulated: DeviceProfile | None = None, **settings: Any) -> Host:
    host = Host()
    given = StageHostSettings(_cli_parse_args=False, scheduler="127.0.0.1:1", **settings)
    describe_resources(host, given, emulated)
    return host


def test_host_registers_its_settings() -> None:
    resources = {
        "memory_bytes": 5,
        "speed": 2.5,
        "energy_budget_joules": 40.0,
        "busy_watts": 3.0,
        "idle_watts": 2.7,
        "max_transmit_watts": 0.5,
    }
    assert registered(**resources) == Host(**resources)


def test_host_without_settings_has_no_limits() -> None:
    assert registered() == Host(max_transmit_watts=0.1)


def test_emulated_device_registers_the_memory_and_watts_of_its_profile() -> None:
    host = registered(PI)
    assert (host.memory_bytes, host.busy_watts) == (PI.memory_bytes, PI.busy_watts)
    assert host.energy_budget_joules == 0
    assert (
        host.idle_watts == 0
    )  # A budget is for training only, unless the operator says otherwise.


def test_settings_override_the_profile() -> None:
    host = registered(PI, memory_bytes=7, busy_watts=1.5)
    assert (host.memory_bytes, host.busy_watts) == (7, 1.5)
    assert registered(PI, memory_bytes=0).memory_bytes == 0  # 0 means no limit.
