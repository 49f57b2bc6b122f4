"""Which of several failures explains the others."""

import itertools

import pytest

from collapipe.job_life.failure_cause import StageFailure, explains_itself, explanation
from collapipe.job_life.tries import Failure, Kind

VALUE = StageFailure(Failure(Kind.NOT_FINITE, "a"), "b")
OWN_SESSION = StageFailure(Failure(Kind.HOST_LOST, "a"), "a")
NEIGHBOUR = StageFailure(Failure(Kind.HOST_FAULTY, "a"), "b")
CONTROL_UNIT = StageFailure(Failure(Kind.HOST_LOST, "a"))
REFUSED = StageFailure(Failure(Kind.HOST_REFUSES, "a"), "a")
PASSING = StageFailure(Failure(Kind.PASSING), "a")


@pytest.mark.parametrize("others", [*itertools.permutations([OWN_SESSION, NEIGHBOUR, PASSING])])
@pytest.mark.parametrize(
    ("first", "cause"), [(VALUE, VALUE), (CONTROL_UNIT, OWN_SESSION), (PASSING, OWN_SESSION)]
)
def test_best_explanation_wins_whenever_it_is_noticed(
    first: StageFailure, cause: StageFailure, others: tuple[StageFailure, ...]
) -> None:
    for failures in ((first, *others), (*others, first)):
        assert failures[explanation(failures)] == cause


def test_report_of_a_neighbour_explains_more_than_what_the_control_unit_noticed() -> None:
    assert explanation([CONTROL_UNIT, PASSING, NEIGHBOUR]) == 2
    assert explanation([NEIGHBOUR, REFUSED]) == 1


@pytest.mark.parametrize("failure", [VALUE, OWN_SESSION, NEIGHBOUR, CONTROL_UNIT, PASSING])
def test_first_of_several_equal_explanations_wins(failure: StageFailure) -> None:
    assert explanation([failure, failure]) == 0


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
