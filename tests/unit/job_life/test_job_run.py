"""What follows a failed attempt and a committed round, and how long a job waits for hosts."""

from dataclasses import replace

import pytest

from collapipe.job_life.failing_clusters import FailingClusters
from collapipe.job_life.job_devices import JobDevices
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
    ModelEvaluated,
    Prepare,
    Prepared,
    RoundCommitted,
    RunRound,
    StopWaiting,
    WaitForHosts,
    step,
)
from collapipe.job_life.tries import Failure, GivesUp, Kind, Tries


@pytest.fixture
def job() -> JobState:
    return JobState(Tries(600.0), wait_for_hosts_seconds=60.0, phase=JobPhase.RUNNING)


def fail(job: JobState, failure: Failure, now: float = 0.0) -> tuple[JobState, Action]:
    """Lets the attempt at a running job fail, and returns the job in its next attempt."""
    failed, action = step(job, AttemptFailed(failure), now)
    goes_on = isinstance(action, BeginAttempt)
    assert failed.phase is (JobPhase.BETWEEN_ATTEMPTS if goes_on else JobPhase.ENDED)
    return replace(failed, phase=JobPhase.RUNNING), action


@pytest.mark.parametrize("kind", [Kind.NO_PLAN, Kind.INVALID])
def test_newcomers_without_a_plan_are_left_out_and_the_job_goes_on(
    job: JobState, kind: Kind
) -> None:
    with_new = replace(job, devices=JobDevices(newcomers=frozenset({"new"})))
    after, action = fail(with_new, Failure(kind))
    assert action == BeginAttempt(0.0)
    assert (after.devices.no_plan, after.devices.newcomers) == ({"new"}, set())
    _, action = fail(after, Failure(kind), 1.0)
    assert action == End(GivesUp.LASTING), "the next one cannot be their fault"


def test_suspects_take_part_if_no_plan_fits_without_them_until_an_attempt_fails_otherwise(
    job: JobState,
) -> None:
    job, _ = fail(job, Failure(Kind.NO_PLAN, lacks_hosts=True))
    assert job.devices.takes_doubtful
    job, _ = step(job, AttemptFailed(Failure(Kind.HOST_LOST, "a"), {"a": "first"}), 1.0)
    assert not job.devices.takes_doubtful and job.devices.unreached == {"a": "first"}


def test_host_with_values_that_are_not_finite_is_remembered(job: JobState) -> None:
    for host_id in ("a", "b"):
        job, _ = fail(job, Failure(Kind.NOT_FINITE, host_id))
    nobody, _ = fail(job, Failure(Kind.NOT_FINITE))
    assert job.devices.not_finite == nobody.devices.not_finite == {"a", "b"}


def prepared(job: JobState, *, lacks_devices: bool) -> JobState:
    """Returns the job after it has found its hosts."""
    looking = replace(job, phase=JobPhase.LOOKING)
    found, action = step(looking, HostsSeen({0: {"a": "1"}}, lacks_devices), 0.0)
    assert action == Prepare() and found.phase is JobPhase.PREPARING
    return found


def test_repeated_round_is_decided_anew_only_after_some_attempts_without_a_plan(
    job: JobState,
) -> None:
    assert prepared(job, lacks_devices=False).decides_anew
    for number in range(5):
        assert not prepared(job, lacks_devices=True).decides_anew, number
        job, _ = fail(job, Failure(Kind.NO_PLAN, lacks_hosts=True))
    job = prepared(job, lacks_devices=True)
    job, action = step(job, Prepared(is_trained=False), 0.0)
    assert job.decides_anew and action == RunRound(trains=True)
    job, action = step(job, RoundCommitted(1, 0, ["a"], is_new=True, is_trained=False), 0.0)
    assert job.decides_anew and action == RunRound(trains=True), "until the attempt ends"
    assert not prepared(job, lacks_devices=True).decides_anew


@pytest.mark.parametrize("is_new", [True, False])
def test_only_a_new_round_makes_up_for_restarts(job: JobState, is_new: bool) -> None:
    restarting = replace(job.devices.restarting, num_restarts={"a": 2.0, "b": 2.0})
    devices = replace(job.devices, restarting=restarting, newcomers=frozenset({"new"}))
    committed = RoundCommitted(3, 0, ["a"], is_new=is_new, is_trained=True)
    after, action = step(replace(job, devices=devices), committed, 0.0)
    numbers = after.devices.restarting.num_restarts
    assert (numbers["a"] < 2.0) == is_new and numbers["b"] == 2.0
    assert after.devices.newcomers == set(), "they have a plan"
    assert action == RunRound(trains=False)


