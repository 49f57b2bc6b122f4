"""Faults of networks, with a network namespace for each service.

A link that is cut in one direction is found, and no plan uses it again. A box that has moved, has closed its port, has a twin, or is
switched off and on harms no job.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

pytestmark = [
    pytest.mark.timeout(900),
    pytest.mark.skipif(os.geteuid() != 0, reason="needs root to make network namespaces"),
]


@pytest.mark.parametrize("module", ["one_way_cut", "moved_boxes"])
def test_job_goes_on(module: str) -> None:
    path = os.pathsep.join([str(ROOT), str(ROOT / "tests")])
    environment = {**os.environ, "PYTHONPATH": path}
    done = subprocess.run(
        [sys.executable, "-m", f"faults.{module}"],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
