"""Processes on this machine: an identity that outlives pid reuse, and an orderly end.

A pid alone names whoever has it today. A process is therefore remembered by its pid and by when it
started, and a signal is sent only while both agree.
"""

import os
import signal
import socket
import subprocess
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

from collapipe.errors import InvalidInputError

_PROC = Path("/proc")
_POLL_SECONDS = 0.05
GRACE = timedelta(seconds=10)
"""How long a process may take to end after SIGTERM, before SIGKILL."""


@dataclass(frozen=True)
class ProcessRecord:
    """A process that was started.

    Args:
        name: What it is here, for example `device-0-1`.
        pid: Its pid.
        start_mark: When it started, as `start_mark` says; empty when this machine cannot tell.
        address: Where it serves gRPC; empty until it does.
    """

    name: str
    pid: int
    start_mark: str
    address: str = ""

    @property
    def alive(self) -> bool:
        """Whether this very process, not merely its pid, is alive."""
        return self.start_mark != "" and start_mark(self.pid) == self.start_mark


def start_mark(pid: int) -> str | None:
    """Says when a process started, in words that no later process with this pid can share.

    Returns:
        `None` when there is no such process, or it has ended and only waits to be reaped.
    """
    if (_PROC / "self" / "stat").exists():
        return _start_mark_from_proc(pid)
    return _start_mark_from_ps(pid)


def _start_mark_from_proc(pid: int) -> str | None:
    try:
        stat = (_PROC / str(pid) / "stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    # The second field is the command in parentheses and may itself hold spaces and parentheses.
    fields = stat.rpartition(")")[2].split()
    state, num_threads, start_ticks = fields[0], int(fields[17]), fields[19]
    # While other threads are still ending, the first is a zombie and the ports are still taken.
    if state in "ZX" and num_threads <= 1:
        return None
    try:
        boot = (_PROC / "sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        boot = "unknown-boot"
    return f"{boot}/{start_ticks}"


def _start_mark_from_ps(pid: int) -> str | None:
    try:
        answer = subprocess.run(
            ["ps", "-o", "stat=,lstart=", "-p", str(pid)],
            capture_output=True,
            text=True,
            check=False,
            env={**os.environ, "LC_ALL": "C"},
        )
    except FileNotFoundError:
        return None
    state, _, started = answer.stdout.strip().partition(" ")
    if not started or state.startswith("Z"):
        return None
    return started.strip()


def end_processes(records: Iterable[ProcessRecord], grace: timedelta = GRACE) -> list[str]:
    """Ends processes: SIGTERM to all, a bounded wait, SIGKILL to the rest.

    Ctrl-C during the wait kills at once: whoever presses it twice means it.

    Returns:
        Names of those that had to be killed.
    """
    remaining = [record for record in records if _send(record, signal.SIGTERM)]
    deadline = time.monotonic() + grace.total_seconds()
    try:
        remaining = _wait_for_end(remaining, deadline)
    except KeyboardInterrupt:
        remaining = [record for record in remaining if record.alive]
    killed = [record.name for record in remaining if _send(record, signal.SIGKILL)]
    _wait_for_end(remaining, time.monotonic() + grace.total_seconds())
    return killed


def kill_process(record: ProcessRecord) -> None:
    """Kills one process at once, and waits until it is gone."""
    _send(record, signal.SIGKILL)
    _wait_for_end([record], time.monotonic() + GRACE.total_seconds())


def _send(record: ProcessRecord, signal_number: signal.Signals) -> bool:
    if not record.alive:
        return False
    try:
        os.kill(record.pid, signal_number)
    except ProcessLookupError:
        return False
    return True


def _wait_for_end(records: Sequence[ProcessRecord], deadline: float) -> list[ProcessRecord]:
    remaining = [record for record in records if record.alive]
    while remaining and time.monotonic() < deadline:
        time.sleep(_POLL_SECONDS)
        remaining = [record for record in remaining if record.alive]
    return remaining


def describe_exit(return_code: int | None) -> str:
    """Says how a process ended: its exit code, or the signal that ended it."""
    if return_code is None:
        return "ended"
    if return_code >= 0:
        return f"ended with exit code {return_code}"
    try:
        name = signal.Signals(-return_code).name
    except ValueError:
        name = f"signal {-return_code}"
    reason = " (the kernel kills like this when memory runs out)" if name == "SIGKILL" else ""
    return f"was ended by {name}{reason}"


def last_lines(path: Path, num_lines: int = 12) -> str:
    """Reads the end of a log file, indented; says so when there is nothing."""
    try:
        with open(path, "rb") as file:
            file.seek(0, os.SEEK_END)
            file.seek(max(0, file.tell() - 16384))
            lines = file.read().decode("utf-8", errors="replace").splitlines()
    except OSError as error:
        return f"  ({path} cannot be read: {error.strerror})"
    shown = [line for line in lines if line.strip()][-num_lines:]
    return "\n".join(f"  {line}" for line in shown) or f"  ({path} is empty)"


def child_environment() -> dict[str, str]:
    """The environment of the processes: ours, with import paths that hold wherever they run.

    Settings are left out: a testbed is what its flags say, whatever deployment this shell is set
    up for.
    """
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith("COLLAPIPE_")
    }
    if environment.get("PYTHONPATH"):
        parts = environment["PYTHONPATH"].split(os.pathsep)
        environment["PYTHONPATH"] = os.pathsep.join(os.path.abspath(part) for part in parts)
    return environment


def check_free(listen: str, name: str) -> None:
    """Says that a port is taken before a process has to die of it."""
    host, separator, port = listen.rpartition(":")
    if not separator or not port.isdigit():
        raise InvalidInputError(
            f"the address {listen!r} of {name} is not HOST:PORT, for example 127.0.0.1:0"
        )
    if port == "0":
        return
    try:
        with socket.create_server((host.strip("[]"), int(port))):
            pass
    except (OSError, OverflowError) as error:
        raise InvalidInputError(
            f"{name} cannot listen on {listen} ({getattr(error, 'strerror', None) or error}): free "
            "the port, or give another address (port 0 takes any free one)"
        ) from error
