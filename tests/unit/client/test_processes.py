import io
import os
import signal
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

import pytest

from collapipe_client import processes as client_processes
from collapipe_client.processes import (
    ProcessRecord,
    describe_exit,
    end_processes,
    last_lines,
    start_seconds,
)

from .pretended_processes import PretendedProcess, PretendedProcesses

Start = Callable[[], tuple[PretendedProcess, ProcessRecord]]


@pytest.fixture
def start(processes: PretendedProcesses, tmp_path: Path) -> Start:
    def started() -> tuple[PretendedProcess, ProcessRecord]:
        line = ["--host-id", "sleeper", "--listen", "127.0.0.1:0", "--ready-file"]
        process = processes.popen([*line, str(tmp_path / "ready")], stdout=io.BytesIO())
        began = client_processes.start_seconds(process.pid)
        return process, ProcessRecord("sleeper", process.pid, began)

    return started


def test_end_processes_ends_the_recorded_process(start: Start) -> None:
    process, record = start()
    assert end_processes([record]) == []
    assert process.exit_code == -signal.SIGTERM


@pytest.mark.parametrize("began", [1.0, None])
def test_end_processes_does_not_end_another_process_with_the_same_pid(
    start: Start, began: float | None
) -> None:
    process, record = start()
    end_processes([replace(record, start_seconds=began)])
    assert process.exit_code is None


def test_end_processes_kills_one_that_ignores_sigterm(
    start: Start, processes: PretendedProcesses, monkeypatch: pytest.MonkeyPatch
) -> None:
    naps: list[float] = []
    clock = SimpleNamespace(monotonic=lambda: sum(naps), sleep=naps.append)
    monkeypatch.setattr(client_processes, "time", clock)
    processes.behaviours["sleeper"] = "stubborn"
    process, record = start()
    assert end_processes([record], grace=timedelta(seconds=3)) == ["sleeper"]
    assert process.exit_code == -signal.SIGKILL
    assert sum(naps) == pytest.approx(3, abs=0.1)


def test_start_is_the_same_each_time_and_none_without_the_process() -> None:
    start = start_seconds(os.getpid())
    assert start is not None
    assert start == start_seconds(os.getpid())
    assert start_seconds(2**22 + 1) is None


def test_describe_exit_names_code_and_signal() -> None:
    assert "code 3" in describe_exit(3)
    assert "SIGTERM" in describe_exit(-signal.SIGTERM)
    assert "memory" in describe_exit(-signal.SIGKILL)
    assert "signal 99" in describe_exit(-99)


def test_last_lines_are_the_last_that_are_not_empty(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text("\n".join(f"line {i}" for i in range(5000)) + "\n\n\n", encoding="utf-8")
    assert last_lines(log, 2) == "  line 4998\n  line 4999"
    assert str(tmp_path / "absent") in last_lines(tmp_path / "absent")
