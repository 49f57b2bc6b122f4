"""Starts the hosts of a local testbed as forks of one process that has imported their code."""

import json
import select
import subprocess
import sys
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from collapipe.errors import PeerLostError
from collapipe_client.processes import child_environment, describe_exit, last_lines

_ROOM = " " * 4096
"""Room for the command lines of the forked processes."""


@dataclass(frozen=True)
class ForkedProcess:
    """A forked process, with the part of the interface of `subprocess.Popen` that a testbed uses."""

    pid: int
    server: "ForkServer"

    def poll(self) -> int | None:
        """Returns the exit code, or `None` if it is unknown: the process runs, or the server has ended."""
        return self.server.exit_code(self.pid)


class ForkServer:
    """A process `python -m collapipe.fork_server`. It imports while the caller does something else.

    Args:
        log: Its log.
        timeout_seconds: How long it may take to import and to answer.
    """

    def __init__(self, log: Path, timeout_seconds: float) -> None:
        self._log = log
        self._timeout_seconds = timeout_seconds
        self._one_caller = threading.Lock()
        self._unread = b""
        self._forked: int | None = None
        self._exit_codes: dict[int, int] = {}
        with open(log, "wb") as file:
            self._popen = subprocess.Popen(
                [sys.executable, "-m", "collapipe.fork_server", _ROOM],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=file,
                bufsize=0,
                start_new_session=True,
                env=child_environment(),
            )

    @property
    def pid(self) -> int:
        return self._popen.pid

    @property
    def is_alive(self) -> bool:
        return self._popen.poll() is None

    def fork(self, module: str, arguments: list[str], log: Path, *, append: bool) -> ForkedProcess:
        """Forks a process that runs a module.

        Args:
            log: Takes what the process writes.

        Raises:
            PeerLostError: The server has ended, or did not answer in time.
        """
        assert self._popen.stdin is not None
        request = {"module": module, "arguments": arguments, "log": str(log), "append": append}
        with self._one_caller:
            self._forked = None
            with suppress(BrokenPipeError):
                self._popen.stdin.write(json.dumps(request).encode() + b"\n")
            deadline = time.monotonic() + self._timeout_seconds
            while self._forked is None:
                left = deadline - time.monotonic()
                if left <= 0:
                    raise self._lost(f"did not answer within {self._timeout_seconds:g} s")
                if not self._read(left):
                    raise self._lost(describe_exit(self._popen.wait()))
            return ForkedProcess(self._forked, self)

    def exit_code(self, pid: int) -> int | None:
        """Returns the exit code of a forked process; `None` if the server has told none."""
        with self._one_caller:
            while self.is_alive and self._read(0.0):
                pass
            return self._exit_codes.get(pid)

    def close(self) -> None:
        """Ends the server. Forked processes go on, unless they were asked to end with their parent."""
        with self._one_caller:
            self._popen.kill()
            self._popen.communicate()

    def _read(self, wait_seconds: float) -> bool:
        """Takes in an answer. Returns whether there was one, also a part of one, before the server or the wait ended."""
        assert self._popen.stdout is not None
        if not select.select([self._popen.stdout], [], [], wait_seconds)[0]:
            return wait_seconds > 0
        data = self._popen.stdout.read(65536)
        *lines, self._unread = (self._unread + data).split(b"\n")
        for line in lines:
            answer = json.loads(line)
            if "exit" in answer:
                self._exit_codes[answer["pid"]] = answer["exit"]
            else:
                self._forked = answer["pid"]
                self._exit_codes.pop(answer["pid"], None)
        return bool(data)

    def _lost(self, what: str) -> PeerLostError:
        return PeerLostError(
            "fork-server",
            f"the process that starts the hosts {what}; last lines of {self._log}:\n{last_lines(self._log)}",
        )
