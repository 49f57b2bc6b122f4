"""After which errors a job tries again, when, and for how long."""

import pytest

from collapipe.errors import (
    AttemptFailedError,
    CollapipeError,
    CorruptDataError,
    DivergedError,
    InfeasibleError,
    InvalidInputError,
    NotFoundError,
    NotPermittedError,
    PeerFaultyError,
    PeerLostError,
    WrongStateError,
)
from collapipe.scheduler.retries import Retries

from .jobs import Clock

LOST = PeerLostError("device-0", "device-0 is lost")


def waits(
    retries: Retries, clock: Clock, error: CollapipeError, seconds: float = 1.0
) -> list[float]:
    """Lets tries of this duration fail until the job gives up, and returns the waits before them."""
    found = []
    while (wait := retries.after(error, lacks_hosts=False)) is not None:
        found.append(wait)
        clock.now += wait + seconds
    return found


def test_first_retry_is_at_once_and_later_ones_wait_longer_up_to_a_limit() -> None:
    clock = Clock()
    found = waits(Retries(600.0, clock), clock, LOST)
    assert found[:6] == [0, 0.5, 1, 2, 4, 8]
    assert set(found[6:]) == {15.0}
    assert 600 - 16 < sum(found) + len(found) <= 600 + 16


@pytest.mark.parametrize(
    "error",
    [
        AttemptFailedError("stalled"),
        CorruptDataError("garbled"),
        NotFoundError("restarted"),
        WrongStateError("fenced"),
        OSError(28, "No space left on device"),
    ],
)
def test_error_that_may_pass_is_tried_again_for_a_minute(error: CollapipeError) -> None:
    clock = Clock()
    found = waits(Retries(600.0, clock), clock, error)
    assert len(found) > 3 and sum(found) + len(found) < 75


def test_training_that_diverges_is_tried_again_for_20_seconds() -> None:
    clock = Clock()
    found = waits(Retries(600.0, clock), clock, DivergedError("nan"))
    assert len(found) > 3 and sum(found) + len(found) < 30


@pytest.mark.parametrize(
    "error",
    [
        InvalidInputError("bad"),
        NotPermittedError("no"),
        InfeasibleError("too large"),
    ],
)
def test_error_that_comes_back_with_every_try_ends_the_job(error: CollapipeError) -> None:
    assert Retries(600.0).after(error, lacks_hosts=False) is None


def test_plan_that_does_not_fit_waits_for_missing_hosts() -> None:
    assert Retries(600.0).after(InfeasibleError("too large"), lacks_hosts=True) == 0


def test_limit_of_zero_allows_no_retry() -> None:
    assert Retries(0.0).after(LOST, lacks_hosts=True) is None


def test_commit_makes_later_failures_count_anew() -> None:
    clock = Clock()
    retries = Retries(100.0, clock)
    for num_rounds in range(1, 99):
        assert retries.after(LOST, lacks_hosts=False) == 0
        clock.now += 90
        assert retries.seconds_left() == 10
        retries.committed(num_rounds)
        assert retries.seconds_left() == 100


@pytest.mark.parametrize("error", [LOST, AttemptFailedError("bug")])
def test_round_that_never_succeeds_ends_the_job_although_earlier_rounds_are_repeated(
    error: CollapipeError,
) -> None:
    clock = Clock()
    retries = Retries(600.0, clock)
    retries.committed(5)
    for _ in range(10):
        assert retries.after(error, lacks_hosts=False) is not None
        retries.committed(4)
        retries.committed(5)
        clock.now += 300
    assert retries.after(error, lacks_hosts=False) is None


def test_waits_grow_although_a_round_before_the_failure_is_repeated_each_time() -> None:
    retries = Retries(600.0, Clock())
    found = []
    for _ in range(10):
        retries.committed(5)
        found.append(retries.after(AttemptFailedError("full disk"), lacks_hosts=False))
    assert found == [0, 0.5, 1, 2, 4, 8, 15, 15, 15, 15]
    retries.committed(6)
    assert retries.after(AttemptFailedError("full disk"), lacks_hosts=False) == 0


def test_job_that_gets_further_after_each_failure_may_fail_any_number_of_times() -> None:
    retries = Retries(600.0, Clock())
    for num_rounds in range(99):
        retries.committed(num_rounds)
        assert retries.after(LOST, lacks_hosts=False) == 0


def test_another_error_after_a_long_wait_for_a_host_has_its_own_time() -> None:
    clock = Clock()
    retries = Retries(600.0, clock)
    assert retries.after(LOST, lacks_hosts=True) == 0
    clock.now += 200
    assert len(waits(retries, clock, AttemptFailedError("restarted"))) > 3


def test_time_that_is_left_is_that_of_the_kind_of_the_last_error() -> None:
    clock = Clock()
    retries = Retries(600.0, clock)
    assert retries.seconds_to_try() is None
    retries.after(LOST, lacks_hosts=True)
    clock.now += 100
    assert retries.seconds_to_try() == 500
    retries.after(CorruptDataError("garbled"), lacks_hosts=False)
    clock.now += 10
    assert (retries.seconds_to_try(), retries.num_failures) == (50, 2)
    retries.committed(1)
    assert (retries.seconds_to_try(), retries.num_failures) == (None, 0)


def test_host_that_gives_wrong_answers_may_end_three_attempts() -> None:
    retries = Retries(600.0, Clock())
    wrong = [PeerFaultyError(f"control-unit-{i}", "nonsense") for i in (0, 1)]
    found = [retries.after(wrong[index], lacks_hosts=False) for index in (0, 1, 0, 1, 0)]
    assert found == [0, 0.5, 1, 2, None]
    retries.committed(1)
    assert retries.after(wrong[0], lacks_hosts=False) == 0
    retries.committed(1)  # repeated
    assert retries.after(wrong[0], lacks_hosts=False) is not None
    assert retries.after(wrong[0], lacks_hosts=False) is None


def test_host_that_refuses_a_request_would_refuse_it_again() -> None:
    error = PeerFaultyError("control-unit-0", "no such file", refuses=True)
    assert Retries(600.0).after(error, lacks_hosts=False) is None
