"""Processes of a testbed that exist only in a table. They listen, write their files and obey signals."""

import json
import os
import signal
import socket
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import IO, Any

import pytest

from collapipe_client import local_testbed, processes

_FIRST_PID = 2**22 + 1
"""Linux gives no process such a pid."""


class PretendedProcess:
    """A process, with the part of the interface of `subprocess.Popen` that a testbed uses."""

    def __init__(self, pid: int, line: Sequence[str], options: Mapping[str, Any]) -> None:
        self.pid = pid
        self.line = list(line)
        self.options = options
        self.exit_code: int | None = None
        self._port: socket.socket | None = None

    def poll(self) -> int | None:
        return self.exit_code

    def option(self, name: str) -> str:
        """Returns the value of an option in its command line."""
        return self.line[self.line.index(name) + 1]

    def serve(self) -> None:
        """Listens, and writes the ready file."""
        host, _, port = self.option("--listen").rpartition(":")
        self._port = socket.create_server((host, int(port)))
        address = f"{host}:{self._port.getsockname()[1]}"
        ready = {"address": address, "metrics_address": "", "pid": self.pid}
        Path(self.option("--ready-file")).write_text(json.dumps(ready), encoding="utf-8")

    def end(self, exit_code: int) -> None:
        """Ends it, as a signal does."""
        self.exit_code = exit_code
        if self._port is not None:
            self._port.close()


class PretendedProcesses:
    """The table of all processes, instead of the kernel's.

    Attributes:
        behaviours: How a process of this name behaves: "serves" (the default), "dies", "hangs" or "stubborn".
    """

    def __init__(self) -> None:
        self.behaviours: dict[str, str] = {}
        self._by_pid: dict[int, PretendedProcess] = {}
        self._kill, self._start_seconds = os.kill, processes.start_seconds

    def popen(self, line: Sequence[str], *, stdout: IO[bytes], **options: Any) -> PretendedProcess:
        """Starts a process."""
        process = PretendedProcess(_FIRST_PID + len(self._by_pid), line, options)
        self._by_pid[process.pid] = process
        name = process.option("--host-id")
        stdout.write(f"hello from {name}\n".encode())
        behaviour = self.behaviours.get(name, "serves")
        if behaviour == "dies":
            stdout.write(b"RuntimeError: no such device\n")
            process.end(1)
        elif behaviour != "hangs":
            process.serve()
        return process

    def kill(self, pid: int, number: int) -> None:
        """Sends a signal."""
        if pid not in self._by_pid:
            self._kill(pid, number)
            return
        process = self._by_pid[pid]
        is_stubborn = self.behaviours.get(process.option("--host-id")) == "stubborn"
        if process.exit_code is None and not (is_stubborn and number == signal.SIGTERM):
            process.end(-number)

    def start_seconds(self, pid: int) -> float | None:
        """Returns when a process started; `None` if it has ended."""
        if pid not in self._by_pid:
            return self._start_seconds(pid)
        return float(pid) if self._by_pid[pid].exit_code is None else None

    def of(self, testbed: local_testbed.LocalTestbed, name: str) -> PretendedProcess:
        """Returns a process of a testbed."""
        return next(self._by_pid[each.pid] for each in testbed.processes if each.name == name)

    def close(self) -> None:
        """Ends all processes."""
        for process in self._by_pid.values():
            process.end(-signal.SIGKILL)


@contextmanager
def pretended_processes(monkeypatch: pytest.MonkeyPatch) -> Iterator[PretendedProcesses]:
    """Replaces the processes of testbeds and the signals to them."""
    table = PretendedProcesses()
    started = SimpleNamespace(
        Popen=table.popen, DEVNULL=subprocess.DEVNULL, STDOUT=subprocess.STDOUT
    )
    monkeypatch.setattr(local_testbed, "subprocess", started)
    monkeypatch.setattr(local_testbed.LocalTestbed, "forks_hosts", False)
    monkeypatch.setattr(os, "kill", table.kill)
    for module in (local_testbed, processes):
        monkeypatch.setattr(module, "start_seconds", table.start_seconds)
    yield table
    table.close()
