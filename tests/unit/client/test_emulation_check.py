import os
from types import SimpleNamespace
from typing import Any

import pytest

from collapipe.emulation.emulation_file import EmulatedDevice, Emulation
from collapipe.errors import WrongStateError
from collapipe_client import emulation_check, training
from collapipe_client.emulation_check import EmulationReading, processor_seconds, sum_of_metrics
from collapipe_client.processes import ProcessRecord, start_seconds

_PAGE = """
# HELP collapipe_stage_forward_seconds Time.
# TYPE collapipe_stage_forward_seconds histogram
collapipe_stage_forward_seconds_bucket{cluster="0",stage="1",le="+Inf"} 4
collapipe_stage_forward_seconds_count{cluster="0",stage="1"} 4
collapipe_stage_forward_seconds_sum{cluster="0",stage="1"} FORWARD
collapipe_stage_forward_seconds_sum{cluster="1",stage="1"} 0.25
# HELP collapipe_stage_backward_seconds Time.
# TYPE collapipe_stage_backward_seconds histogram
collapipe_stage_backward_seconds_sum{cluster="0",stage="1"} 2.0
# HELP collapipe_stage_update_seconds_total Time.
# TYPE collapipe_stage_update_seconds_total counter
collapipe_stage_update_seconds_total{cluster="0",stage="1"} 0.5
# HELP collapipe_emulation_overrun_seconds_total Time.
# TYPE collapipe_emulation_overrun_seconds_total counter
collapipe_emulation_overrun_seconds_total OVERRUN
"""
_NO_PROCESS = 2**22 + 1
"""Linux gives no process such a pid."""


def _this_process() -> ProcessRecord:
    return ProcessRecord("device-0-0", os.getpid(), start_seconds(os.getpid()))


class _Testbed:
    """The watched part of a testbed whose only process is this one."""

    def __init__(self) -> None:
        self.forward, self.overrun, self.now, self.worked = 1.0, 0.0, 100.0, 30.0
        self.processes: tuple[ProcessRecord, ...] = (_this_process(),)
        devices = {"device-0-0": EmulatedDevice(profile="raspberry-pi-4")}
        self.emulation: Emulation | None = Emulation(devices=devices)

    def metrics(self, name: str) -> str:
        assert name == "device-0-0"
        return _PAGE.replace("FORWARD", str(self.forward)).replace("OVERRUN", str(self.overrun))


@pytest.fixture
def testbed(monkeypatch: pytest.MonkeyPatch) -> Any:
    testbed = _Testbed()
    monkeypatch.setattr(emulation_check, "processor_seconds", lambda process: testbed.worked)
    monkeypatch.setattr(emulation_check, "time", SimpleNamespace(monotonic=lambda: testbed.now))
    return testbed


def test_difference_of_two_readings_is_the_growth_between_them(testbed: Any) -> None:
    before = EmulationReading.of(testbed)
    testbed.forward, testbed.overrun, testbed.now, testbed.worked = 11.0, 3.0, 108.0, 34.0
    growth = EmulationReading.of(testbed) - before
    assert (growth.busy_seconds, growth.overrun_seconds) == (10.0, 3.0)
    assert (growth.wall_seconds, growth.real_seconds) == (8.0, 4.0)
    assert (growth.real_cores, growth.overrun_ratio) == (0.5, 0.3)
    with pytest.raises(WrongStateError, match="3.00 s"):
        growth.check()


def _growth(**changes: float) -> EmulationReading:
    values = {"wall_seconds": 10.0, "real_seconds": 12.0, "busy_seconds": 20.0}
    return EmulationReading(processes=(), **{**values, "overrun_seconds": 0.0, **changes})


def test_emulation_that_keeps_up_is_accepted() -> None:
    growth = _growth(real_seconds=15.0, overrun_seconds=0.4)
    growth.check()
    assert (growth.real_cores, growth.overrun_ratio) == (1.5, 0.02)
    _growth(wall_seconds=1, real_seconds=0, busy_seconds=0).check()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"real_seconds": 15.3}, r"1\.53.*15\.3.*10\.0 s.*1\.5.*time_scale"),
        ({"overrun_seconds": 0.5}, r"0\.50 s.*2\.5%.*20\.0 s.*2%"),
        ({"overrun_seconds": 0.5, "busy_seconds": 0.0}, "inf"),
    ],
)
def test_emulation_that_does_not_keep_up_is_refused_with_the_numbers(
    changes: dict[str, float], message: str
) -> None:
    with pytest.raises(WrongStateError, match=message):
        _growth(**changes).check()


def test_process_that_began_during_the_measurement_makes_it_incomplete(testbed: Any) -> None:
    before = EmulationReading.of(testbed)
    testbed.processes += (ProcessRecord("device-0-1", _NO_PROCESS, 1.0),)
    after = EmulationReading.of(testbed)
    with pytest.raises(WrongStateError, match="device-0-1"):
        after - before


def test_device_that_ended_during_a_job_is_a_note_after_the_job(
    testbed: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def follow(*_: object) -> None:
        testbed.processes = (ProcessRecord("device-0-0", os.getpid(), 1.0),)

    notes: list[str] = []
    display: Any = SimpleNamespace(note=notes.append)
    client: Any = SimpleNamespace(submit=lambda job, resume: "job-1")
    job: Any = None
    monkeypatch.setattr(training, "follow_job", follow)
    assert training.run_job(client, job, display, testbed=testbed) == "job-1"
    (note,) = notes
    assert "device-0-0" in note


@pytest.mark.parametrize("emulation", [None, Emulation()])
def test_testbed_without_emulated_devices_is_refused(
    testbed: Any, emulation: Emulation | None
) -> None:
    testbed.emulation = emulation
    with pytest.raises(WrongStateError, match="--emulation"):
        EmulationReading.of(testbed)


def test_processor_time_of_an_ended_process_is_unknown() -> None:
    for pid in (_NO_PROCESS, os.getpid()):  # This process has the pid, but another start.
        with pytest.raises(WrongStateError, match=f"pid {pid}"):
            processor_seconds(ProcessRecord("device-0-0", pid, 1.0))


def test_processor_time_grows_with_work() -> None:
    process = _this_process()
    before = processor_seconds(process)
    while processor_seconds(process) < before + 0.03:
        sum(range(10_000))


def test_all_series_of_a_metric_are_summed() -> None:
    page = _PAGE.replace("FORWARD", "1.5").replace("OVERRUN", "7")
    assert sum_of_metrics(page, ["collapipe_stage_forward_seconds_sum"]) == 1.75
    assert sum_of_metrics(page, ["collapipe_emulation_overrun_seconds_total"]) == 7
    assert sum_of_metrics(page, ["nothing"]) == 0
