import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
from prometheus_client import REGISTRY

from collapipe.emulation.device_profiles import DEVICE_PROFILES
from collapipe.emulation.emulation_file import EmulatedDevice, Emulation, EmulationFile
from collapipe.stage_runtime import emulated_processor
from collapipe.stage_runtime.emulated_processor import EmulatedProcessor
from collapipe.stage_runtime.operation_counts import Work

PI = DEVICE_PROFILES["raspberry-pi-4"]


@pytest.fixture
def emulate(tmp_path: Path) -> Callable[..., EmulatedProcessor]:
    """Describes `device-0-0` in an emulation file and returns its processor."""
    path = tmp_path / "emulation.json"

    def write(
        profile: str | None, slowdown: float = 1.0, time_scale: float = 1.0
    ) -> EmulatedProcessor:
        devices = {}
        if profile is not None:
            devices["device-0-0"] = EmulatedDevice(profile=profile, slowdown=slowdown)
        emulation = Emulation(devices=devices, time_scale=time_scale)
        path.with_suffix(".new").write_text(emulation.model_dump_json())
        os.replace(path.with_suffix(".new"), path)
        return EmulatedProcessor(EmulationFile(path), "device-0-0")

    return write


class Clock:
    """A clock that advances only in `sleep`, or when a test sets it."""

    def __init__(self) -> None:
        self.now = 100.0
        self.slept: list[float] = []

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.now += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    fake = SimpleNamespace(perf_counter=lambda: clock.now, sleep=clock.sleep)
    monkeypatch.setattr(emulated_processor, "time", fake)
    return clock


def overrun() -> float:
    return REGISTRY.get_sample_value("collapipe_emulation_overrun_seconds_total") or 0.0


def test_seconds_are_the_sum_of_overhead_operations_and_moved_bytes(
    emulate: Callable[..., EmulatedProcessor],
) -> None:
    work = Work(flops=3 * PI.flops_per_second, moved_bytes=2 * PI.memory_bytes_per_second)
    expected = 5.0 + PI.seconds_per_micro_batch / 4
    assert emulate("raspberry-pi-4").seconds(work, 0.25) == pytest.approx(expected)
    slower = emulate("raspberry-pi-4", slowdown=4, time_scale=0.5)
    assert slower.seconds(work, 0.25) == pytest.approx(2 * expected)


def test_host_without_an_emulated_device_does_not_wait(
    emulate: Callable[..., EmulatedProcessor], clock: Clock
) -> None:
    before = overrun()
    for real in (emulate(None), EmulatedProcessor(EmulationFile(None), "device-0-0")):
        assert real.seconds(Work(1e12), 1.0) is None
        real.occupy(clock.now, Work(1e12), 1.0)
    assert clock.slept == []
    assert overrun() == before


def test_processor_waits_for_the_time_that_real_work_did_not_take(
    emulate: Callable[..., EmulatedProcessor], clock: Clock
) -> None:
    device = emulate("raspberry-pi-4")
    started = clock.now
    clock.now += 0.75
    before = overrun()
    device.occupy(started, Work(2 * PI.flops_per_second), 0.0)
    assert clock.now == pytest.approx(started + 2)
    assert overrun() == before


def test_excess_of_real_work_is_counted(
    emulate: Callable[..., EmulatedProcessor], clock: Clock
) -> None:
    device = emulate("raspberry-pi-4")
    started = clock.now
    clock.now += 3.5
    before = overrun()
    device.occupy(started, Work(2 * PI.flops_per_second), 0.0)
    assert clock.slept == []
    assert overrun() - before == pytest.approx(1.5)


def test_change_of_the_emulation_file_takes_effect_at_once(
    emulate: Callable[..., EmulatedProcessor],
) -> None:
    device = emulate("raspberry-pi-4")
    work = Work(PI.flops_per_second)
    assert device.seconds(work, 0.0) == pytest.approx(1.0)
    emulate("raspberry-pi-4", slowdown=4)
    assert device.seconds(work, 0.0) == pytest.approx(4.0)
    emulate(None)
    assert device.seconds(work, 0.0) is None
