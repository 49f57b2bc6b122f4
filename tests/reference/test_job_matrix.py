"""Tests that the jobs of the matrix have every pair of settings that can meet, and that each of them is a valid job."""

from pathlib import Path

import pytest

from reference.job_matrix import (
    Case,
    all_pairs,
    arguments,
    complete,
    is_valid,
    name_of,
    pairs_of,
    pairwise,
)
from reference.tiny_jobs import make_job

CASES = pairwise()


def test_each_pair_is_in_a_case_or_forbidden_by_the_rules() -> None:
    made = set().union(*map(pairs_of, CASES))
    missing = [pair for pair in all_pairs() if pair not in made]
    assert all(complete(dict(pair)) is None for pair in missing)
    exact = set().union(*(pairs_of(case) for case in CASES if case["slices"] == 1))
    assert all(pair in exact for pair in made if "slices" not in dict(pair))
    assert 0 < len(missing) < 0.1 * len(list(all_pairs()))
    assert all(map(is_valid, CASES))


@pytest.mark.parametrize("case", CASES, ids=name_of)
def test_segments_of_a_case_have_all_blocks(tmp_path: Path, case: Case) -> None:
    given = arguments(case)
    job = make_job(tmp_path, **given)
    blocks = given["num_blocks"] * (2 if case["half_blocks"] else 1)
    assert all(sum(row) == blocks for row in job.schedule.segments)
    assert len({tuple(row) for row in job.schedule.segments}) == len(job.schedule.segments)
