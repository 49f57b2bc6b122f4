"""Somebody who follows deploy/README.md has a cluster of three boxes that trains, without an edit and without a traceback."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.timeout(1500)
@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to make network namespaces")
def test_page_leads_from_nothing_to_a_trained_model() -> None:
    path = os.pathsep.join([str(ROOT), str(ROOT / "tests")])
    done = subprocess.run(
        [sys.executable, "-m", "e2e.three_boxes"],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
    )
    print(done.stdout)
    assert done.returncode == 0, done.stdout + done.stderr