@pytest.mark.parametrize(
    ("planned", "has_failed", "retry", "limit", "is_retry_limit"),
    [
        ({}, False, 600.0, 60.0, False),
        ({0: ["a"]}, False, 600.0, 600.0, True),
        ({0: ["a"]}, False, 0.0, 60.0, False),
        ({}, True, 600.0, 600.0, True),
        ({}, True, 20.0, 20.0, True),
    ],
)
def test_job_waits_for_hosts_until_its_limit(
    planned: dict[int, list[str]],
    has_failed: bool,
    retry: float,
    limit: float,
    is_retry_limit: bool,
) -> None:
    tries = Tries(retry)
    if has_failed:
        tries = replace(tries, num_failures=1, first_failure_at=100.0)
    devices = JobDevices(newcomers=frozenset({"new"}))
    job, action = step(JobState(tries, 60.0, devices=devices), AttemptBegan(planned), 100.0)
    assert action == LookForHosts() and job.devices.all_used == {*planned.get(0, ())}
    for now in (100.0, 100.0 + limit):
        job, action = step(job, HostsSeen(None), now)
        assert action == WaitForHosts(100.0 + limit - now)
    stopped, action = step(job, HostsSeen(None), 101.0 + limit)
    assert action == StopWaiting(limit + 1.0, is_retry_limit)
    assert (job.devices.newcomers, stopped.devices.newcomers) == ({"new"}, set())
    _, action = step(job, HostsSeen({0: {"a": "1"}}), 101.0 + limit)
    assert action == Prepare(), "they come at the last moment"


def test_job_waits_no_longer_than_its_failures_allow(job: JobState) -> None:
    job = replace(job, tries=replace(job.tries, num_failures=1, first_failure_at=0.0))
    job = replace(job, phase=JobPhase.LOOKING, looks_since=590.0)
    _, action = step(job, HostsSeen(None), 595.0)
    assert action == WaitForHosts(5.0)


def test_job_waits_a_moment_for_devices_that_may_still_register(job: JobState) -> None:
    job = replace(job, phase=JobPhase.LOOKING)
    job = replace(job, devices=JobDevices(used={0: frozenset({"a", "b"})}))
    for lacks, registered, is_early, now, expected in (
        (True, ["a"], True, 0.0, WaitForHosts(60.0)),
        (True, ["a"], True, 61.0, Prepare()),
        (True, ["a"], False, 0.0, Prepare()),
        (True, ["a", "b"], True, 0.0, Prepare()),
        (False, ["a"], True, 0.0, Prepare()),
    ):
        _, action = step(job, HostsSeen({0: {"a": "1"}}, lacks, registered, is_early), now)
        assert action == expected


def test_devices_of_a_first_attempt_count_as_used_and_others_are_newcomers_later(
    job: JobState,
) -> None:
    first = prepared(job, lacks_devices=False)
    assert first.devices.used == {0: {"a"}}
    looking = replace(first, phase=JobPhase.LOOKING)
    later, _ = step(looking, HostsSeen({0: {"a": "1", "new": "1"}}), 0.0)
    assert later.devices.used == {0: {"a"}}


def test_clusters_that_have_failed_are_remembered(job: JobState) -> None:
    failing = FailingClusters({0: 2})
    lost = Failure(Kind.HOST_LOST)
    job, _ = step(job, AttemptFailed(lost, failing=failing), 0.0)
    assert job.failing == failing
    job, _ = step(job, AttemptFailed(lost), 0.0)
    assert job.failing == failing


def test_job_ends_with_its_evaluation(job: JobState) -> None:
    job, action = step(job, ModelEvaluated(), 0.0)
    assert (job.phase, action) == (JobPhase.ENDED, End())


def test_every_phase_but_the_end_may_fail_and_is_reached() -> None:
    fails = {phase for phase, event in TRANSITIONS if event is AttemptFailed}
    assert fails == set(JobPhase) - {JobPhase.ENDED}
    assert set[JobPhase]().union(*(case.to for case in TRANSITIONS.values())) == set(JobPhase)
