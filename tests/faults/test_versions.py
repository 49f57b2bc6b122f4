"""Tests that a device that speaks another version of the protocol harms no job, and is named."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from killed_processes import kill, restart

from collapipe.v1.scheduler_pb2 import JOB_STATE_SUCCEEDED
from collapipe_client import LocalTestbed
from faults.interrupted import (
    MOMENTS,
    Run,
    final_digests,
    intact_commit,
    make_interruptible_job,
    run_interrupted,
    tried_again,
    undisturbed_digests,
)

DEVICE = "device-0-1"
_SCRIPT = Path(__file__).with_name("other_version.py")


class TestbedOfVersions(LocalTestbed):
    """A testbed in which one device may speak another version from its next start on."""

    __test__ = False
    forks_hosts = False
    version: int | None = None

    def _command_line(self, name: str, listen: str, line: list[str]) -> list[str]:
        if name != DEVICE or self.version is None:
            return line
        wrapped = [sys.executable, str(_SCRIPT), *line[line.index("-m") + 1 :]]
        return ["env", f"VERSION={self.version}", *wrapped]


@pytest.fixture(scope="module")
def testbed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TestbedOfVersions]:
    with TestbedOfVersions([3, 1], tmp_path_factory.mktemp("testbed")) as testbed:
        testbed.wait_until_registered()
        yield testbed


@pytest.mark.parametrize(("version", "older"), [(0, DEVICE), (2, "the scheduler")])
def test_job_goes_on_without_a_device_that_comes_back_with_another_version(
    testbed: TestbedOfVersions, tmp_path: Path, version: int, older: str
) -> None:
    undisturbed = undisturbed_digests(testbed, tmp_path)

    def exchange(run: Run) -> None:
        testbed.version = version
        kill(testbed, DEVICE)
        restart(testbed, DEVICE)

    job = make_interruptible_job(tmp_path)
    run = run_interrupted(testbed, job, MOMENTS["step"], exchange, hit=tried_again)
    assert run.final_state == JOB_STATE_SUCCEEDED, run.message
    assert final_digests(intact_commit(run)) == undisturbed
    assert len(run.attempts) == 2
    with testbed.client() as client:
        statuses = {status.host.host_id: status for status in client.hosts()}
    refusals = {host_id: s.refusal for host_id, s in statuses.items() if s.refusal}
    assert refusals.keys() == {DEVICE} and refusals[DEVICE].endswith(f"on the machine of {older}")
    assert not statuses[DEVICE].alive
    testbed.version = None
    kill(testbed, DEVICE)
    restart(testbed, DEVICE)
    testbed.wait_until_registered()
    with testbed.client() as client:
        assert not any(status.refusal for status in client.hosts())
