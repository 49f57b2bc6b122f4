"""Which of several failures explains the others."""

import pytest

from collapipe.job_life.failure_cause import explains, explains_itself
from collapipe.job_life.tries import Failure, Kind

BLAMED = Failure(Kind.HOST_LOST, "a")
FROM_LITTLE_TO_MUCH = [
    [(Failure(Kind.PASSING), "a"), (BLAMED, ""), (Failure(Kind.CANCELLED), "")],
    [(BLAMED, "b"), (Failure(Kind.HOST_FAULTY, "a"), "b")],
    [(BLAMED, "a"), (Failure(Kind.HOST_REFUSES, "a"), "a")],
    [(Failure(Kind.NOT_FINITE, "a"), "b"), (Failure(Kind.NOT_FINITE), "")],
]


def test_own_session_explains_more_than_a_neighbour_and_a_value_explains_most() -> None:
    found = [{explains(*each) for each in alike} for alike in FROM_LITTLE_TO_MUCH]
    assert all(len(alike) == 1 for alike in found)
    flat = [value for alike in found for value in alike]
    assert flat == sorted(set(flat)) and len(flat) == 4


@pytest.mark.parametrize(
    ("failure", "expected"),
    [
        (Failure(Kind.CANCELLED), True),
        (Failure(Kind.NOT_FINITE), True),
        (Failure(Kind.NOT_FINITE, "a"), False),
        (Failure(Kind.HOST_LOST, "a"), False),
    ],
)
def test_cancelled_attempt_and_a_loss_that_is_not_finite_explain_themselves(
    failure: Failure, *, expected: bool
) -> None:
    assert explains_itself(failure) is expected
