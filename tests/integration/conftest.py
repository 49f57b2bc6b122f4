"""Provides testbeds for all tests of a session, because their processes take seconds to start."""

from collections.abc import Iterator

import pytest

from collapipe.emulation.emulation_file import Emulation
from collapipe_client import Device, LocalTestbed


@pytest.fixture(scope="session")
def testbed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalTestbed]:
    """A testbed of 4, 2, 2, 1 and 2 devices. Those of the first have other speeds, those of the last two little memory."""
    devices = [Device(speed=speed) for speed in (1, 2, 4, 0.1)]
    clusters = [devices, [Device()] * 2, [Device()] * 2, [Device(memory_bytes=1000)]]
    clusters.append([Device(speed=1000.0, memory_bytes=180_000)] * 2)
    with LocalTestbed(clusters, tmp_path_factory.mktemp("testbed")) as testbed:
        testbed.wait_until_registered()
        yield testbed


@pytest.fixture(scope="session")
def emulated_testbed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalTestbed]:
    """A testbed of 2, 2 and 2 devices, which a test may make slow with `emulate`."""
    folder = tmp_path_factory.mktemp("emulated")
    with LocalTestbed([2, 2, 2], folder, emulation=Emulation()) as testbed:
        testbed.wait_until_registered()
        yield testbed
