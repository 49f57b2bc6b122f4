"""The rules of the queue: which entries begin, and how long a job is kept."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import pytest

from collapipe.scheduler.job_documents import JobDocument
from collapipe.scheduler.retention import Retention
from collapipe.scheduler.turns import turns
from collapipe.v1 import scheduler_pb2


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
