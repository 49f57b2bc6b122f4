"""The hosts of a testbed are forks of one process, and yet each dies alone."""

import os
import signal
import time
from pathlib import Path

import pytest
from killed_processes import kill

from collapipe_client import LocalTestbed

pytestmark = pytest.mark.timeout(600)

_LIMIT_SECONDS = 240


def pids(testbed: LocalTestbed) -> dict[str, int]:
    return {process.name: process.pid for process in testbed.processes if process.address}


def wait_for_new(testbed: LocalTestbed, names: set[str], before: dict[str, int]) -> None:
    """Waits until the processes of these names, and no others, are new ones that serve."""
    deadline = time.monotonic() + _LIMIT_SECONDS
    while {name for name, pid in pids(testbed).items() if pid != before[name]} != names:
        assert time.monotonic() < deadline, pids(testbed)
        time.sleep(0.1)
    while testbed.lost():
        assert time.monotonic() < deadline, testbed.lost()
        time.sleep(0.1)
    assert pids(testbed).keys() == before.keys()


def test_killed_host_is_forked_again_and_hosts_outlive_their_fork_server(tmp_path: Path) -> None:
    with LocalTestbed([2], tmp_path / "w", supervised=True) as testbed:
        testbed.wait_until_registered()
        server = testbed._fork_server
        assert server is not None
        first = pids(testbed)
        kill(testbed, "device-0-0")
        assert testbed.lost() in (["device-0-0"], [])
        wait_for_new(testbed, {"device-0-0"}, first)

        second = pids(testbed)
        os.kill(server.pid, signal.SIGKILL)
        wait_for_new(testbed, second.keys() - {"scheduler"}, second)
        testbed.wait_until_registered()
        last = testbed.processes
    assert not any(process.alive for process in last)
