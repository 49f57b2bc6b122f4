"""Provides one testbed for all tests of a session, because its 15 processes take seconds to start."""

from collections.abc import Iterator

import pytest
import torch

from collapipe_client import Device, LocalTestbed


@pytest.fixture(scope="session")
def testbed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalTestbed]:
    """A testbed of 6, 1, 1 and 1 devices. The first ones have speeds, and the last one has little memory."""
    devices = [Device(speed=speed) for speed in (1, 2, 4, 0.1, 0.1, 0.1)]
    clusters = [devices, [Device()], [Device()], [Device(memory_bytes=1000)]]
    with LocalTestbed(clusters, tmp_path_factory.mktemp("testbed")) as testbed:
        testbed.wait_until_registered()
        yield testbed


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Makes torch compute in one thread, as it does in every service by default."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
