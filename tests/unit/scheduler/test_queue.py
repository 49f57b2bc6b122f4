"""The rules of the queue: which entries begin, when a job tries again, and how long it is kept."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

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
from collapipe.scheduler.job_store import JobDocument
from collapipe.scheduler.retention import Retention
from collapipe.scheduler.retries import Retries
from collapipe.scheduler.turns import turns
from collapipe.v1 import scheduler_pb2

from .jobs import Clock


@dataclass(frozen=True)
class Entry:
    job_id: str
    host_clusters: frozenset[int]


def entry(name: str, *clusters: int) -> Entry:
    return Entry(name, frozenset(clusters))


A, AGAIN, B, BOTH = entry("a", 0), entry("again", 0), entry("b", 1), entry("both", 0, 1)


def names(entries: Sequence[Entry]) -> str:
    return " ".join(one.job_id for one in entries)


def begin(queue: Sequence[Entry], running: Sequence[Entry] = (), most: int = 8) -> str:
    """Names the entries that begin."""
    return names([turn.entry for turn in turns(queue, running, most) if turn.may_begin])


def waits_for(queue: Sequence[Entry], running: Sequence[Entry] = (), most: int = 8) -> list[str]:
    """Names what each entry of the queue waits for."""
    return [names(turn.ahead) for turn in turns(queue, running, most)]


def test_entries_without_a_common_cluster_begin_together() -> None:
    assert begin([A, AGAIN, B]) == "a b"
    assert begin([B], [A]) == "b"
    assert begin([A], [BOTH]) == ""


def test_entry_that_waits_is_not_overtaken_by_one_that_wants_its_clusters() -> None:
    later = [BOTH, B, entry("c", 2)]
    assert begin(later, [A]) == "c"
    assert waits_for(later, [A]) == ["a", "both", ""]
    assert begin(later) == "both c"


def test_entry_waits_for_all_before_it_that_want_one_of_its_clusters() -> None:
    assert waits_for([BOTH, AGAIN], [A, B]) == ["a b", "a both"]


def test_only_so_many_run_at_once() -> None:
    queue = [entry(str(index), index) for index in range(4)]
    assert begin(queue, most=3) == "0 1 2"
    running, waiting = queue[:3], queue[3:]
    assert begin(waiting, running, most=3) == ""
    assert waits_for(waiting, running, most=3) == ["0 1 2"]


def test_held_job_keeps_its_place() -> None:
    first, second, other = turns([A, AGAIN, B], [], 8, held={"a"})
    assert (first.may_begin, first.ahead) == (False, ())
    assert (second.may_begin, second.ahead) == (False, (A,))
    assert other.may_begin


LOST = PeerLostError("device-0", "device-0 is lost")


@pytest.fixture
def retries(clock: Clock) -> Retries:
    return Retries(600.0, clock)


def after(retries: Retries, error: CollapipeError) -> float | None:
    return retries.after(error, lacks_hosts=False)


def waits(retries: Retries, clock: Clock, error: CollapipeError) -> list[float]:
    """Lets tries of a second fail until the job gives up, and returns the waits before them."""
    found = []
    while (wait := after(retries, error)) is not None:
        found.append(wait)
        clock.now += wait + 1.0
    return found


def test_later_retries_wait_longer_up_to_a_limit(retries: Retries, clock: Clock) -> None:
    found = waits(retries, clock, LOST)
    assert found[:6] == [0, 0.5, 1, 2, 4, 8]
    assert set(found[6:]) == {15.0}
    assert 600 - 16 < sum(found) + len(found) <= 600 + 16


@pytest.mark.parametrize(
    ("error", "seconds"),
    [
        (AttemptFailedError("stalled"), 75),
        (CorruptDataError("garbled"), 75),
        (NotFoundError("restarted"), 75),
        (WrongStateError("fenced"), 75),
        (OSError(28, "No space left on device"), 75),
    ],
)
def test_error_that_may_pass_is_tried_again_for_a_while(
    retries: Retries, clock: Clock, error: CollapipeError, seconds: float
) -> None:
    found = waits(retries, clock, error)
    assert len(found) > 3 and sum(found) + len(found) < seconds


@pytest.mark.parametrize(
    "error",
    [
        InvalidInputError("bad"),
        NotPermittedError("no"),
        InfeasibleError("too large"),
        PeerFaultyError("control-unit-0", "no such file", refuses=True),
    ],
)
def test_error_that_would_come_back_ends_the_job(retries: Retries, error: CollapipeError) -> None:
    assert after(retries, error) is None


def test_plan_that_does_not_fit_waits_for_missing_hosts(retries: Retries) -> None:
    assert retries.after(InfeasibleError("too large"), lacks_hosts=True) == 0


def test_limit_of_zero_allows_no_retry() -> None:
    assert Retries(0.0).after(LOST, lacks_hosts=True) is None


def test_commit_makes_later_failures_count_anew(retries: Retries, clock: Clock) -> None:
    for num_rounds in range(1, 99):
        assert after(retries, LOST) == 0
        clock.now += 590
        assert retries.seconds_left() == 10
        retries.committed(num_rounds, 0)
        assert retries.seconds_left() == 600


@pytest.mark.parametrize("error", [LOST, AttemptFailedError("bug")])
def test_round_that_never_succeeds_ends_the_job_although_earlier_rounds_are_repeated(
    retries: Retries, clock: Clock, error: CollapipeError
) -> None:
    retries.committed(5, 0)
    for _ in range(10):
        assert after(retries, error) is not None
        retries.committed(4, 0)
        retries.committed(5, 0)
        clock.now += 300
    assert after(retries, error) is None


def test_waits_grow_although_an_earlier_round_is_repeated(retries: Retries) -> None:
    found = []
    for _ in range(10):
        retries.committed(5, 0)
        found.append(after(retries, AttemptFailedError("full disk")))
    assert found == [0, 0.5, 1, 2, 4, 8, 15, 15, 15, 15]
    retries.committed(6, 0)
    assert after(retries, AttemptFailedError("full disk")) == 0


def test_error_of_another_kind_has_its_own_time(retries: Retries, clock: Clock) -> None:
    assert retries.seconds_to_try() is None
    retries.after(LOST, lacks_hosts=True)
    clock.now += 100
    assert retries.seconds_to_try() == 500
    after(retries, CorruptDataError("garbled"))
    clock.now += 10
    assert (retries.seconds_to_try(), retries.num_failures) == (50, 2)
    retries.committed(1, 0)
    assert (retries.seconds_to_try(), retries.num_failures) == (None, 0)


def test_host_that_gives_wrong_answers_may_end_three_attempts(retries: Retries) -> None:
    wrong = [PeerFaultyError(f"control-unit-{i}", "nonsense") for i in (0, 1)]
    found = [after(retries, wrong[index]) for index in (0, 1, 0, 1, 0)]
    assert found == [0, 0.5, 1, 2, None]
    retries.committed(1, 0)
    assert after(retries, wrong[0]) == 0
    retries.committed(1, 0)  # repeated
    assert after(retries, wrong[0]) is not None
    assert after(retries, wrong[0]) is None


def test_values_that_are_not_finite_end_the_job_when_they_come_back(retries: Retries) -> None:
    assert after(retries, DivergedError("nan in step 3", "device-0-1")) == 0
    assert after(retries, LOST) is not None
    assert after(retries, DivergedError("nan in step 9", "device-0-1")) is None


def test_values_that_are_not_finite_may_come_from_two_broken_hosts(retries: Retries) -> None:
    for number in range(2):
        retries.committed(5, 0)  # Repeated rounds do not count.
        assert after(retries, DivergedError("nan", f"device-0-{number}")) is not None
    assert after(retries, DivergedError("nan", "device-0-2")) is None
    retries.committed(6, 0)
    assert after(retries, DivergedError("nan", "device-0-2")) is not None


DAY = 86_400.0
NOW = 100 * DAY


def jobs(ended: Mapping[str, float], **states: scheduler_pb2.JobState) -> list[JobDocument]:
    """Jobs in the order of their numbers, with the days since each ended."""
    return [
        JobDocument(
            job_id=name,
            number=number,
            config_json="",
            state=states.get(name, scheduler_pb2.JOB_STATE_SUCCEEDED),
            ended_at=NOW - days * DAY,
        )
        for number, (name, days) in enumerate(ended.items())
    ]


def expired(retention: Retention, documents: list[JobDocument]) -> list[str]:
    return [job_id for job_id, _ in retention.expired(documents, NOW)]


@pytest.mark.parametrize(
    ("num_jobs", "ended", "gone"),
    [
        (2, {"a": 1, "b": 4, "c": 2, "d": 3}, ["d", "b"]),
        (4, {"a": 1, "b": 4, "c": 2, "d": 3}, []),
        (1, {"a": 2, "b": 2, "c": 2}, ["b", "a"]),
    ],
)
def test_jobs_that_ended_first_go_first_and_of_equal_ones_the_older(
    num_jobs: int, ended: dict[str, float], gone: list[str]
) -> None:
    assert expired(Retention(num_jobs, 0), jobs(ended)) == gone


def test_failed_and_cancelled_jobs_count_and_unfinished_ones_do_not() -> None:
    states = {
        "a": scheduler_pb2.JOB_STATE_RUNNING,
        "b": scheduler_pb2.JOB_STATE_FAILED,
        "c": scheduler_pb2.JOB_STATE_CANCELLED,
        "d": scheduler_pb2.JOB_STATE_QUEUED,
        "e": scheduler_pb2.JOB_STATE_PREPARING,
    }
    documents = jobs({"a": 9, "b": 8, "c": 7, "d": 6, "e": 5, "f": 4}, **states)
    assert expired(Retention(1, 0), documents) == ["c", "b"]
    assert expired(Retention(1, 1), documents) == ["f", "c", "b"]


def test_jobs_of_one_owner_push_out_none_of_another() -> None:
    documents = jobs({"mine": 90, "old": 9, "older": 10, "new": 1})
    for document in documents:
        document.owner = "client:me" if document.job_id == "mine" else "client:other"
        document.stored_bytes = 100
    assert expired(Retention(1, 0), documents) == ["old", "older"]
    assert expired(Retention(100, 0, 150), documents) == ["old", "older"]
    assert expired(Retention(100, 30), documents) == ["mine"]


@pytest.mark.parametrize(("days", "gone"), [(0, []), (1, ["b", "a"]), (2.5, ["a"]), (3, [])])
def test_jobs_go_when_they_are_too_old(days: float, gone: list[str]) -> None:
    found = Retention(100, days).expired(jobs({"a": 3, "b": 2, "c": 1}), NOW)
    assert [job_id for job_id, _ in found] == gone
    assert all(reason.startswith(f"--keep-jobs-days {days:g}:") for _, reason in found)


def test_jobs_that_ended_first_go_until_the_others_take_few_bytes() -> None:
    documents = jobs({"a": 4, "b": 3, "c": 2, "d": 1})
    for document, num_bytes in zip(documents, (1, 500, 30, 600), strict=True):
        document.stored_bytes = num_bytes
    for most, gone in ((1000, ["b", "a"]), (630, ["b", "a"]), (1131, []), (599, ["c", "b", "a"])):
        assert expired(Retention(100, 0, most), documents) == gone


def test_job_goes_on_while_repeated_rounds_move_its_restore_point(
    retries: Retries, clock: Clock
) -> None:
    retries.committed(30, 0)
    for num_restorable in range(1, 30):
        assert after(retries, LOST) == 0
        retries.committed(num_restorable + 1, num_restorable)
        clock.now += 300
    for _ in range(10):
        assert after(retries, LOST) is not None
        retries.committed(30, 29)
    assert after(retries, LOST) is None


def test_host_that_ends_three_attempts_ends_the_job_although_its_restore_point_moves(
    retries: Retries,
) -> None:
    retries.committed(30, 0)
    for num_restorable in (1, 2):
        assert after(retries, PeerFaultyError("control-unit-0", "wrong")) is not None
        retries.committed(num_restorable + 1, num_restorable)
    assert after(retries, PeerFaultyError("control-unit-0", "wrong")) is None
