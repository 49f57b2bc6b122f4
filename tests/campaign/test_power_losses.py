"""Each service loses power at each of the points before and after its writes: every job ends with the same bits, and no result is lost."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from faults.interrupted import undisturbed_digests
from faults.power_losses import (
    VICTIMS,
    MortalTestbed,
    check_nothing_is_lost,
    count_points,
    run_with_death,
)

pytestmark = pytest.mark.timeout(7200)


@pytest.fixture(scope="module")
def testbed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MortalTestbed]:
    with MortalTestbed([3, 1], tmp_path_factory.mktemp("testbed")) as testbed:
        testbed.wait_until_registered()
        yield testbed


@pytest.mark.parametrize("name", VICTIMS)
def test_every_point_of_a_service(testbed: MortalTestbed, tmp_path: Path, name: str) -> None:
    undisturbed = undisturbed_digests(testbed, tmp_path)
    num_points = count_points(testbed, tmp_path, name)
    wrong, num_deaths = {}, 0
    for point in range(num_points):
        try:
            run, has_died = run_with_death(testbed, tmp_path, name, point)
            check_nothing_is_lost(run, undisturbed)
        except AssertionError as error:
            wrong[point] = str(error)[:2000]
        num_deaths += has_died
    print(f"{name}: {num_points} points, {num_deaths} deaths, {len(wrong)} wrong", flush=True)
    assert not wrong
