"""After which failures a job tries again, when, and for how long."""

import copy
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

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
from collapipe.job_life.failures import failure_of
from collapipe.job_life.tries import (
    Again,
    Failure,
    GivesUp,
    Kind,
    Tries,
    after_commit,
    after_failure,
)
from collapipe.scheduler.job_end import say_end

LOST = Failure(Kind.HOST_LOST, "device-0")
PASSING = Failure(Kind.PASSING)


class Job:
    """The tries of a job, and a time that a test sets."""

    def __init__(self, limit_seconds: float = 600.0) -> None:
        self.tries = Tries(limit_seconds)
        self.now = 100.0
        self.gives_up: GivesUp | None = None

    def fail(self, failure: Failure) -> float | None:
        """Returns the wait before the next try; `None` if there is none."""
        self.tries, then = after_failure(self.tries, failure, self.now)
        if isinstance(then, Again):
            return then.wait_seconds
        self.gives_up = then
        return None

    def commit(self, num_rounds: int, num_restorable: int = 0) -> None:
        self.tries = after_commit(self.tries, num_rounds, num_restorable)

    def waits(self, failure: Failure) -> list[float]:
        """Lets tries of a second fail until the job gives up, and returns the waits before them."""
        found = []
        while (wait := self.fail(failure)) is not None:
            found.append(wait)
            self.now += wait + 1.0
        return found


@pytest.fixture
def job() -> Job:
    return Job()


def test_later_tries_wait_longer_up_to_a_limit(job: Job) -> None:
    found = job.waits(LOST)
    assert found[:6] == [0, 0.5, 1, 2, 4, 8]
    assert set(found[6:]) == {15.0}
    assert 600 - 16 < sum(found) + len(found) <= 600 + 16
    assert job.gives_up is GivesUp.TIME_IS_OVER
    assert "600 s" in say_end(job.gives_up, job.tries)


def test_failure_that_may_pass_is_tried_again_for_a_while(job: Job) -> None:
    found = job.waits(PASSING)
    assert len(found) > 3 and sum(found) + len(found) < 75
    assert job.gives_up is not None and " 60 s" in say_end(job.gives_up, job.tries)


@pytest.mark.parametrize(
    ("error", "failure"),
    [
        (PeerLostError("device-0", "lost"), LOST),
        (PeerFaultyError("device-0", "nonsense"), Failure(Kind.HOST_FAULTY, "device-0")),
        (
            PeerFaultyError("control-unit-0", "no such file", refuses=True),
            Failure(Kind.HOST_REFUSES, "control-unit-0"),
        ),
        (DivergedError("nan", "device-1"), Failure(Kind.NOT_FINITE, "device-1")),
        (InfeasibleError("too large"), Failure(Kind.NO_PLAN)),
        (AttemptFailedError("stalled"), PASSING),
        (CorruptDataError("garbled"), PASSING),
        (NotFoundError("restarted"), PASSING),
        (WrongStateError("fenced"), PASSING),
        (OSError(28, "No space left on device"), PASSING),
        (InvalidInputError("bad"), Failure(Kind.INVALID)),
        (NotPermittedError("no"), Failure(Kind.LASTING)),
        (CollapipeError("anything else"), Failure(Kind.LASTING)),
    ],
)
def test_error_is_a_failure_of_its_kind(error: CollapipeError | OSError, failure: Failure) -> None:
    assert failure_of(error) == failure


@pytest.mark.parametrize(
    ("failure", "why"),
    [
        (Failure(Kind.LASTING), GivesUp.LASTING),
        (Failure(Kind.INVALID), GivesUp.LASTING),
        (Failure(Kind.NO_PLAN), GivesUp.LASTING),
        (Failure(Kind.HOST_REFUSES, "control-unit-0"), GivesUp.REFUSED),
    ],
)
def test_failure_that_would_come_back_ends_the_job(
    job: Job, failure: Failure, why: GivesUp
) -> None:
    assert job.fail(failure) is None
    assert job.gives_up is why


def test_plan_that_does_not_fit_waits_for_missing_hosts(job: Job) -> None:
    assert job.fail(Failure(Kind.NO_PLAN, lacks_hosts=True)) == 0


def test_limit_of_zero_allows_no_further_try() -> None:
    assert Job(0.0).fail(LOST) is None


def test_commit_makes_later_failures_count_anew(job: Job) -> None:
    for num_rounds in range(1, 99):
        assert job.fail(LOST) == 0
        job.now += 590
        assert job.tries.seconds_left(job.now) == 10
        job.commit(num_rounds)
        assert job.tries.seconds_left(job.now) == 600


