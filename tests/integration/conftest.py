"""Provides one testbed for all tests of a session, because its 13 processes take seconds to start."""

from collections.abc import Iterator

import pytest
import torch

from collapipe_client import Device, LocalTestbed


@pytest.fixture(scope="session")
def testbed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalTestbed]:
    """A testbed in which cluster 0 has 6 devices, and clusters 1 and 2 have one each."""
    with LocalTestbed([6, 1, 1], tmp_path_factory.mktemp("testbed")) as testbed:
        testbed.wait_until_registered()
        yield testbed


@pytest.fixture(scope="session")
def uneven_testbed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalTestbed]:
    """A testbed with devices of speeds 1, 2 and 4 in cluster 0, and a device with little memory in cluster 1."""
    clusters = [[Device(speed=1), Device(speed=2), Device(speed=4)], [Device(memory_bytes=1000)]]
    with LocalTestbed(clusters, tmp_path_factory.mktemp("uneven-testbed")) as testbed:
        testbed.wait_until_registered()
        yield testbed


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Makes torch compute in one thread, as it does in every service by default."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
