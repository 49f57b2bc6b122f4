"""Decides what follows when an attempt at a job fails, or when it commits a round."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace

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


@dataclass(frozen=True)
class JobState:
    """What a job remembers from one attempt to the next.

    Args:
        num_without_plan: Attempts in a row for which no plan was possible.
    """

    tries: Tries
    devices: JobDevices = field(default_factory=JobDevices)
    failing: FailingClusters = field(default_factory=FailingClusters)
    num_without_plan: int = 0

    def decides_anew(self, *, lacks_devices: bool) -> bool:
        """Returns whether a repeated round may get other micro-batches, slices and codecs if no plan fits otherwise.

        Args:
            lacks_devices: Whether it does without devices that it asks for or has used before. They may soon be back.
        """
        return not lacks_devices or self.num_without_plan > _PATIENT_FAILURES


@dataclass(frozen=True)
class AfterFailure:
    """What follows a failed attempt.

    Args:
        refused: Newcomers that are left out from now on, because no plan was possible with them.
    """

    then: Again | GivesUp
    refused: frozenset[str] = frozenset()


def attempt_failed(
    job: JobState, failure: Failure, unreached: Mapping[str, str], now: float
) -> tuple[JobState, AfterFailure]:
    """Returns the state after a failed attempt, and what follows.

    Args:
        unreached: The processes of devices that others could not reach, by host id.
    """
    devices, refused = job.devices, frozenset[str]()
    if failure.kind is Kind.NOT_FINITE and failure.host_id:
        devices = replace(devices, not_finite=devices.not_finite | {failure.host_id})
    devices = replace(devices, unreached={**devices.unreached, **unreached})
    has_no_plan = failure.kind in (Kind.NO_PLAN, Kind.INVALID)
    if has_no_plan and devices.newcomers:
        refused = devices.newcomers
        devices = refuse_newcomers(devices)
        failure = replace(failure, kind=Kind.PASSING)
    devices = replace(devices, takes_suspects=has_no_plan and failure.lacks_hosts)
    tries, then = after_failure(job.tries, failure, now)
    number = job.num_without_plan + has_no_plan
    failed = replace(job, tries=tries, devices=devices, num_without_plan=number)
    return failed, AfterFailure(then, refused)


def round_committed(
    job: JobState,
    num_rounds: int,
    num_restorable: int,
    host_ids: Collection[str],
    *,
    is_new: bool,
) -> JobState:
    """Returns the state after a commit.

    Args:
        num_rounds: How many rounds are committed now.
        num_restorable: How many the restore point has.
        host_ids: The devices of the round.
        is_new: Whether the job has never had so many rounds.
    """
    devices = replace(job.devices, newcomers=frozenset())
    if is_new:
        devices = replace(devices, restarting=after_new_round(devices.restarting, host_ids))
    tries = after_commit(job.tries, num_rounds, num_restorable)
    return replace(job, tries=tries, devices=devices, num_without_plan=0)
