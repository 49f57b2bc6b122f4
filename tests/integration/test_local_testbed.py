"""A testbed starts, watches and ends real processes, which only pretend to be services."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from killed_processes import kill, restart

from collapipe.errors import PeerLostError
from collapipe_client import local_testbed, testbed_processes
from collapipe_client.forking import ForkServer
from collapipe_client.local_testbed import LocalTestbed
from collapipe_client.processes import ProcessRecord, end_processes, start_seconds
from collapipe_client.testbed_processes import Service

_PROCESS = """
import json, os, signal, sys
behaviour, arguments = sys.argv[1], sys.argv[2:]
print("hello from", arguments[arguments.index("--host-id") + 1], flush=True)
if behaviour == "dies":
    sys.exit("RuntimeError: no such device")
listen = arguments[arguments.index("--listen") + 1]
address = listen if not listen.endswith(":0") else f"{listen[:-2]}:{10000 + os.getpid() % 50000}"
path = arguments[arguments.index("--ready-file") + 1]
with open(path + ".tmp", "w") as file:
    json.dump({"address": address, "metrics_address": "", "pid": os.getpid()}, file)
os.replace(path + ".tmp", path)
signal.pause()
"""

_HOST = """
import os, signal, sys
import torch
print(sys.argv[1:], "torch" in sys.modules, os.environ.get("OPENBLAS_NUM_THREADS"), flush=True)
print(len(os.listdir("/proc/self/task")), os.getsid(0) == os.getpid(), os.getppid(), flush=True)
sys.exit(3) if sys.argv[1] == "ends" else signal.pause()
"""


@pytest.fixture
def behaviours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Replaces services by small processes. Each one serves, unless the test gives it another behaviour."""
    script = tmp_path / "process.py"
    script.write_text(_PROCESS, encoding="utf-8")
    chosen: dict[str, str] = {}

    def command(service: Service, *arguments: Any, **options: Any) -> list[str]:
        real = testbed_processes.command(service, *arguments, **options)
        return [sys.executable, "-S", str(script), chosen.get(service.name, "serves"), *real[3:]]

    monkeypatch.setattr(local_testbed, "command", command)
    monkeypatch.setattr(LocalTestbed, "forks_hosts", False)
    return chosen


def read_process(pid: int, name: str) -> list[str]:
    """Returns the command line or the environment of a process."""
    return Path(f"/proc/{pid}/{name}").read_text(encoding="utf-8").split("\0")


def test_testbed_starts_restarts_and_ends_real_processes(
    behaviours: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLLAPIPE_TLS_CA", "ca.pem")
    with LocalTestbed([1], tmp_path / "w") as testbed:
        scheduler, *_, device = processes = testbed.processes
        assert all(p.alive and os.getsid(p.pid) == p.pid for p in processes)
        line = read_process(device.pid, "cmdline")
        assert line[line.index("--scheduler") + 1] == scheduler.address
        settings = read_process(scheduler.pid, "environ")
        assert not [setting for setting in settings if setting.startswith("COLLAPIPE_")]
        kill(testbed, "device-0-0")
        assert testbed.lost() == ["device-0-0"]
        loss = testbed.describe_loss("device-0-0")
        assert "SIGKILL" in loss and "hello from device-0-0" in loss
        restart(testbed, "device-0-0")
        assert testbed.lost() == []
        assert testbed.processes[-1].address == device.address
        processes = testbed.processes
    assert not any(p.alive for p in processes)


def test_process_that_dies_while_it_starts_is_told_with_its_log(
    behaviours: dict[str, str], tmp_path: Path
) -> None:
    behaviours["device-0-0"] = "dies"
    with pytest.raises(PeerLostError, match="device-0-0.* code 1") as error:
        LocalTestbed([1], tmp_path / "w").start()
    assert "RuntimeError: no such device" in str(error.value)


def test_process_that_ignores_sigterm_is_killed_and_a_zombie_has_ended() -> None:
    code = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(); signal.pause()"
    line = [sys.executable, "-S", "-c", code]
    with subprocess.Popen(line, stdout=subprocess.PIPE) as popen:
        assert popen.stdout is not None
        popen.stdout.readline()
        record = ProcessRecord("stubborn", popen.pid, start_seconds(popen.pid))
        assert record.alive
        assert end_processes([record], grace=timedelta(seconds=0.1)) == ["stubborn"]
        os.waitid(os.P_PID, popen.pid, os.WEXITED | os.WNOWAIT)
        assert start_seconds(popen.pid) is None
        assert popen.wait() == -signal.SIGKILL


# --- forks of one process that has imported torch and transformers


@pytest.fixture
def modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder from which the fork server imports before all others."""
    folder = tmp_path / "modules"
    folder.mkdir()
    (folder / "pretended_host.py").write_text(_HOST, encoding="utf-8")
    path = [str(folder), *sys.path]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(part for part in path if part))
    return folder


@pytest.fixture
def server(modules: Path, tmp_path: Path) -> Iterator[ForkServer]:
    server = ForkServer(tmp_path / "server.log", timeout_seconds=240)
    yield server
    server.close()


def wait_for(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_forked_hosts_are_processes_of_their_own(server: ForkServer, tmp_path: Path) -> None:
    names = ["device-0-0", "device-0-1", "ends"]
    logs = [tmp_path / f"{name}.log" for name in names]
    logs[2].write_text("before\n")
    first, second, ends = (
        server.fork("pretended_host", [name, "--flag"], log, append=name == "ends")
        for name, log in zip(names, logs, strict=True)
    )
    wait_for(lambda: all(log.exists() and log.read_text().count("\n") >= 2 for log in logs))
    expected = f"['device-0-0', '--flag'] True None\n1 True {server.pid}\n"
    assert logs[0].read_text() == expected
    assert logs[2].read_text() == "before\n" + expected.replace("device-0-0", "ends")
    shown = read_process(second.pid, "cmdline")[:5]
    assert shown == [sys.executable, "-m", "pretended_host", "device-0-1", "--flag"]

    wait_for(lambda: ends.poll() is not None)
    assert ends.poll() == 3
    os.kill(first.pid, signal.SIGKILL)
    wait_for(lambda: first.poll() is not None)
    assert first.poll() == -signal.SIGKILL
    assert second.poll() is None
    third = server.fork("pretended_host", ["device-0-0"], logs[0], append=True)
    assert third.poll() is None
    for host in (second, third):
        os.kill(host.pid, signal.SIGKILL)


def test_server_that_cannot_import_says_why(modules: Path, tmp_path: Path) -> None:
    (modules / "torch.py").write_text("raise ImportError('libtorch.so is missing')")
    server = ForkServer(tmp_path / "server.log", timeout_seconds=240)
    try:
        with pytest.raises(PeerLostError, match="libtorch.so is missing"):
            server.fork("pretended_host", ["ends"], tmp_path / "host.log", append=False)
    finally:
        server.close()
