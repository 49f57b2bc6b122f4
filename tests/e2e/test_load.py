"""Runs a short form of benchmarks/load.py: many hosts, streams and watchers, without a failure and without a stall."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SILENCE_MS = 10_000
"""After such a silence, the scheduler counts a host as lost."""

pytestmark = pytest.mark.timeout(600)


def test_many_hosts_and_watchers_stall_neither_heartbeats_nor_rounds() -> None:
    line = [sys.executable, "-m", "benchmarks.load", "--hosts=40", "--seconds=25", "--watchers=20"]
    done = subprocess.run(line, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(done.stdout)
    assert found["hosts"] == 48
    for heartbeats in ("heartbeat_ms", "storm_heartbeat_ms"):
        assert found[heartbeats]["longest"] < SILENCE_MS
    assert found["watching"]["longest_silence_ms"] < SILENCE_MS
    assert found["rounds"] >= 1
