import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest

from collapipe_client.processes import (
    ProcessRecord,
    describe_exit,
    end_processes,
    last_lines,
    start_seconds,
)

_IGNORES_SIGTERM = (
    "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); "
    "print('ready', flush=True); time.sleep(60)"
)


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    popen = subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(60)"])
    yield popen
    popen.kill()
    popen.wait()


def _record(popen: subprocess.Popen[bytes]) -> ProcessRecord:
    return ProcessRecord("sleeper", popen.pid, start_seconds(popen.pid))


def test_end_processes_ends_the_recorded_process(sleeper: subprocess.Popen[bytes]) -> None:
    assert end_processes([_record(sleeper)]) == []
    assert sleeper.wait(timeout=5) == -signal.SIGTERM


def test_end_processes_does_not_end_a_later_process_with_the_same_pid(
    sleeper: subprocess.Popen[bytes],
) -> None:
    start = start_seconds(sleeper.pid)
    assert start is not None
    former = replace(_record(sleeper), start_seconds=start - 1)
    end_processes([former])
    assert sleeper.poll() is None


def test_end_processes_does_not_end_a_process_with_an_unknown_start(
    sleeper: subprocess.Popen[bytes],
) -> None:
    end_processes([replace(_record(sleeper), start_seconds=None)])
    assert sleeper.poll() is None


def test_end_processes_kills_one_that_ignores_sigterm() -> None:
    with subprocess.Popen(
        [sys.executable, "-S", "-c", _IGNORES_SIGTERM], stdout=subprocess.PIPE
    ) as popen:
        assert popen.stdout is not None
        popen.stdout.readline()
        killed = end_processes([_record(popen)], grace=timedelta(seconds=0.3))
        assert killed == ["sleeper"]
        assert popen.wait(timeout=5) == -signal.SIGKILL


def test_start_is_none_for_a_zombie() -> None:
    popen = subprocess.Popen([sys.executable, "-S", "-c", ""])
    os.waitid(os.P_PID, popen.pid, os.WEXITED | os.WNOWAIT)
    assert start_seconds(popen.pid) is None
    popen.wait()


def test_start_is_the_same_each_time_and_none_without_the_process() -> None:
    start = start_seconds(os.getpid())
    assert start is not None
    assert start == start_seconds(os.getpid())
    assert start_seconds(2**22 + 1) is None


def test_describe_exit_names_code_and_signal() -> None:
    assert describe_exit(3) == "ended with exit code 3"
    assert describe_exit(-signal.SIGTERM) == "was ended by SIGTERM"
    assert "memory" in describe_exit(-signal.SIGKILL)


def test_last_lines_are_the_last_that_are_not_empty(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text("\n".join(f"line {i}" for i in range(5000)) + "\n\n\n", encoding="utf-8")
    assert last_lines(log, 2) == "  line 4998\n  line 4999"
    assert "cannot be read" in last_lines(tmp_path / "absent")
