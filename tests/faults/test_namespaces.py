"""Faults of networks, with a network namespace for each service.

A link that is cut in one direction is found, and no plan uses it again. A box that has moved or has a twin harms no job.
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


# A closed port acts as a move, and `python -m faults.moved_boxes` tries all faults.
@pytest.mark.parametrize(
    "command", [["one_way_cut"], ["moved_boxes", "--rounds", "8", "--faults", "moved", "twin"]]
)
def test_job_goes_on(command: list[str]) -> None:
    path = os.pathsep.join([str(ROOT), str(ROOT / "tests")])
    environment = {**os.environ, "PYTHONPATH": path}
    done = subprocess.run(
        [sys.executable, "-m", f"faults.{command[0]}", *command[1:]],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
