"""What follows a failed attempt and a committed round, and how long a job waits for hosts."""

from dataclasses import replace

import pytest

from collapipe.job_life.job_devices import JobDevices, join
from collapipe.job_life.job_run import (
    TRANSITIONS,
    Action,
    AttemptBegan,
    AttemptFailed,
    BeginAttempt,
    End,
    HostsSeen,
    JobPhase,
    JobState,
    LookForHosts,
    Prepare,
    RoundCommitted,
    RunRound,
    StopWaiting,
    WaitForHosts,
    step,
)
from collapipe.job_life.tries import Failure, GivesUp, Kind, Tries


@pytest.fixture
def job() -> JobState:
    return JobState(Tries(600.0), wait_seconds=60.0, phase=JobPhase.RUNNING)


def fail(job: JobState, failure: Failure, now: float = 0.0) -> tuple[JobState, Action]:
    """Lets the attempt at a running job fail, and returns the job in its next attempt."""
    failed, action = step(job, AttemptFailed(failure), now)
    return replace(failed, phase=JobPhase.RUNNING), action


@pytest.mark.parametrize("kind", [Kind.NO_PLAN, Kind.INVALID])
def test_newcomers_without_a_plan_are_left_out_and_the_job_goes_on(
    job: JobState, kind: Kind
) -> None:
    with_new = replace(job, devices=join(JobDevices(), ["new"]))
    after, action = fail(with_new, Failure(kind))
    assert action == BeginAttempt(0.0, frozenset({"new"}))
    assert (after.devices.no_plan, after.devices.newcomers) == ({"new"}, set())
    _, action = fail(after, Failure(kind), 1.0)
    assert action == End(GivesUp.LASTING), "the next one cannot be their fault"


def test_suspects_take_part_if_no_plan_fits_without_them_until_an_attempt_fails_otherwise(
    job: JobState,
) -> None:
    job, _ = fail(job, Failure(Kind.NO_PLAN, lacks_hosts=True))
    assert job.devices.takes_suspects
    job, _ = step(job, AttemptFailed(Failure(Kind.HOST_LOST, "a"), {"a": "first"}), 1.0)
    assert not job.devices.takes_suspects and job.devices.unreached == {"a": "first"}


def test_host_with_values_that_are_not_finite_is_remembered(job: JobState) -> None:
    for host_id in ("a", "b"):
        job, _ = fail(job, Failure(Kind.NOT_FINITE, host_id))
    nobody, _ = fail(job, Failure(Kind.NOT_FINITE))
    assert job.devices.not_finite == nobody.devices.not_finite == {"a", "b"}


def prepared(job: JobState, *, lacks_devices: bool) -> JobState:
    """Returns the job after it has found its hosts."""
    looking = replace(job, phase=JobPhase.LOOKING)
    found, action = step(looking, HostsSeen({0: {"a": "1"}}, lacks_devices, False), 0.0)
    assert action == Prepare() and found.phase is JobPhase.PREPARING
    return found


def test_repeated_round_is_decided_anew_only_after_some_attempts_without_a_plan(
    job: JobState,
) -> None:
    assert prepared(job, lacks_devices=False).decides_anew
    for number in range(5):
        assert not prepared(job, lacks_devices=True).decides_anew, number
        job, _ = fail(job, Failure(Kind.NO_PLAN, lacks_hosts=True))
    assert prepared(job, lacks_devices=True).decides_anew
    job, action = step(job, RoundCommitted(1, 0, ["a"], is_new=True, is_trained=False), 0.0)
    assert action == RunRound(trains=True)
    assert not prepared(job, lacks_devices=True).decides_anew


@pytest.mark.parametrize("is_new", [True, False])
def test_only_a_new_round_makes_up_for_restarts(job: JobState, is_new: bool) -> None:
    restarting = replace(job.devices.restarting, num_restarts={"a": 2.0, "b": 2.0})
    devices = join(replace(job.devices, restarting=restarting), ["new"])
    committed = RoundCommitted(3, 0, ["a"], is_new=is_new, is_trained=True)
    after, action = step(replace(job, devices=devices), committed, 0.0)
    numbers = after.devices.restarting.num_restarts
    assert (numbers["a"] < 2.0) == is_new and numbers["b"] == 2.0
    assert after.devices.newcomers == set(), "they have a plan"
    assert action == RunRound(trains=False)


@pytest.mark.parametrize(
    ("planned", "num_failures", "limit", "tries_again"),
    [
        ({}, 0, 60.0, False),
        ({0: ["a"]}, 0, 600.0, True),
        ({}, 1, 600.0, True),
    ],
)
def test_job_waits_for_hosts_until_its_limit(
    job: JobState, planned: dict[int, list[str]], num_failures: int, limit: float, tries_again: bool
) -> None:
    tries = replace(job.tries, num_failures=num_failures)
    job = replace(job, tries=tries, phase=JobPhase.BETWEEN_ATTEMPTS)
    job, action = step(job, AttemptBegan(planned), 100.0)
    assert action == LookForHosts() and job.has_planned == bool(planned)
    absent = HostsSeen(None, lacks_devices=False, may_register=False)
    for now in (100.0, 100.0 + limit):
        job, action = step(job, absent, now)
        assert action == WaitForHosts(100.0 + limit - now)
    job, action = step(job, absent, 101.0 + limit)
    assert action == StopWaiting(limit + 1.0, limit, tries_again)
    _, action = step(job, HostsSeen({0: {"a": "1"}}, False, False), 101.0 + limit)
    assert action == Prepare()


def test_job_waits_no_longer_than_its_failures_allow(job: JobState) -> None:
    job = replace(job, tries=replace(job.tries, num_failures=1, first_failure_at=0.0))
    job = replace(job, phase=JobPhase.LOOKING, looks_since=590.0)
    _, action = step(job, HostsSeen(None, False, False), 595.0)
    assert action == WaitForHosts(5.0)


def test_job_waits_for_devices_that_may_still_register(job: JobState) -> None:
    job = replace(job, phase=JobPhase.LOOKING)
    for lacks, may_register, expected in (
        (True, True, WaitForHosts(60.0)),
        (True, False, Prepare()),
        (False, True, Prepare()),
    ):
        _, action = step(job, HostsSeen({0: {"a": "1"}}, lacks, may_register), 0.0)
        assert action == expected


def test_every_phase_but_the_end_has_a_way_out() -> None:
    begins = {phase for phase, _ in TRANSITIONS}
    assert begins == set(JobPhase) - {JobPhase.ENDED}
    reached = set[JobPhase]().union(*(case.to for case in TRANSITIONS.values()))
    assert reached == set(JobPhase)
