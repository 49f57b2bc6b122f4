"""Provides a testbed whose processes tests kill and restart, and the result of its job without faults."""

from collections.abc import Iterator

import pytest

from collapipe.v1.scheduler_pb2 import JOB_STATE_SUCCEEDED
from collapipe_client import LocalTestbed
from faults.interrupted import (
    PATIENT_SECONDS,
    final_digests,
    intact_commit,
    make_interruptible_job,
    run_interrupted,
)


@pytest.fixture(scope="session")
def testbed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalTestbed]:
    """Provides a testbed with 3 devices in cluster 0 and one in cluster 1. Checks that no process remains."""
    with LocalTestbed([3, 1], tmp_path_factory.mktemp("testbed")) as testbed:
        testbed.wait_until_registered()
        yield testbed
        processes = testbed.processes
    assert [process.name for process in processes if process.alive] == []


@pytest.fixture(scope="session")
def undisturbed(testbed: LocalTestbed, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The digests in the last commit of a job without faults."""
    job = make_interruptible_job(tmp_path_factory.mktemp("data"), PATIENT_SECONDS)
    run = run_interrupted(testbed, job)
    assert run.final_state == JOB_STATE_SUCCEEDED, run.message
    return final_digests(intact_commit(run))
