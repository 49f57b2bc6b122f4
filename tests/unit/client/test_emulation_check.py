import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from collapipe.emulation.emulation_file import EmulatedDevice, Emulation
from collapipe.errors import WrongStateError
from collapipe.rpc import Security
from collapipe_client import emulation_check, training
from collapipe_client.emulation_check import (
    EmulationReading,
    processor_seconds,
    sum_of_metrics,
)
from collapipe_client.local_testbed import LocalTestbed
from collapipe_client.processes import ProcessRecord, start_seconds
from collapipe_client.workspace import Workspace

PI = EmulatedDevice(profile="raspberry-pi-4")

PAGE = """
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


class Page:
    """The metrics of one device."""

    def __init__(self) -> None:
        self.forward, self.overrun = 1.0, 0.0
        page = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                text = PAGE.replace("FORWARD", str(page.forward))
                self.send_response(200)
                self.end_headers()
                self.wfile.write(text.replace("OVERRUN", str(page.overrun)).encode())

            def log_message(self, *arguments: object) -> None:
                pass

        self.server = HTTPServer(("127.0.0.1", 0), Handler)
        self.address = f"127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()


class Testbed:
    """The watched part of a testbed whose only process is this one."""

    __test__ = False
    metrics = LocalTestbed.metrics

    def __init__(self, folder: Path, metrics_address: str) -> None:
        self.workspace = Workspace(folder)
        self.workspace.create()
        self.workspace.ready_file("device-0-0").write_text(
            json.dumps({"metrics_address": metrics_address})
        )
        start = start_seconds(os.getpid())
        self.processes: tuple[ProcessRecord, ...] = (
            ProcessRecord("device-0-0", os.getpid(), start),
        )
        self.emulation: Emulation | None = Emulation(devices={"device-0-0": PI})

    def security(self, name: str) -> Security:
        return Security.insecure()


@pytest.fixture
def page() -> Iterator[Page]:
    page = Page()
    yield page
    page.server.shutdown()
    page.server.server_close()


@pytest.fixture
def testbed(page: Page, tmp_path: Path) -> Any:
    if not Path("/proc/self/stat").exists():
        pytest.skip("this machine has no /proc")
    return Testbed(tmp_path, page.address)


def test_difference_of_two_readings_is_the_growth_between_them(testbed: Any, page: Page) -> None:
    before = EmulationReading.of(testbed)
    page.forward, page.overrun = 11.0, 0.125
    growth = EmulationReading.of(testbed) - before
    assert growth.busy_seconds == 10.0
    assert growth.overrun_seconds == 0.125
    assert growth.wall_seconds > 0
    assert 0 <= growth.real_seconds <= 10 * growth.wall_seconds + 1
    assert growth.overrun_ratio == 0.0125


def _growth(**changes: float) -> EmulationReading:
    values = {
        "wall_seconds": 10.0,
        "real_seconds": 12.0,
        "busy_seconds": 20.0,
        "overrun_seconds": 0.0,
    }
    return EmulationReading(processes=(), **{**values, **changes})


def test_emulation_that_keeps_up_is_accepted() -> None:
    growth = _growth(real_seconds=15.0, overrun_seconds=0.4)
    growth.check()
    assert (growth.real_cores, growth.overrun_ratio) == (1.5, 0.02)
    _growth(wall_seconds=1, real_seconds=0, busy_seconds=0).check()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"real_seconds": 15.3},
            r"1\.53 cores .15\.3 processor seconds in 10\.0 s.*1\.5.*time_scale",
        ),
        ({"overrun_seconds": 0.5}, r"0\.50 s longer.*2\.5% of the 20\.0 s.*2%"),
        ({"overrun_seconds": 0.5, "busy_seconds": 0.0}, "inf"),
    ],
)
def test_emulation_that_does_not_keep_up_is_refused_with_the_numbers(
    changes: dict[str, float], message: str
) -> None:
    with pytest.raises(WrongStateError, match=message):
        _growth(**changes).check()


def test_overrun_between_two_readings_is_refused(
    testbed: Any, page: Page, monkeypatch: pytest.MonkeyPatch
) -> None:
    # the test takes so little time that one tick of processor time would exceed the limit
    monkeypatch.setattr(emulation_check, "processor_seconds", lambda process: 0.0)
    before = EmulationReading.of(testbed)
    page.overrun = 3.0
    with pytest.raises(WrongStateError, match="3.00 s longer"):
        (EmulationReading.of(testbed) - before).check()


def test_process_that_began_during_the_measurement_makes_it_incomplete(
    testbed: Any, page: Page
) -> None:
    before = EmulationReading.of(testbed)
    added = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    record = ProcessRecord("device-0-1", added.pid, start_seconds(added.pid))
    testbed.processes += (record,)
    after = EmulationReading.of(testbed)
    added.communicate(b"\n", timeout=20)
    with pytest.raises(WrongStateError, match="device-0-1 ended or began"):
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
    assert "device-0-0" in note and "has ended" in note


@pytest.mark.parametrize("emulation", [None, Emulation()])
def test_testbed_without_emulated_devices_is_refused(
    testbed: Any, emulation: Emulation | None
) -> None:
    testbed.emulation = emulation
    with pytest.raises(WrongStateError, match="emulates no device"):
        EmulationReading.of(testbed)


def test_metrics_that_cannot_be_read_are_refused(testbed: Any, page: Page) -> None:
    testbed.workspace.ready_file("device-0-0").write_text('{"metrics_address": "127.0.0.1:1"}')
    with pytest.raises(
        WrongStateError, match="device-0-0 at http://127.0.0.1:1/metrics cannot be read"
    ):
        EmulationReading.of(testbed)


def test_processor_time_of_an_ended_process_is_unknown() -> None:
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait(20)
    with pytest.raises(WrongStateError, match=f"pid {ended.pid}"):
        processor_seconds(ProcessRecord("device-0-0", ended.pid, 1.0))


def test_processor_time_grows_with_work(testbed: Any) -> None:
    process = testbed.processes[0]
    before = processor_seconds(process)
    while processor_seconds(process) < before + 0.03:
        sum(range(10_000))


def test_all_series_of_a_metric_are_summed() -> None:
    page = PAGE.replace("FORWARD", "1.5").replace("OVERRUN", "7")
    assert sum_of_metrics(page, ["collapipe_stage_forward_seconds_sum"]) == 1.75
    assert sum_of_metrics(page, ["collapipe_emulation_overrun_seconds_total"]) == 7
    assert sum_of_metrics(page, ["nothing"]) == 0
