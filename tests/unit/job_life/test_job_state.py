"""What follows a failed attempt and a committed round, for the tries of a job and for its devices together."""

from dataclasses import replace

import pytest

from collapipe.job_life.job_devices import JobDevices, join
from collapipe.job_life.job_state import AfterFailure, JobState, attempt_failed, round_committed
from collapipe.job_life.tries import Again, Failure, GivesUp, Kind, Tries


@pytest.fixture
def job() -> JobState:
    return JobState(Tries(600.0))


@pytest.mark.parametrize("kind", [Kind.NO_PLAN, Kind.INVALID])
def test_newcomers_without_a_plan_are_left_out_and_the_job_goes_on(
    job: JobState, kind: Kind
) -> None:
    with_new = replace(job, devices=join(JobDevices(), ["new"]))
    after, then = attempt_failed(with_new, Failure(kind), {}, 0.0)
    assert then == AfterFailure(Again(0.0), frozenset({"new"}))
    assert (after.devices.no_plan, after.devices.newcomers) == ({"new"}, set())
    _, then = attempt_failed(after, Failure(kind), {}, 1.0)
    assert then == AfterFailure(GivesUp.LASTING), "the next one cannot be their fault"


def test_suspects_take_part_if_no_plan_fits_without_them_until_an_attempt_fails_otherwise(
    job: JobState,
) -> None:
    job, _ = attempt_failed(job, Failure(Kind.NO_PLAN, lacks_hosts=True), {}, 0.0)
    assert job.devices.takes_suspects
    job, _ = attempt_failed(job, Failure(Kind.HOST_LOST, "a"), {"a": "first"}, 1.0)
    assert not job.devices.takes_suspects and job.devices.unreached == {"a": "first"}


def test_host_with_values_that_are_not_finite_is_remembered(job: JobState) -> None:
    for host_id in ("a", "b"):
        job, _ = attempt_failed(job, Failure(Kind.NOT_FINITE, host_id), {}, 0.0)
    nobody, _ = attempt_failed(job, Failure(Kind.NOT_FINITE), {}, 0.0)
    assert job.devices.not_finite == nobody.devices.not_finite == {"a", "b"}


def test_repeated_round_is_decided_anew_only_after_some_attempts_without_a_plan(
    job: JobState,
) -> None:
    assert job.decides_anew(lacks_devices=False)
    for number in range(5):
        assert not job.decides_anew(lacks_devices=True), number
        job, _ = attempt_failed(job, Failure(Kind.NO_PLAN, lacks_hosts=True), {}, 0.0)
    assert job.decides_anew(lacks_devices=True)
    job = round_committed(job, 1, 0, ["a"], is_new=True)
    assert not job.decides_anew(lacks_devices=True)


@pytest.mark.parametrize("is_new", [True, False])
def test_only_a_new_round_makes_up_for_restarts(job: JobState, is_new: bool) -> None:
    restarting = replace(job.devices.restarting, num_restarts={"a": 2.0, "b": 2.0})
    devices = join(replace(job.devices, restarting=restarting), ["new"])
    after = round_committed(replace(job, devices=devices), 3, 0, ["a"], is_new=is_new)
    numbers = after.devices.restarting.num_restarts
    assert (numbers["a"] < 2.0) == is_new and numbers["b"] == 2.0
    assert after.devices.newcomers == set(), "they have a plan"
