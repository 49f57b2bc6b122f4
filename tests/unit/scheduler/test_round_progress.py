"""What counts as progress of a cluster, and how long its round may take at most."""

from typing import Any

import pytest

from collapipe.scheduler.round_progress import RoundProgress, limit_seconds
from collapipe.v1 import control_unit_pb2, job_pb2

from .jobs import Clock

LIMIT = 90.0
STEPS = 4


def telling(clock: Clock) -> tuple[RoundProgress, Any]:
    """A round of a model of 1 MB, and a function that tells of it and returns whether nothing has risen for too long."""
    request = control_unit_pb2.RunRoundRequest(local_steps=STEPS)
    progress = RoundProgress(request, LIMIT, 1_000_000, 0, 5000, clock)

    def tell(**fields: Any) -> bool:
        told = job_pb2.RoundProgress(**fields)
        return progress.take(control_unit_pb2.RunRoundResponse(progress=told))

    return progress, tell


@pytest.mark.parametrize(
    ("silence", "predicted", "seconds"), [(10, 0.1, 180), (10, 10, 900), (5, 0, 10_800)]
)
def test_limit_is_three_times_that_of_the_control_unit(
    silence: float, predicted: float, seconds: float
) -> None:
    assert limit_seconds(silence, predicted) == seconds


@pytest.mark.parametrize(
    "rising",
    [
        {"steps_done": 1},
        {"training_began": True},
        {"candidate_copied": True},
        {"moved_bytes": 7000},
        {"evaluated_rows": 5},
    ],
)
def test_values_that_rise_are_progress_and_values_that_stay_are_not(rising: dict[str, Any]) -> None:
    clock = Clock()
    _, tell = telling(clock)
    clock.now += LIMIT - 1
    assert not tell()
    assert not tell(**rising)
    clock.now += LIMIT - 1
    assert not tell(**rising)
    clock.now += 2
    assert tell(**rising)


@pytest.mark.parametrize(
    "told",
    [
        {"steps_done": STEPS + 1},
        {"moved_bytes": 1 << 63},
        {"evaluated_rows": 1 << 63},
        {"loss": 0.5, "samples_per_second": 1e9, "waiting_for": "more time"},
    ],
)
def test_values_beyond_their_largest_are_no_progress(told: dict[str, Any]) -> None:
    clock = Clock()
    _, tell = telling(clock)
    tell(steps_done=STEPS, moved_bytes=0)
    tell(steps_done=STEPS, moved_bytes=6_000_000, evaluated_rows=5000)
    clock.now += LIMIT + 1
    assert tell(**told)


def test_first_evaluation_is_progress() -> None:
    clock = Clock()
    progress, _ = telling(clock)
    evaluation = control_unit_pb2.RunRoundResponse(evaluation=job_pb2.EvaluationSums())
    clock.now += LIMIT
    assert not progress.take(evaluation)
    clock.now += LIMIT
    assert not progress.take(evaluation)
    clock.now += 1
    assert progress.take(evaluation)


def test_bytes_of_earlier_rounds_and_single_bytes_are_no_progress() -> None:
    clock = Clock()
    _, tell = telling(clock)
    tell(moved_bytes=5_000_000)
    for step in range(10):
        clock.now += LIMIT / 9
        over = tell(moved_bytes=5_000_000 + step)
    assert over


def test_slowest_possible_round_ends_after_the_bound() -> None:
    clock = Clock()
    began = clock.now
    _, tell = telling(clock)
    told = {"steps_done": 0, "moved_bytes": 0, "evaluated_rows": 0}
    flags: dict[str, Any] = {}
    tell(**told)
    over, rises = False, 0
    while not over:
        clock.now += LIMIT
        rises += 1
        if rises == 1:
            flags["training_began"] = True
        elif rises == 2:
            flags["candidate_copied"] = True
        elif told["steps_done"] < STEPS:
            told["steps_done"] += 1
        elif told["moved_bytes"] < 6_000_000:
            told["moved_bytes"] += 6000
        else:
            told["evaluated_rows"] += 5
        over = tell(**told, **flags)
        clock.now += 0.001 * (rises > 2000 + STEPS)
    assert clock.now - began <= (STEPS + 2004) * LIMIT + 1
