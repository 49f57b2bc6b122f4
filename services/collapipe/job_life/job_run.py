"""Decides what a job does from its start to its end: it looks for hosts, is prepared, runs rounds, and tries again after failures.

`step` takes what was observed, and returns the new state and what is to be done. `TRANSITIONS` has all cases. What happens within a
round is decided in `attempt.py`. A cluster is named by its index in the job.
"""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any

from collapipe.job_life import job_devices
from collapipe.job_life.failing_clusters import FailingClusters
from collapipe.job_life.job_devices import JobDevices, refuse_newcomers
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
"""Attempts without a plan before a repeated round may be decided anew although devices are missing."""


class JobPhase(Enum):
    """What a job is doing."""

    BETWEEN_ATTEMPTS = "no attempt runs"
    LOOKING = "the job looks for hosts, or waits for some"
    PREPARING = "clusters load their data, and the edge server makes the model"
    MEASURING = "hosts are measured"
    RUNNING = "a round runs"
    ENDED = "the job has ended"


@dataclass(frozen=True)
class JobState:
    """What a job remembers from one attempt to the next. Times are in seconds from any fixed start.

    Args:
        wait_seconds: How long the job waits for hosts before its first round.
        num_without_plan: Attempts in a row for which no plan was possible.
        looks_since: When the job began to look for hosts.
        has_planned: Whether a round was planned before this attempt. Then fewer devices than at first will do.
        lacks_devices: Whether the job does without devices that it asks for or has used before. They may soon be back.
        decides_anew: Whether a repeated round may get other micro-batches, slices and codecs in this attempt, if no plan fits otherwise.
    """

    tries: Tries
    wait_seconds: float
    phase: JobPhase = JobPhase.BETWEEN_ATTEMPTS
    devices: JobDevices = field(default_factory=JobDevices)
    failing: FailingClusters = field(default_factory=FailingClusters)
    num_without_plan: int = 0
    looks_since: float = 0.0
    has_planned: bool = False
    lacks_devices: bool = False
    decides_anew: bool = True


# --- what is observed


@dataclass(frozen=True)
class AttemptBegan:
    """An attempt has begun.

    Args:
        planned: The devices of the last round that was planned, by cluster; none before the first round.
    """

    planned: Mapping[int, Collection[str]]


@dataclass(frozen=True)
class HostsSeen:
    """The job has looked for hosts.

    Args:
        processes: The processes of the devices that can take part, by cluster and host id. `None` if the job cannot run with the hosts
            that are there.
        lacks_devices: As in `JobState`.
        may_register: Whether the scheduler was started a moment ago, and hosts that the job has used have not registered since.
    """

    processes: Mapping[int, Mapping[str, str]] | None
    lacks_devices: bool
    may_register: bool


@dataclass(frozen=True)
class Prepared:
    """The data are loaded, and the model is there."""


