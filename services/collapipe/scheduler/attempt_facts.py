"""Turns the messages and settings of a job into the plain facts with which `job_life` decides."""

from collapipe.job import JobConfig
from collapipe.job_life.attempt import AttemptRules
from collapipe.job_life.attempt_events import Committed
from collapipe.job_life.commits import Commits
from collapipe.job_life.round_clusters import RoundRules
from collapipe.v1 import plan_pb2, scheduler_pb2


def attempt_rules(job: JobConfig, edge_server: scheduler_pb2.Host, attempt: int) -> AttemptRules:
    """Returns what a job says about the rounds of an attempt."""
    schedule = job.schedule
    clusters = RoundRules(
        job.clusters,
        schedule.min_clusters,
        schedule.round_deadline_seconds if job.has_deadline else None,
        may_leave_out=job.may_leave_out_clusters,
        ends_early=schedule.late_clusters == "end_early",
    )
    return AttemptRules(
        clusters,
        job.training.replicate_every,
        job.training.evaluate_every,
        is_masked=job.averaging.secure,
        is_private=job.privacy.is_on,
        edge_server=edge_server.host_id,
        edge_process=edge_server.incarnation,
        is_retry=attempt > 0,
    )


def name_of(commit: plan_pb2.Commit) -> tuple[int, int]:
    """Returns the attempt and the number of rounds of a commit."""
    return commit.attempt, commit.num_rounds


def candidate_of(commit: plan_pb2.Commit) -> tuple[int, int] | None:
    """Returns the name of the candidate of a commit, if it has one."""
    return name_of(commit.candidate) if commit.HasField("candidate") else None


def committed(commit: plan_pb2.Commit) -> Committed:
    """Returns what a commit that was made means for the attempt."""
    return Committed(name_of(commit), candidate_of(commit))


def commits_of(last: plan_pb2.Commit) -> Commits:
    """Returns which commits the edge server keeps, from the last one."""
    return Commits(
        name_of(last),
        last.restore_point.num_rounds,
        last.anew_since,
        frozenset(commit.num_rounds for commit in (last, *last.history)),
    )
