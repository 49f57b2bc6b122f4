"""A service that dies between two of its writes loses no result: the job ends with the same bits.

`tests/campaign/test_deaths.py` tries every point of every service.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest

from faults.deaths import (
    VICTIMS,
    MortalTestbed,
    check_nothing_is_lost,
    count_points,
    run_with_death,
    running_testbed,
)
from faults.interrupted import undisturbed_digests


@pytest.fixture(scope="module")
def testbed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MortalTestbed]:
    with running_testbed(tmp_path_factory.mktemp("testbed")) as testbed:
        yield testbed


@pytest.mark.parametrize("name", VICTIMS)
def test_job_ends_with_the_same_bits_after_a_death(
    testbed: MortalTestbed, tmp_path: Path, name: str
) -> None:
    undisturbed = undisturbed_digests(testbed, tmp_path)
    num_points = count_points(testbed, tmp_path, name)
    for share in (0.3, 0.6):
        run, has_died = run_with_death(testbed, tmp_path, name, int(share * num_points))
        check_nothing_is_lost(run, undisturbed)
        assert has_died
