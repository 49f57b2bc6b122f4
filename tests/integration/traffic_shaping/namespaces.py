"""Two network namespaces, joined by a cable, for tests of the kernel's traffic control."""

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager

import pytest


def run(*line: str) -> str:
    return subprocess.run(line, check=True, capture_output=True, text=True).stdout


@contextmanager
def joined_namespaces(prefix: str, network: str) -> Iterator[tuple[str, str]]:
    """Makes two namespaces whose devices near0 and far0 have the addresses NETWORK.1 and NETWORK.2.

    Skips the test where this machine makes none.

    Args:
        prefix: Begins their names.
        network: The first three numbers of the addresses.
    """
    if os.geteuid() or not shutil.which("tc") or not shutil.which("ip"):
        pytest.skip("needs root, tc and ip")
    near, far = (f"{prefix}-{end}-{os.getpid()}" for end in ("near", "far"))
    made = []
    try:
        try:
            for name in (near, far):
                run("ip", "netns", "add", name)
                made.append(name)
            ends = ("near0", "netns", near, "type", "veth", "peer", "far0", "netns", far)
            run("ip", "link", "add", *ends)
        except subprocess.CalledProcessError as error:
            pytest.skip(f"this machine makes no network namespaces: {error.stderr}")
        for name, device, number in ((near, "near0", 1), (far, "far0", 2)):
            run("ip", "-n", name, "addr", "add", f"{network}.{number}/24", "dev", device)
            run("ip", "-n", name, "link", "set", device, "up")
        yield near, far
    finally:
        for name in made:
            run("ip", "netns", "del", name)
