"""A real fork server, which imports torch and transformers, and hosts that only pretend to be services."""

import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from collapipe.errors import PeerLostError
from collapipe_client.forking import ForkServer

_HOST = """
import os, sys, time
import torch
print(sys.argv[1:], "torch" in sys.modules, os.environ.get("OPENBLAS_NUM_THREADS"), flush=True)
print(len(os.listdir("/proc/self/task")), os.getsid(0) == os.getpid(), os.getppid(), flush=True)
sys.exit(3) if sys.argv[1] == "ends" else time.sleep(600)
"""


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
    shown = Path(f"/proc/{second.pid}/cmdline").read_bytes().rstrip(b"\0").decode().split("\0")
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
        with pytest.raises(PeerLostError, match=r"exit code 1[^\0]*libtorch.so is missing"):
            server.fork("pretended_host", ["ends"], tmp_path / "host.log", append=False)
    finally:
        server.close()
