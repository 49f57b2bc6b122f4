"""Compares random cases of the full product of settings with the reference, for as long as it may take.

COLLAPIPE_CAMPAIGN_SECONDS=7200 pytest tests/campaign/test_exactness.py

The product has millions of cases, so each campaign draws others. A failure prints the case.
"""

import os
import random
import time
from pathlib import Path

import pytest
from integration.conftest import testbed as testbed
from integration.exactness import check_case
from reference.job_matrix import FACTORS, is_valid, name_of

from collapipe_client import LocalTestbed

SECONDS = float(os.environ.get("COLLAPIPE_CAMPAIGN_SECONDS", "3600"))


@pytest.mark.timeout(0)
def test_random_cases_equal_the_reference(testbed: LocalTestbed, tmp_path: Path) -> None:
    seed = time.time_ns()
    draw, ends_at, num_cases = random.Random(seed), time.monotonic() + SECONDS, 0
    failed = []
    while time.monotonic() < ends_at:
        case = {factor: draw.choice(levels) for factor, levels in FACTORS.items()}
        # A random case seldom fits together, so single levels are drawn again.
        while not is_valid(case):
            factor = draw.choice(list(FACTORS))
            case[factor] = draw.choice(FACTORS[factor])
        folder = tmp_path / str(num_cases)
        try:
            check_case(testbed, folder, case)
        except Exception as error:  # An hour must not end with the first failure.
            failed.append(f"{name_of(case)}: {error!r}")
        num_cases += 1
    print(f"{num_cases} random cases, seed {seed}, {len(failed)} failed")
    assert failed == []
    assert num_cases
