"""Three services die before and after each of their writes: every job ends with the same bits, and no result is lost."""

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

from collapipe.errors import CollapipeError

pytestmark = pytest.mark.timeout(7200)


@pytest.fixture(scope="module")
def testbed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MortalTestbed]:
    with running_testbed(tmp_path_factory.mktemp("testbed")) as testbed:
        yield testbed


@pytest.mark.parametrize("name", VICTIMS)
def test_every_point_of_a_service(testbed: MortalTestbed, tmp_path: Path, name: str) -> None:
    undisturbed = undisturbed_digests(testbed, tmp_path)
    num_points = count_points(testbed, tmp_path, name)
    wrong, num_deaths = {}, 0
    for point in range(num_points):
        try:
            run, has_died = run_with_death(testbed, tmp_path, name, point)
            num_deaths += has_died
            check_nothing_is_lost(run, undisturbed)
        except (AssertionError, CollapipeError) as error:
            wrong[point] = str(error)[:2000]
            print(f"{name}, point {point}: {wrong[point]}", flush=True)
    print(f"{name}: {num_points} points, {num_deaths} deaths, {len(wrong)} wrong", flush=True)
    assert not wrong
    assert num_deaths >= 0.8 * num_points > 0  # Jobs do not all have the same number of writes.