@pytest.mark.parametrize("failure", [LOST, PASSING])
def test_round_that_never_succeeds_ends_the_job_although_earlier_rounds_are_repeated(
    job: Job, failure: Failure
) -> None:
    job.commit(5)
    for _ in range(10):
        assert job.fail(failure) is not None
        job.commit(4)
        job.commit(5)
        job.now += 300
    assert job.fail(failure) is None
    assert job.gives_up is GivesUp.TOO_MANY_REPEATS
    assert "10 times" in say_end(job.gives_up, job.tries)


def test_waits_grow_although_an_earlier_round_is_repeated(job: Job) -> None:
    found = []
    for _ in range(10):
        job.commit(5)
        found.append(job.fail(PASSING))
    assert found == [0, 0.5, 1, 2, 4, 8, 15, 15, 15, 15]
    job.commit(6)
    assert job.fail(PASSING) == 0


def test_failure_of_another_kind_has_its_own_time(job: Job) -> None:
    assert job.tries.seconds_to_try(job.now) is None
    job.fail(LOST)
    job.now += 100
    assert job.tries.seconds_to_try(job.now) == 500
    job.fail(PASSING)
    job.now += 10
    assert (job.tries.seconds_to_try(job.now), job.tries.num_failures) == (50, 2)
    job.commit(1)
    assert (job.tries.seconds_to_try(job.now), job.tries.num_failures) == (None, 0)


def test_host_that_gives_wrong_answers_may_end_three_attempts(job: Job) -> None:
    wrong = [Failure(Kind.HOST_FAULTY, f"control-unit-{i}") for i in (0, 1)]
    found = [job.fail(wrong[index]) for index in (0, 1, 0, 1, 0)]
    assert found == [0, 0.5, 1, 2, None]
    assert job.gives_up is GivesUp.FAULTY_TOO_OFTEN
    job.commit(1)
    assert job.fail(wrong[0]) == 0
    job.commit(1)  # repeated
    assert job.fail(wrong[0]) is not None
    assert job.fail(wrong[0]) is None


def not_finite(number: int) -> Failure:
    return Failure(Kind.NOT_FINITE, f"device-0-{number}")


def test_values_that_are_not_finite_end_the_job_when_they_come_back(job: Job) -> None:
    assert job.fail(not_finite(1)) == 0
    assert job.fail(LOST) is not None
    assert job.fail(not_finite(1)) is None
    assert job.gives_up is GivesUp.NOT_FINITE_AGAIN


def test_values_that_are_not_finite_may_come_from_two_broken_hosts(job: Job) -> None:
    for number in range(2):
        job.commit(5)  # Repeated rounds do not count.
        assert job.fail(not_finite(number)) is not None
    assert job.fail(not_finite(2)) is None
    job.commit(6)
    assert job.fail(not_finite(2)) is not None


def test_job_goes_on_while_repeated_rounds_move_its_restore_point(job: Job) -> None:
    job.commit(30)
    for num_restorable in range(1, 30):
        assert job.fail(LOST) == 0
        job.commit(num_restorable + 1, num_restorable)
        job.now += 300
    for _ in range(10):
        assert job.fail(LOST) is not None
        job.commit(30, 29)
    assert job.fail(LOST) is None


def test_host_that_ends_three_attempts_ends_the_job_although_its_restore_point_moves(
    job: Job,
) -> None:
    wrong = Failure(Kind.HOST_FAULTY, "control-unit-0")
    job.commit(30)
    for num_restorable in (1, 2):
        assert job.fail(wrong) is not None
        job.commit(num_restorable + 1, num_restorable)
    assert job.fail(wrong) is None


FAILURES = st.builds(Failure, st.sampled_from(Kind), st.sampled_from(["", "a", "b"]), st.booleans())
COMMITS = st.tuples(st.integers(0, 9), st.integers(0, 9))


@given(st.lists(st.tuples(FAILURES | COMMITS, st.floats(0, 300)), max_size=60))
def test_waits_and_repeats_are_bounded_and_the_state_before_stays_as_it_was(
    events: Sequence[tuple[Failure | tuple[int, int], float]],
) -> None:
    job = Job()
    for event, seconds in events:
        job.now += seconds
        before, copied = job.tries, copy.deepcopy(job.tries)
        if isinstance(event, tuple):
            job.commit(*event)
            assert job.tries.num_failures == 0
        else:
            wait = job.fail(event)
            if wait is not None:
                assert 0 <= wait <= 15 and job.tries.num_repeats <= 10
                assert job.now + wait <= (job.tries.ends_at or 0.0)
        assert before == copied


def test_failures_of_two_kinds_in_turns_get_no_more_time() -> None:
    tries = Tries(30.0)
    for kind, at in ((Kind.HOST_LOST, 0.0), (Kind.HOST_LOST, 24.0), (Kind.PASSING, 25.0)):
        tries, then = after_failure(tries, Failure(kind), at)
        assert isinstance(then, Again)
    assert after_failure(tries, Failure(Kind.PASSING), 31.0)[1] is GivesUp.TIME_IS_OVER
    assert tries.seconds_of_tries == 30.0
