"""Runs two seeds of benchmarks/chaos.py: whatever happens, a job ends with the bits of an undisturbed one."""

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


def test_two_disturbed_jobs_end_with_equal_bits() -> None:
    line = [sys.executable, "-m", "benchmarks.chaos", "--runs", "2"]
    done = subprocess.run(line, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "2 ended with equal bits" in done.stdout
