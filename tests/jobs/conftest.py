"""Provides a small testbed for the jobs of `make test`."""

from collections.abc import Iterator

import pytest

from collapipe_client import LocalTestbed


@pytest.fixture(scope="session")
def testbed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalTestbed]:
    with LocalTestbed([2], tmp_path_factory.mktemp("testbed")) as testbed:
        testbed.wait_until_registered()
        yield testbed
