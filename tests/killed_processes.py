"""Kills and restarts single processes of a local testbed, like machines that fail and come back."""

import os
import signal
import time

from collapipe_client import LocalTestbed

LIMIT_SECONDS = 10.0


def kill(testbed: LocalTestbed, name: str) -> None:
    """Ends a process with SIGKILL, and waits until it has ended."""
    (process,) = (each for each in testbed.processes if each.name == name)
    os.kill(process.pid, signal.SIGKILL)
    deadline = time.monotonic() + LIMIT_SECONDS
    while process.alive:
        assert time.monotonic() < deadline, f"{name} survives SIGKILL"
        time.sleep(0.05)


def restart(testbed: LocalTestbed, *names: str) -> None:
    """Starts ended processes again at their former addresses, and waits until they serve."""
    testbed._start_together(names)
