"""What the scheduler keeps of jobs: one document a job, one a round. Survives restarts."""

import logging
import re
import threading
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from google.protobuf import json_format

from collapipe.documents import read_document, write_document
from collapipe.errors import CorruptDataError, InvalidInputError, NotFoundError
from collapipe.job import JobConfig
from collapipe.v1 import job_pb2, plan_pb2, scheduler_pb2

logger = logging.getLogger(__name__)

_UNFINISHED = (
    scheduler_pb2.JOB_STATE_QUEUED,
    scheduler_pb2.JOB_STATE_PREPARING,
    scheduler_pb2.JOB_STATE_RUNNING,
)


@dataclass
class JobDocument:
    """A job so far."""

    job_id: str
    number: int
    """Jobs of this scheduler before this one."""
    config_json: str
    state: scheduler_pb2.JobState = scheduler_pb2.JOB_STATE_QUEUED
    message: str = ""
    num_rounds_committed: int = 0
    labels: list[str] = field(default_factory=list)
    vocabulary_digest: str = ""
    evaluation: job_pb2.Evaluation | None = None

    @property
    def job(self) -> JobConfig:
        """The parsed job."""
        return JobConfig.from_json(self.config_json)

    def status(self) -> scheduler_pb2.JobStatus:
        """The job as others see it."""
        job = self.job
        return scheduler_pb2.JobStatus(
            job_id=self.job_id,
            state=self.state,
            message=self.message,
            num_rounds_committed=self.num_rounds_committed,
            num_rounds=job.training.rounds,
            name=job.name,
            evaluation=self.evaluation,
        )


@dataclass(frozen=True)
class RecordedAttempt:
    """One attempt at a round, as it was recorded before it began."""

    attempt: int
    plans: Sequence[plan_pb2.Plan]


