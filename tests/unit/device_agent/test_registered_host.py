import sys
from typing import Any

import pytest

from collapipe.device_agent.app import DeviceAgentSettings, describe_host
from collapipe.emulation.device_profiles import DEVICE_PROFILES
from collapipe.v1.scheduler_pb2 import HOST_ROLE_DEVICE_AGENT, Host

PI = DEVICE_PROFILES["raspberry-pi-5"]


@pytest.fixture(autouse=True)
def _no_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["device-agent"])


def settings(**given: Any) -> DeviceAgentSettings:
    return DeviceAgentSettings(scheduler="127.0.0.1:1", **given)


def test_device_registers_its_settings() -> None:
    host = describe_host(
        settings(
            cluster_index=2,
            memory_bytes=5,
            speed=2.5,
            energy_budget_joules=40.0,
            busy_watts=3.0,
        ),
        None,
    )
    assert host == Host(
        role=HOST_ROLE_DEVICE_AGENT,
        cluster_index=2,
        memory_bytes=5,
        speed=2.5,
        energy_budget_joules=40.0,
        busy_watts=3.0,
    )


def test_device_without_settings_has_no_limits() -> None:
    assert describe_host(settings(), None) == Host(role=HOST_ROLE_DEVICE_AGENT)


def test_emulated_device_registers_the_memory_and_watts_of_its_profile() -> None:
    host = describe_host(settings(), PI)
    assert (host.memory_bytes, host.busy_watts) == (PI.memory_bytes, PI.busy_watts)
    assert host.energy_budget_joules == 0


def test_settings_override_the_profile() -> None:
    host = describe_host(settings(memory_bytes=7, busy_watts=1.5), PI)
    assert (host.memory_bytes, host.busy_watts) == (7, 1.5)
    assert describe_host(settings(memory_bytes=0), PI).memory_bytes == 0  # 0 means no limit.
