from collections.abc import Mapping

import pytest

from collapipe.scheduler.job_store import JobDocument
from collapipe.scheduler.retention import Retention
from collapipe.v1 import scheduler_pb2

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


def test_jobs_that_ended_first_go_first() -> None:
    documents = jobs({"a": 1, "b": 4, "c": 2, "d": 3})
    assert expired(Retention(2, 0), documents) == ["d", "b"]
    assert expired(Retention(4, 0), documents) == []


def test_of_jobs_that_ended_at_once_the_older_one_goes_first() -> None:
    assert expired(Retention(1, 0), jobs({"a": 2, "b": 2, "c": 2})) == ["b", "a"]


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


@pytest.mark.parametrize(("days", "gone"), [(0, []), (1, ["b", "a"]), (2.5, ["a"]), (3, [])])
def test_jobs_go_when_they_are_too_old(days: float, gone: list[str]) -> None:
    documents = jobs({"a": 3, "b": 2, "c": 1})
    assert expired(Retention(100, days), documents) == gone


def test_jobs_that_ended_first_go_until_the_others_take_few_bytes() -> None:
    documents = jobs({"a": 4, "b": 3, "c": 2, "d": 1})
    for document, num_bytes in zip(documents, (1, 500, 30, 600), strict=True):
        document.stored_bytes = num_bytes
    assert expired(Retention(100, 0, 1000), documents) == ["b", "a"]
    assert expired(Retention(100, 0, 630), documents) == ["b", "a"]
    assert expired(Retention(100, 0, 1131), documents) == []
    assert expired(Retention(100, 0, 599), documents) == ["c", "b", "a"]


def test_reasons_name_the_setting() -> None:
    reasons = [reason for _, reason in Retention(2, 3).expired(jobs({"a": 1, "b": 5, "c": 2}), NOW)]
    assert reasons == ["--keep-jobs 2: 2 jobs ended after it"]
    reasons = [reason for _, reason in Retention(3, 3).expired(jobs({"a": 1, "b": 5, "c": 2}), NOW)]
    assert reasons == ["--keep-jobs-days 3: it ended earlier"]