class JobStore:
    """The jobs of a scheduler.

    Args:
        directory: Survives restarts.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory / "jobs"
        self._lock = threading.Lock()
        self._jobs: dict[str, JobDocument] = {}
        for path in self._directory.glob("*/job.json"):
            document = read_document(path)
            if document is not None:
                job = _from_document(document)
                if job.state in _UNFINISHED:  # it ended with the scheduler that ran it
                    job.state = scheduler_pb2.JOB_STATE_FAILED
                    job.message = "the scheduler ended while the job ran: resume it"
                self._jobs[job.job_id] = job

    def create(self, config: JobConfig) -> JobDocument:
        """Makes a new job."""
        with self._lock:
            job_id = f"{config.name}-{uuid.uuid4().hex[:8]}"
            document = JobDocument(job_id, len(self._jobs), config.to_json())
            self._jobs[job_id] = document
        self.save(document)
        return document

    def reopen(self, config: JobConfig) -> JobDocument:
        """Finds the last job of a name, to be continued.

        Raises:
            NotFoundError: There is none.
            InvalidInputError: The job is another one by now: what was trained cannot be continued as it says.
        """
        jobs = [document for document in self.all() if document.job.name == config.name]
        if not jobs:
            raise NotFoundError(
                f"there is no job named {config.name!r} to resume: run it without --resume first"
            )
        document = jobs[-1]
        if document.state in _UNFINISHED:
            raise InvalidInputError(
                f"job {document.job_id} is still running: wait for it or cancel it"
            )
        changed = _changes(document.job, config)
        if changed:
            raise InvalidInputError(
                f"job {document.job_id} cannot be resumed with other values of {', '.join(changed)}: give it the "
                "old ones, or start a new job (rounds, evaluation and the schedule may change)"
            )
        document.config_json = config.to_json()
        document.state, document.message = scheduler_pb2.JOB_STATE_QUEUED, ""
        self.save(document)
        return document

    def all(self) -> list[JobDocument]:
        """Every job, oldest first."""
        with self._lock:
            return sorted(self._jobs.values(), key=lambda document: document.number)

    def get(self, job_id: str) -> JobDocument:
        """One job; raises `NotFoundError`."""
        with self._lock:
            if job_id not in self._jobs:
                raise NotFoundError(
                    f"there is no job {job_id!r}: see `collapipe status` for those there are"
                )
            return self._jobs[job_id]

    def save(self, document: JobDocument) -> None:
        """Makes the present content of a document durable."""
        content = {
            "job_id": document.job_id,
            "number": document.number,
            "config_json": document.config_json,
            "state": scheduler_pb2.JobState.Name(document.state),
            "message": document.message,
            "num_rounds_committed": document.num_rounds_committed,
            "labels": document.labels,
            "vocabulary_digest": document.vocabulary_digest,
            "evaluation": _to_dict(document.evaluation) if document.evaluation else None,
        }
        write_document(self._directory / document.job_id / "job.json", content)

    def begin_attempt(
        self,
        job_id: str,
        round_index: int,
        make_plans: Callable[[list[int] | None], tuple[Sequence[plan_pb2.Plan], dict[str, Any]]],
    ) -> RecordedAttempt:
        """Records the plans of a new attempt at a round before it begins.

        Args:
            job_id: The job.
            round_index: The round.
            make_plans: Makes the plans, and the document of the decision; is given the micro-batches of each
                cluster in the first attempt, which a retry keeps.
        """
        path = self._round_path(job_id, round_index)
        before = read_document(path)
        replayed = [plan["num_micro_batches"] for plan in before["plans"]] if before else None
        plans, decision = make_plans(replayed)
        recorded = RecordedAttempt(before["attempt"] + 1 if before else 0, plans)
        document = {
            "attempt": recorded.attempt,
            "plans": [_to_dict(plan) for plan in plans],
            "decision": decision,
        }
        write_document(path, document)
        return recorded

    def plans(self, job_id: str, round_index: int) -> list[plan_pb2.Plan]:
        """The plans of a round's last attempt; raises `NotFoundError`."""
        plans = self._round(job_id, round_index)["plans"]
        return [json_format.ParseDict(plan, plan_pb2.Plan()) for plan in plans]

    def decision(self, job_id: str, round_index: int) -> dict[str, Any]:
        """What a round's last attempt was decided on, and how; raises `NotFoundError`."""
        document: dict[str, Any] | None = self._round(job_id, round_index).get("decision")
        if document is None:
            raise NotFoundError(
                f"round {round_index + 1} of job {job_id} was planned by an older version, which kept no reasons"
            )
        return document

    def save_planner(self, job_id: str, document: dict[str, Any]) -> None:
        """Makes what the planner has learnt durable."""
        write_document(self._directory / job_id / "planner.json", document)

    def planner(self, job_id: str) -> dict[str, Any] | None:
        """What the planner had learnt; `None` before the first commit, or when it cannot be read any more."""
        try:
            return read_document(self._directory / job_id / "planner.json")
        except CorruptDataError as error:
            logger.warning("the hosts are profiled anew: %s", error)
            return None

    def _round(self, job_id: str, round_index: int) -> dict[str, Any]:
        self.get(job_id)
        document = read_document(self._round_path(job_id, round_index))
        if document is None:
            raise NotFoundError(
                f"round {round_index + 1} of job {job_id} was not planned yet: rounds are counted from 1"
            )
        if not isinstance(document.get("plans"), list):
            raise CorruptDataError(
                f"{self._round_path(job_id, round_index)} holds no plans: restore it"
            )
        return document

    def _round_path(self, job_id: str, round_index: int) -> Path:
        return self._directory / job_id / "rounds" / f"{round_index:06d}.json"


def _changes(before: JobConfig, after: JobConfig) -> list[str]:
    """Which settings differ that decide what the model is and what it learns from."""
    free = re.compile(r"schedule\..*|training\.(rounds|evaluate_every)|data\.max_held_out_rows")
    if after.training.update_per == "micro_batch":  # then it decides how many steps the job has
        free = re.compile(
            free.pattern.replace(r"schedule\..*", r"schedule\.(?!num_micro_batches).*")
        )
    flat_before, flat_after = _flatten(before.model_dump()), _flatten(after.model_dump())
    keys = sorted(flat_before.keys() | flat_after.keys())
    return [
        key
        for key in keys
        if flat_before.get(key) != flat_after.get(key) and not free.fullmatch(key)
    ]


def _flatten(section: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in section.items():
        if isinstance(value, dict):
            flat |= _flatten(value, f"{prefix}{key}.")
        else:
            flat[prefix + key] = value
    return flat


def _to_dict(message: Any) -> dict[str, Any]:
    result: dict[str, Any] = json_format.MessageToDict(message, preserving_proto_field_name=True)
    return result


def _from_document(document: dict[str, Any]) -> JobDocument:
    evaluation = document["evaluation"]
    return JobDocument(
        job_id=document["job_id"],
        number=document["number"],
        config_json=document["config_json"],
        state=cast("scheduler_pb2.JobState", scheduler_pb2.JobState.Value(document["state"])),
        message=document["message"],
        num_rounds_committed=document["num_rounds_committed"],
        labels=document["labels"],
        vocabulary_digest=document["vocabulary_digest"],
        evaluation=json_format.ParseDict(evaluation, job_pb2.Evaluation()) if evaluation else None,
    )
