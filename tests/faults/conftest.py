"""Provides a testbed whose processes tests kill and restart, and the result of its job without faults."""

from collections.abc import Iterator

import pytest
from killed_processes import restart

from collapipe_client import LocalTestbed
from collapipe_client.client import FINAL_STATES
from faults.interrupted import undisturbed_digests


@pytest.fixture(scope="session")
def testbed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalTestbed]:
    """Provides a testbed with 3 devices in cluster 0 and one in cluster 1. Checks that no process remains."""
    with LocalTestbed([3, 1], tmp_path_factory.mktemp("testbed")) as testbed:
        testbed.wait_until_registered()
        yield testbed
        processes = testbed.processes
    assert [process.name for process in processes if process.alive] == []


@pytest.fixture(autouse=True)
def whole_testbed(request: pytest.FixtureRequest) -> None:
    """Mends what an earlier test has left because it failed: dead processes and a job that runs."""
    if "testbed" not in request.fixturenames:
        return
    testbed: LocalTestbed = request.getfixturevalue("testbed")
    lost = testbed.lost()
    assert not lost or request.session.testsfailed, f"{lost} ended in a test that passed"
    for name in lost:
        restart(testbed, name)
    testbed.wait_until_registered()
    with testbed.client() as client:
        for job in client.jobs():
            if job.state not in FINAL_STATES:
                client.cancel(job.job_id)


@pytest.fixture(scope="session")
def undisturbed(testbed: LocalTestbed, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The digests in the last commit of a job without faults."""
    return undisturbed_digests(testbed, tmp_path_factory.mktemp("data"))