@dataclass(frozen=True)
class Measured:
    """All hosts are measured.

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
    """The attempt has failed, or the job was cancelled.

    Args:
        unreached: The processes of devices that others could not reach, by host id.
        failing: The clusters that have failed; `None` if no round has begun.
    """

    failure: Failure
    unreached: Mapping[str, str] = field(default_factory=dict)
    failing: FailingClusters | None = None


Event = (
    AttemptBegan | HostsSeen | Prepared | Measured | RoundCommitted | ModelEvaluated | AttemptFailed
)


# --- what is done


@dataclass(frozen=True)
class BeginAttempt:
    """Wait, then begin an attempt. Answer: `AttemptBegan`.

    Args:
        refused: Newcomers that are left out from now on, because no plan was possible with them.
    """

    wait_seconds: float = 0.0
    refused: frozenset[str] = frozenset()


@dataclass(frozen=True)
class LookForHosts:
    """Look for the hosts of the job. Answer: `HostsSeen`."""


@dataclass(frozen=True)
class WaitForHosts:
    """Wait a moment, then look again. Answer: `HostsSeen`.

    Args:
        seconds_left: How long the job still waits.
    """

    seconds_left: float


@dataclass(frozen=True)
class StopWaiting:
    """The hosts that are missing did not come in time. Answer: `AttemptFailed`.

    Args:
        waited_seconds: How long the job has waited.
        limit_seconds: How long it may wait.
        tries_again: Whether the limit is that of tries after a failure.
    """

    waited_seconds: float
    limit_seconds: float
    tries_again: bool


@dataclass(frozen=True)
class Prepare:
    """Let the clusters load their data, and the edge server make the model. Answer: `Prepared`."""


@dataclass(frozen=True)
class Measure:
    """Measure the hosts that are not known yet. Answer: `Measured`."""


@dataclass(frozen=True)
class RunRound:
    """Run a round, or evaluate the final model. Answer: `RoundCommitted` or `ModelEvaluated`."""

    trains: bool


@dataclass(frozen=True)
class End:
    """The job ends.

    Args:
        gives_up: Why it does not try again; `None` if it has succeeded.
        refused: As in `BeginAttempt`.
    """

    gives_up: GivesUp | None = None
    refused: frozenset[str] = frozenset()


Action = (
    BeginAttempt | LookForHosts | WaitForHosts | StopWaiting | Prepare | Measure | RunRound | End
)

Result = tuple[JobState, Action]


def step(job: JobState, event: Event, now: float) -> Result:
    """Returns the state after an event, and what is to be done. Any action may fail, which `AttemptFailed` says.

    Args:
        now: Seconds from any fixed start.

    Raises:
        KeyError: The event cannot happen in this phase.
    """
    return TRANSITIONS[job.phase, type(event)].decide(job, event, now)


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
    if event.processes is not None:
        job = replace(job, lacks_devices=event.lacks_devices)
        if not (event.lacks_devices and event.may_register):
            return _prepare(job, event.processes)
    limit, retry = job.wait_seconds, job.tries.limit_seconds
    tries_again = job.tries.num_failures > 0 or (job.has_planned and retry > limit)
    if tries_again:
        limit = retry
    waited = now - job.looks_since
    left = min(limit - waited, job.tries.seconds_left(now))
    if left >= 0:
        return job, WaitForHosts(left)
    # The newcomers are not the reason.
    devices = replace(job.devices, newcomers=frozenset())
    return replace(job, devices=devices), StopWaiting(waited, limit, tries_again)


def _prepare(job: JobState, processes: Mapping[int, Mapping[str, str]]) -> Result:
    all_processes = {id: process for of in processes.values() for id, process in of.items()}
    # Devices that it has not used before are newcomers in its next round.
    used = {} if job.devices.used else {index: list(of) for index, of in processes.items()}
    preparing = replace(
        job,
        phase=JobPhase.PREPARING,
        devices=job_devices.use(job.devices, used, all_processes),
        decides_anew=not job.lacks_devices or job.num_without_plan > _PATIENT_FAILURES,
    )
    return preparing, Prepare()


def _prepared(job: JobState, event: Prepared, now: float) -> Result:
    return replace(job, phase=JobPhase.MEASURING), Measure()


def _measured(job: JobState, event: Measured, now: float) -> Result:
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
    failure, devices, refused = event.failure, job.devices, frozenset[str]()
    if failure.kind is Kind.NOT_FINITE and failure.host_id:
        devices = replace(devices, not_finite=devices.not_finite | {failure.host_id})
    devices = replace(devices, unreached={**devices.unreached, **event.unreached})
    has_no_plan = failure.kind in (Kind.NO_PLAN, Kind.INVALID)
    if has_no_plan and devices.newcomers:
        refused = devices.newcomers
        devices = refuse_newcomers(devices)
        failure = replace(failure, kind=Kind.PASSING)
    devices = replace(devices, takes_suspects=has_no_plan and failure.lacks_hosts)
    tries, then = after_failure(job.tries, failure, now)
    failed = replace(
        job,
        phase=JobPhase.BETWEEN_ATTEMPTS if isinstance(then, Again) else JobPhase.ENDED,
        tries=tries,
        devices=devices,
        failing=event.failing or job.failing,
        num_without_plan=job.num_without_plan + has_no_plan,
    )
    if isinstance(then, Again):
        return failed, BeginAttempt(then.wait_seconds, refused)
    return failed, End(then, refused)


@dataclass(frozen=True)
class Transition:
    """What an event does in a phase.

    Args:
        to: The phases that may follow.
    """

    decide: Callable[[JobState, Any, float], Result]
    to: frozenset[JobPhase]


_BETWEEN, _LOOKING, _RUNNING = JobPhase.BETWEEN_ATTEMPTS, JobPhase.LOOKING, JobPhase.RUNNING
_FAILURE = Transition(_failed, frozenset((_BETWEEN, JobPhase.ENDED)))

TRANSITIONS: Mapping[tuple[JobPhase, type], Transition] = {
    (_BETWEEN, AttemptBegan): Transition(_began, frozenset((_LOOKING,))),
    (_BETWEEN, AttemptFailed): _FAILURE,
    (_LOOKING, HostsSeen): Transition(_seen, frozenset((_LOOKING, JobPhase.PREPARING))),
    (_LOOKING, AttemptFailed): _FAILURE,
    (JobPhase.PREPARING, Prepared): Transition(_prepared, frozenset((JobPhase.MEASURING,))),
    (JobPhase.PREPARING, AttemptFailed): _FAILURE,
    (JobPhase.MEASURING, Measured): Transition(_measured, frozenset((_RUNNING,))),
    (JobPhase.MEASURING, AttemptFailed): _FAILURE,
    (_RUNNING, RoundCommitted): Transition(_committed, frozenset((_RUNNING,))),
    (_RUNNING, ModelEvaluated): Transition(_evaluated, frozenset((JobPhase.ENDED,))),
    (_RUNNING, AttemptFailed): _FAILURE,
}
"""All cases, by phase and event."""
