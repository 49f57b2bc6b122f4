"""Tests that memory, descriptors, threads and disk use do not grow with the number of rounds and jobs: invariant I4.

`python -m benchmarks.soak` does the same for hours.
"""

from pathlib import Path

import pytest
from long_runs import Held, check_flat, measure, run_jobs, run_rounds

from collapipe_client import LocalTestbed

ROUNDS = 80
WARM_UP_ROUNDS = 50
"""After this number of rounds, every buffer has reached its largest size."""
ALLOWED_BYTES = 8 << 20
"""Tolerance for the allocator. A leak of one model (600 kB) in each round would add 18 MB in 30 rounds."""

NUM_JOBS = 18
WARM_UP_JOBS = 3
ALLOWED_GROWTH_OF_JOBS_BYTES = 24 << 20

ALLOWED_HANDLES = 8
"""Descriptors or threads that a process may have more than before, for calls in progress. One more for each job would be 15."""


@pytest.mark.timeout(600)
def test_nothing_grows_with_the_number_of_rounds(tmp_path: Path) -> None:
    early: dict[str, Held] = {}
    early_disk = 0
    with LocalTestbed([2, 2], tmp_path / "testbed") as testbed:
        testbed.wait_until_registered()
        for num_rounds in run_rounds(testbed, tmp_path, ROUNDS):
            if num_rounds <= WARM_UP_ROUNDS:
                # The disks hold most while optimizer states are copied, which not every round does.
                early = measure(testbed)
                early_disk = max(early_disk, sum(held.blob_bytes for held in early.values()))
        late = measure(testbed)
    check_flat(early, late, ALLOWED_BYTES, ALLOWED_HANDLES)
    assert sum(held.blob_bytes for held in late.values()) <= early_disk


@pytest.mark.timeout(900)
def test_nothing_in_memory_grows_after_the_third_of_18_jobs(tmp_path: Path) -> None:
    early: dict[str, Held] = {}
    with LocalTestbed([2, 2], tmp_path / "testbed") as testbed:
        testbed.wait_until_registered()
        for number in run_jobs(testbed, tmp_path, NUM_JOBS):
            if number == WARM_UP_JOBS:
                early = measure(testbed)
        late = measure(testbed)
    check_flat(early, late, ALLOWED_GROWTH_OF_JOBS_BYTES, ALLOWED_HANDLES)
