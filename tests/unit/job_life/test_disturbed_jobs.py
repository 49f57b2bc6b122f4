"""Thousands of imitated jobs whose hosts die, restart, lie and come back, and whose scheduler loses power: their promises hold.

A seed gives the whole job, so that each failure is repeated exactly. `python -m benchmarks.disturbed_jobs` runs more of them.
"""

from itertools import chain

import pytest
from disturbed_jobs.job import ImitatedJob
from disturbed_jobs.runs import run_seeds

from collapipe.job_life import attempt, job_run
from collapipe.job_life.tries import GivesUp

NUM_SEEDS, NUM_PARTS = 2000, 4


@pytest.mark.parametrize("part", range(NUM_PARTS))
def test_promises_hold_whatever_happens(part: int) -> None:
    result = run_seeds(range(part, NUM_SEEDS, NUM_PARTS))
    assert not result.failures, "\n".join(chain(*result.failures.values()))
    # Otherwise, the seeds would not show what these ends and cases need.
    assert result.ends.keys() >= {None, *GivesUp} - {GivesUp.REFUSED, GivesUp.TOO_MANY_REPEATS}
    assert result.seen == attempt.TRANSITIONS.keys() | job_run.TRANSITIONS.keys()


def test_seed_repeats_its_job() -> None:
    first, second = (ImitatedJob(5, tells=True) for _ in range(2))
    assert first.run() == second.run()
    assert first.world.story == second.world.story != []
