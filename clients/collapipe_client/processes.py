"""Identifies, ends and describes the processes of a testbed."""

import os
import signal
import time
from collections.abc import Iterable, Sequence
from datetime import timedelta
from pathlib import Path

import psutil
from pydantic.dataclasses import dataclass

from collapipe.errors import InvalidInputError
from collapipe_client.addresses import listen_briefly, read_address

_POLL_SECONDS = 0.05
GRACE = timedelta(seconds=10)
"""How long a process may take to end after SIGTERM, before SIGKILL."""


@dataclass(frozen=True)
class ProcessRecord:
    """A process that was started.

    A later process may get the same pid. So a signal is sent only if the start time matches, too.

    Args:
        name: For example `device-0-1`.
        start_seconds: The result of the function `start_seconds` when the process was started.
        address: Its gRPC address; empty until it serves.
    """

    name: str
    pid: int
    start_seconds: float | None
    address: str = ""

    @property
    def alive(self) -> bool:
        """Whether the process is alive. Another process with its pid does not count."""
        return self.start_seconds is not None and start_seconds(self.pid) == self.start_seconds


def start_seconds(pid: int) -> float | None:
    """Returns the time from boot to the start of a process, which stays the same when the clock is set.

    The result is `None` if the process has ended, even if its parent has not waited for it yet.
    """
    try:
        process = psutil.Process(pid)
        has_ended = process.status() in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)
        # While other threads of a zombie are still ending, its ports are still taken.
        if has_ended and process.num_threads() <= 1:
            return None
        return round(process.create_time() - psutil.boot_time(), 2)
    except psutil.Error:
        return None


def end_processes(records: Iterable[ProcessRecord], grace: timedelta = GRACE) -> list[str]:
    """Sends SIGTERM to all processes, waits, and sends SIGKILL to those that are still alive.

    Ctrl-C during the wait kills them at once. Returns the names of the processes that needed SIGKILL.
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
    """Says how a process ended.

    Args:
        return_code: As `Popen.poll` returns it: negative for a signal; `None` if it is unknown.
    """
    if return_code is None:
        return "ended"
    if return_code >= 0:
        return f"ended with exit code {return_code}"
    try:
        name = signal.Signals(-return_code).name
    except ValueError:
        name = f"signal {-return_code}"
    reason = " (the kernel does this when memory runs out)" if name == "SIGKILL" else ""
    return f"was ended by {name}{reason}"


def last_lines(path: Path, num_lines: int = 12) -> str:
    """Returns the last non-empty lines of a log file, indented, or a note that there are none."""
    try:
        with open(path, "rb") as file:
            size, part = file.seek(0, os.SEEK_END), 16384
            while True:
                file.seek(max(0, size - part))
                lines = file.read(part).decode("utf-8", errors="replace").splitlines()
                shown = [line for line in lines if line.strip()]
                if len(shown) > num_lines or part >= size:
                    break
                part *= 4
    except OSError as error:
        return f"  ({path} cannot be read: {error.strerror})"
    shown = shown[-num_lines:]
    return "\n".join(f"  {line}" for line in shown) or f"  ({path} is empty)"


def child_environment() -> dict[str, str]:
    """Returns the environment for the processes of a testbed.

    Import paths become absolute, because the processes may run in other folders. Settings (COLLAPIPE_*) are
    left out: they are for a deployment, and only flags determine a testbed.
    """
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith("COLLAPIPE_")
    }
    if environment.get("PYTHONPATH"):
        parts = environment["PYTHONPATH"].split(os.pathsep)
        environment["PYTHONPATH"] = os.pathsep.join(os.path.abspath(part) for part in parts)
    return environment


def check_free(listen: str, name: str) -> None:
    """Checks that an address can be listened on, before a process is started that would fail.

    Args:
        listen: "host:port"; port 0 is always free.
        name: The process, for the error message.

    Raises:
        InvalidInputError: The address is malformed or taken.
    """
    host, port = read_address(f"the address of {name},", listen, least_port=0)
    if port == 0:
        return
    try:
        listen_briefly(host, port)
    except OSError as error:
        raise InvalidInputError(
            f"{name} cannot listen on {listen} ({error.strerror or error}): free the port, or give "
            "another address (port 0 takes any free one)"
        ) from error
