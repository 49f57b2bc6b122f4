"""Tests that a device that speaks another version of the protocol harms no job, and is named."""

import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from killed_processes import kill, restart
from prometheus_server import eventually

from collapipe.protocol import OURS
from collapipe.v1.scheduler_pb2 import JOB_STATE_SUCCEEDED, HostStatus
from collapipe_client import LocalTestbed
from faults.interrupted import (
    MOMENTS,
    PATIENT_SECONDS,
    MomentMissedError,
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
    """A testbed whose services may speak another version from their next start on."""

    __test__ = False
    forks_hosts = False

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.versions: dict[str, int | None] = {}

    def _command_line(self, name: str, listen: str, line: list[str]) -> list[str]:
        version = self.versions.get(name)
        if version is None:
            return line
        wrapped = [sys.executable, str(_SCRIPT), *line[line.index("-m") + 1 :]]
        return ["env", f"VERSION={version}", *wrapped]


@pytest.fixture(scope="module")
def testbed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TestbedOfVersions]:
    with TestbedOfVersions([3, 1], tmp_path_factory.mktemp("testbed")) as testbed:
        testbed.wait_until_registered()
        yield testbed


def start_as(testbed: TestbedOfVersions, version: int | None, *names: str) -> None:
    """Ends services, and starts them again with a version of the protocol; `None` is that of the others."""
    for name in names:
        testbed.versions[name] = version
        kill(testbed, name)
    restart(testbed, *names)


def refused(testbed: TestbedOfVersions) -> dict[str, HostStatus]:
    """Returns the states of the refused hosts by their ids."""
    with testbed.client() as client:
        return {status.host.host_id: status for status in client.hosts() if status.refusal}


@pytest.mark.parametrize(
    ("version", "older"), [(OURS.oldest - 1, DEVICE), (OURS.newest + 1, "the scheduler")]
)
def test_job_goes_on_without_a_device_that_comes_back_with_another_version(
    testbed: TestbedOfVersions, tmp_path: Path, version: int, older: str
) -> None:
    undisturbed = undisturbed_digests(testbed, tmp_path)
    job = make_interruptible_job(tmp_path)
    try:
        run = run_interrupted(
            testbed,
            job,
            MOMENTS["step"],
            lambda run: start_as(testbed, version, DEVICE),
            hit=tried_again,
        )
        assert run.final_state == JOB_STATE_SUCCEEDED, run.message
        assert final_digests(intact_commit(run)) == undisturbed
        # The scheduler counts the process before as alive for up to 10 s, if it does not blame it.
        eventually(lambda: bool(refused(testbed)))
        ((host_id, status),) = refused(testbed).items()
        assert (host_id, status.alive) == (DEVICE, False)
        assert status.refusal.endswith(f"on the machine of {older}")
    finally:
        start_as(testbed, None, DEVICE)
    testbed.wait_until_registered()
    assert not refused(testbed)


@pytest.mark.parametrize("name", ["device-1-0", "control-unit-1", "edge-server"])
def test_job_waits_for_a_host_that_it_needs_and_that_has_another_version_for_a_while(
    testbed: TestbedOfVersions, tmp_path: Path, name: str
) -> None:
    undisturbed = undisturbed_digests(testbed, tmp_path)

    def exchange(run: Run) -> None:
        num_incidents = len(run.incidents)
        try:
            start_as(testbed, OURS.newest + 1, name)
            while "HOST_LEFT_OUT" not in run.codes(name, num_incidents) and not run.ended:
                time.sleep(0.1)
        finally:
            start_as(testbed, None, name)

    # The registry still counts the process before as alive, so the next round calls the other one.
    run = run_interrupted(
        testbed, make_interruptible_job(tmp_path), MOMENTS["plan"], exchange, hit=tried_again
    )
    assert run.final_state == JOB_STATE_SUCCEEDED, run.message
    assert final_digests(intact_commit(run)) == undisturbed


def test_deployment_is_updated_role_by_role_while_a_job_runs(
    testbed: TestbedOfVersions, tmp_path: Path
) -> None:
    job = make_interruptible_job(tmp_path, PATIENT_SECONDS, training={"rounds": 20})
    undisturbed = final_digests(intact_commit(run_interrupted(testbed, job)))
    names = [process.name for process in testbed.processes]
    start_as(testbed, OURS.oldest, names[0])  # The others need the address of the scheduler.
    start_as(testbed, OURS.oldest, *names[1:])
    testbed.wait_until_registered()

    def update(run: Run) -> None:
        for role in (
            "scheduler",
            "edge-server",
            "control-unit",
            "device",
        ):  # as docs/operations.md says
            start_as(testbed, None, *(name for name in names if name.startswith(role)))
            testbed.wait_until_registered()
        if run.num_rounds_committed() == job.training.rounds:
            raise MomentMissedError("all rounds were committed before the last update")

    run = run_interrupted(testbed, job, MOMENTS["plan"], update, limit_seconds=300.0)
    assert run.final_state == JOB_STATE_SUCCEEDED, run.message
    assert final_digests(intact_commit(run)) == undisturbed
    with testbed.client() as client:
        assert [status.refusal for status in client.hosts()] == [""] * (len(names) - 1)
