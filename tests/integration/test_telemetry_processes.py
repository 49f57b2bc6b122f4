"""Tests of telemetry that start a process."""

import subprocess
import sys


def test_peak_memory_does_not_include_that_of_the_parent_process() -> None:
    child = "from collapipe.telemetry.metrics import peak_resident_bytes as p; print(p())"
    starter = (
        "import os, sys\n"
        "ballast = b'x' * (300 << 20)\n"
        f"os.execv(sys.executable, [sys.executable, '-c', {child!r}])"
    )
    answer = subprocess.run(
        [sys.executable, "-c", starter], capture_output=True, text=True, check=True, timeout=60
    )
    assert 4 << 20 < int(answer.stdout) < 200 << 20
