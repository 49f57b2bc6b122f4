"""Decides what a job does from its start to its end: it looks for hosts, sets them up, runs rounds, and tries again after failures.

`step` takes what was observed, and returns the new state and what is to be done. `TRANSITIONS` has all cases. What happens within a
round is decided in `attempt.py`. A cluster is named by its index in the job.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from enum import Enum

from collapipe.job_life import job_devices
from collapipe.job_life.failing_clusters import FailingClusters
from collapipe.job_life.job_devices import JobDevices, refuse_newcomers
from collapipe.job_life.machine import transitions
from collapipe.job_life.restarting_devices import after_new_round
from collapipe.job_life.tries import (
    Again,
    Failure,
    GivesUp,
    Kind,
    Tries,
    after_commit,
    after_failure,
)

_PATIENT_FAILURES = 4
"""After more attempts without a plan than this, a repeated round may be decided anew, even if devices are missing."""


class JobPhase(Enum):
    """What a job is doing."""

    BETWEEN_ATTEMPTS = "an attempt is about to begin"
    LOOKING = "the job looks for hosts, or waits for some"
    PREPARING = "the attempt is being set up"
    RUNNING = "a round runs, or the final model is evaluated"
    ENDED = "the job has ended"


@dataclass(frozen=True)
class JobState:
    """What a job remembers from one attempt to the next. Times are in seconds from any fixed start.

    Args:
        wait_for_hosts_seconds: How long the job waits for its first hosts. After a planned round, it waits for at least
            `tries.limit_seconds`; after a failure, for exactly that.
        num_without_plan: Attempts since the last commit for which no plan was possible.
        looks_since: When the job began to look for hosts.
        has_planned: Whether a round was planned before this attempt. Then fewer devices than at first will do.
        decides_anew: Whether a repeated round may get other micro-batches, slices and codecs in this attempt, if no plan fits otherwise.
    """

    tries: Tries
    wait_for_hosts_seconds: float
    phase: JobPhase = JobPhase.BETWEEN_ATTEMPTS
    devices: JobDevices = field(default_factory=JobDevices)
    failing: FailingClusters = field(default_factory=FailingClusters)
    num_without_plan: int = 0
    looks_since: float = 0.0
    has_planned: bool = False
    decides_anew: bool = True


# --- what is observed


@dataclass(frozen=True)
class AttemptBegan:
    """An attempt has begun.

    Args:
        planned: The hosts of the last round that was planned, by cluster; none before the first round.
    """

    planned: Mapping[int, Collection[str]]


@dataclass(frozen=True)
class HostsSeen:
    """The job has looked for hosts.

    Args:
        processes: The processes of the devices that can take part, by cluster and host id. `None` if the job cannot run with the hosts
            that are there.
        lacks_devices: As `Failure.lacks_hosts`. The devices may soon be back.
        registered: Ids of the hosts that have registered since the scheduler was started.
        is_early: Whether the scheduler began with the job less than 10 s ago. After its restart, hosts register again one by one.
    """

    processes: Mapping[int, Mapping[str, str]] | None
    lacks_devices: bool = False
    registered: Collection[str] = ()
    is_early: bool = False


@dataclass(frozen=True)
class Prepared:
    """The data are loaded, the hosts are measured, and it is known from which commit the attempt goes on.

    Args:
        is_trained: Whether no round is left to train.
    """

    is_trained: bool


@dataclass(frozen=True)
class RoundCommitted:
    """A round is committed.

    Args:
        num_rounds: How many rounds are committed now.
        num_restorable: How many the restore point has.
        host_ids: The devices of the round.
        is_new: Whether the job has never had so many rounds.
        is_trained: Whether no round is left to train.
    """

    num_rounds: int
    num_restorable: int
    host_ids: Collection[str]
    is_new: bool
    is_trained: bool


@dataclass(frozen=True)
class ModelEvaluated:
    """The final model is evaluated."""


@dataclass(frozen=True)
class AttemptFailed:
    """The attempt has failed, or could not begin.

    Args:
        unreached: The processes of devices that others could not reach, by host id.
        failing: The clusters that have failed; `None` if the attempt had no rounds.
    """

    failure: Failure
    unreached: Mapping[str, str] = field(default_factory=dict)
    failing: FailingClusters | None = None


Event = AttemptBegan | HostsSeen | Prepared | RoundCommitted | ModelEvaluated | AttemptFailed


# --- what is done


@dataclass(frozen=True)
class BeginAttempt:
    """Wait, then begin an attempt. Answer: `AttemptBegan`."""

    wait_seconds: float = 0.0


@dataclass(frozen=True)
class LookForHosts:
    """Look for the hosts of the job. Answer: `HostsSeen`."""


@dataclass(frozen=True)
class WaitForHosts:
    """Wait, then look again. Answer: `HostsSeen`.

    Args:
        seconds_left: How long the job still waits.
    """

    seconds_left: float


@dataclass(frozen=True)
class StopWaiting:
    """Stop waiting, because missing hosts did not come in time. Answer: `AttemptFailed`.

    Args:
        waited_seconds: How long the job has waited.
        is_retry_limit: Whether the time to try again is over, and not only the time to wait for hosts.
    """

    waited_seconds: float
    is_retry_limit: bool


@dataclass(frozen=True)
class Prepare:
    """Set up the attempt: the clusters load their data, and the edge server makes the model. Then measure the hosts, and go to the commit
    from which the attempt goes on. Answer: `Prepared`."""


@dataclass(frozen=True)
class RunRound:
    """Run a round, or evaluate the final model. Answer: `RoundCommitted` or `ModelEvaluated`."""

    trains: bool


@dataclass(frozen=True)
class End:
    """The job ends.

    Args:
        gives_up: Why it does not try again; `None` if it has succeeded.
    """

    gives_up: GivesUp | None = None


Action = BeginAttempt | LookForHosts | WaitForHosts | StopWaiting | Prepare | RunRound | End

Result = tuple[JobState, Action]


def step(job: JobState, event: Event, now: float) -> Result:
    """Returns the state after an event, and what is to be done. If that fails, the next event is `AttemptFailed`.

    Args:
        now: Seconds from any fixed start.

    Raises:
        KeyError: The event cannot happen in this phase.
    """
    result: Result = TRANSITIONS[job.phase, type(event)].decide(job, event, now)
    return result


def _began(job: JobState, event: AttemptBegan, now: float) -> Result:
    looking = replace(
        job,
        phase=JobPhase.LOOKING,
        devices=job_devices.use(job.devices, event.planned, {}),
        looks_since=now,
        has_planned=bool(event.planned),
    )
    return looking, LookForHosts()


def _seen(job: JobState, event: HostsSeen, now: float) -> Result:
    waited, wait, retry = now - job.looks_since, job.wait_for_hosts_seconds, job.tries.limit_seconds
    has_failed = job.tries.num_failures > 0
    is_retry_limit = has_failed or (job.has_planned and retry > wait)
    left = (retry if is_retry_limit else wait) - waited
    if has_failed:
        left = job.tries.seconds_left(now)
    may_register = event.is_early and not job.devices.all_used <= set(event.registered)
    if event.processes is not None and not (event.lacks_devices and may_register and left >= 0):
        return _prepare(job, event.processes, lacks_devices=event.lacks_devices)
    if left >= 0:
        return job, WaitForHosts(left)
    # Hosts are missing, so no new device is to blame. Otherwise, `_failed` would refuse the new devices.
    devices = replace(job.devices, newcomers=frozenset())
    return replace(job, devices=devices), StopWaiting(waited, is_retry_limit)


def _prepare(
    job: JobState, processes: Mapping[int, Mapping[str, str]], *, lacks_devices: bool
) -> Result:
    all_processes = {id: process for of in processes.values() for id, process in of.items()}
    # Only the first devices of a job count as used from here on. Others are newcomers until the next commit.
    used = {} if job.devices.used else {index: list(of) for index, of in processes.items()}
    preparing = replace(
        job,
        phase=JobPhase.PREPARING,
        devices=job_devices.use(job.devices, used, all_processes),
        decides_anew=not lacks_devices or job.num_without_plan > _PATIENT_FAILURES,
    )
    return preparing, Prepare()


def _prepared(job: JobState, event: Prepared, now: float) -> Result:
    return replace(job, phase=JobPhase.RUNNING), RunRound(trains=not event.is_trained)


def _committed(job: JobState, event: RoundCommitted, now: float) -> Result:
    devices = replace(job.devices, newcomers=frozenset())
    if event.is_new:
        devices = replace(devices, restarting=after_new_round(devices.restarting, event.host_ids))
    tries = after_commit(job.tries, event.num_rounds, event.num_restorable)
    job = replace(job, tries=tries, devices=devices, num_without_plan=0)
    return job, RunRound(trains=not event.is_trained)


def _evaluated(job: JobState, event: ModelEvaluated, now: float) -> Result:
    return replace(job, phase=JobPhase.ENDED), End()


def _failed(job: JobState, event: AttemptFailed, now: float) -> Result:
    failure, devices = event.failure, job.devices
    if failure.kind is Kind.NOT_FINITE and failure.host_id:
        devices = replace(devices, not_finite=devices.not_finite | {failure.host_id})
    devices = replace(devices, unreached={**devices.unreached, **event.unreached})
    has_no_plan = failure.kind in (Kind.NO_PLAN, Kind.INVALID)
    if has_no_plan and devices.newcomers:
        devices = refuse_newcomers(devices)
        failure = replace(failure, kind=Kind.PASSING)
    devices = replace(devices, takes_doubtful=has_no_plan and failure.lacks_hosts)
    tries, then = after_failure(job.tries, failure, now)
    failed = replace(
        job,
        phase=JobPhase.BETWEEN_ATTEMPTS if isinstance(then, Again) else JobPhase.ENDED,
        tries=tries,
        devices=devices,
        failing=job.failing if event.failing is None else event.failing,
        num_without_plan=job.num_without_plan + has_no_plan,
    )
    if isinstance(then, Again):
        return failed, BeginAttempt(then.wait_seconds)
    return failed, End(then)


_BETWEEN, _LOOKING, _PREPARING = JobPhase.BETWEEN_ATTEMPTS, JobPhase.LOOKING, JobPhase.PREPARING
_RUNNING, _ENDED = JobPhase.RUNNING, JobPhase.ENDED

TRANSITIONS = transitions(
    (
        (_BETWEEN, AttemptBegan, _began, (_LOOKING,)),
        (_BETWEEN, AttemptFailed, _failed, (_BETWEEN, _ENDED)),
        (_LOOKING, HostsSeen, _seen, (_LOOKING, _PREPARING)),
        (_LOOKING, AttemptFailed, _failed, (_BETWEEN, _ENDED)),
        (_PREPARING, Prepared, _prepared, (_RUNNING,)),
        (_PREPARING, AttemptFailed, _failed, (_BETWEEN, _ENDED)),
        (_RUNNING, RoundCommitted, _committed, (_RUNNING,)),
        (_RUNNING, ModelEvaluated, _evaluated, (_ENDED,)),
        (_RUNNING, AttemptFailed, _failed, (_BETWEEN, _ENDED)),
    )
)
"""All cases, by phase and event."""
