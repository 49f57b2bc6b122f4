"""Provides a testbed whose processes tests kill and restart, and the result of its job without faults."""

from collections.abc import Iterator

import pytest
from killed_processes import restart

from collapipe_client import LocalTestbed
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
    """Starts the processes again that an earlier test has left dead because it failed."""
    if "testbed" in request.fixturenames:
        testbed: LocalTestbed = request.getfixturevalue("testbed")
        for name in testbed.lost():
            restart(testbed, name)
        testbed.wait_until_registered()


@pytest.fixture(scope="session")
def undisturbed(testbed: LocalTestbed, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The digests in the last commit of a job without faults."""
    return undisturbed_digests(testbed, tmp_path_factory.mktemp("data"))
