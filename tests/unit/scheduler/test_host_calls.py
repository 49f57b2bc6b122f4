"""How the calls of a job end, and what happens while they run."""

import threading

import pytest

from collapipe.errors import AttemptFailedError
from collapipe.scheduler.host_calls import HostCalls

LIMIT_SECONDS = 20.0


def test_job_looks_around_while_it_waits_for_calls() -> None:
    looked = threading.Event()
    calls = HostCalls(5.0, looked.set)
    assert calls.in_parallel(lambda item: (item, looked.wait(LIMIT_SECONDS)), [1, 2]) == [
        (1, True),
        (2, True),
    ]
    looked.clear()
    assert calls.run_detached(lambda: looked.wait(LIMIT_SECONDS))


def test_first_failure_is_raised_although_others_have_succeeded_before() -> None:
    looked = threading.Event()

    def work(item: int) -> int:
        if item:
            assert looked.wait(LIMIT_SECONDS)
            raise AttemptFailedError(f"call {item} failed")
        return item

    with pytest.raises(AttemptFailedError, match="call 2 failed"):
        HostCalls(5.0, looked.set).in_parallel(work, [0, 2])


def test_other_calls_end_first_if_a_failure_does_not_end_all() -> None:
    has_failed, ended = threading.Event(), []

    def work(item: int) -> None:
        if item:
            has_failed.set()
            raise AttemptFailedError("call 1 failed")
        assert has_failed.wait(LIMIT_SECONDS)
        ended.append(item)

    with pytest.raises(AttemptFailedError, match="call 1 failed"):
        HostCalls(5.0).in_parallel(work, [0, 1], ends_all=lambda error: False)
    assert ended == [0]
