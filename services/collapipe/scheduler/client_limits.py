"""What one client may cost the scheduler: how large its jobs are, and how many of them wait."""

from collections.abc import Iterable

from collapipe.errors import InfeasibleError, InvalidInputError
from collapipe.job import JobConfig
from collapipe.scheduler.job_documents import JobDocument
from collapipe.v1 import scheduler_pb2

MOST_JOB_BYTES = 256 << 10
"""Largest job file as JSON. Each job is kept in memory several times."""

MOST_WAITING_JOBS = 32
"""Most jobs of one client that wait for their turn."""


def read_job(config_json: str) -> JobConfig:
    """Reads the job file in a request.

    Raises:
        InvalidInputError: It is too large, as it was sent or with all defaults, or it is no job.
    """
    _check_size(config_json)
    config = JobConfig.from_json(config_json)
    _check_size(config.to_json())
    return config


def check_may_wait(owner: str, jobs: Iterable[JobDocument]) -> None:
    """Raises `InfeasibleError` if a client has so many jobs in the queue that no other may join them.

    Args:
        owner: The client, as the owner of its jobs.
        jobs: All jobs.
    """
    queued = scheduler_pb2.JOB_STATE_QUEUED
    waiting = sum(job.state == queued and job.owner == owner for job in jobs)
    if waiting >= MOST_WAITING_JOBS:
        raise InfeasibleError(
            f"{owner or 'everybody together'} has {waiting} jobs that wait for their turn, and at most {MOST_WAITING_JOBS} may: submit "
            "this one when another has begun, or cancel one (`collapipe jobs cancel JOB`)"
        )


def _check_size(config_json: str) -> None:
    num_bytes = len(config_json.encode())
    if num_bytes > MOST_JOB_BYTES:
        raise InvalidInputError(
            f"the job file has {num_bytes} bytes as JSON, and at most {MOST_JOB_BYTES} are allowed: shorten its lists and texts"
        )
