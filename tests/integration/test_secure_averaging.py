"""Tests that clusters can be averaged without the edge server seeing what one cluster has trained."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from reference.tiny_jobs import make_job

from collapipe.emulation.emulation_file import Emulation
from collapipe.job import JobConfig
from collapipe_client import LocalTestbed
from integration.running import run_job
from integration.test_exact import check_equals_reference


@pytest.fixture(scope="module")
def testbed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalTestbed]:
    folder = tmp_path_factory.mktemp("testbed")
    with LocalTestbed([2, 2, 2], folder, emulation=Emulation()) as testbed:
        testbed.wait_until_registered()
        yield testbed


def secure_job(folder: Path, name: str, **schedule: Any) -> JobConfig:
    return make_job(
        folder,
        name=name,
        num_rows=(21, 33, 14),
        devices_per_cluster=2,
        averaging={"secure": True},
        schedule={"strategy": "manual", **schedule},
    )


@pytest.mark.parametrize("segments", [[[1, 2], [2, 1]], [[2, 1]]])
def test_masked_average_equals_the_fixed_point_average_for_any_placement(
    testbed: LocalTestbed, tmp_path: Path, segments: list[list[int]]
) -> None:
    job = secure_job(tmp_path, "secure", segments=segments)
    check_equals_reference(job, run_job(testbed, job))
