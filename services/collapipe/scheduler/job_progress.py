"""What a job has reached: its document on the disk, and the events that clients watch."""

import logging
from typing import Any

from collapipe.database import NOT_STORED
from collapipe.planning.job_warnings import FlatLoss, OneAnswer, WaitingDevices
from collapipe.planning.planner_state import PlannerState
from collapipe.scheduler.events import Event, EventLog
from collapipe.scheduler.host_registry import timestamp_after
from collapipe.scheduler.job_documents import JobDocument, RoundResult
from collapipe.scheduler.job_store import JobStore
from collapipe.telemetry import metrics
from collapipe.v1 import job_pb2, plan_pb2, scheduler_pb2

logger = logging.getLogger(__name__)


class JobProgress:
    """The progress of one job, which every change stores."""

    def __init__(self, document: JobDocument, jobs: JobStore, events: EventLog) -> None:
        self.document = document
        self.job = document.job
        self.spec = job_pb2.JobSpec(job_id=document.job_id, config_json=document.config_json)
        self.jobs = jobs
        self._events = events
        self._stored: tuple[int, str] | None = None
        self._warned: set[int] = set()
        self._one_answer, self._flat_loss, self._waiting = OneAnswer(), FlatLoss(), WaitingDevices()

    @property
    def job_id(self) -> str:
        return self.document.job_id

    def publish(self, **event: Any) -> None:
        """Tells those who watch the job of one event, which is the only argument."""
        self._events.publish(Event(**event))

    def tell(self, code: scheduler_pb2.IncidentCode, message: str, *host_ids: str) -> None:
        """Publishes and logs that something failed or recovered.

        Args:
            host_ids: The hosts that it is about.
        """
        incident = scheduler_pb2.Incident(
            code=code, message=message, host_ids=host_ids, time=timestamp_after(0)
        )
        name = scheduler_pb2.IncidentCode.Name(code).removeprefix("INCIDENT_CODE_")
        extra = {"code": name, "job_id": self.job_id, "host_ids": list(host_ids)}
        logger.warning("%s job %s: %s", name, self.job_id, message, extra=extra)
        self.publish(incident=incident)

    def warn(self, warning: scheduler_pb2.JobWarning | None) -> None:
        """Publishes and logs a warning, if there is one, unless one of its code was told before."""
        if warning is None or self.has_warned(warning.code):
            return
        self._warned.add(warning.code)
        name = scheduler_pb2.WarningCode.Name(warning.code).removeprefix("WARNING_CODE_")
        logger.warning("%s job %s: %s: %s", name, self.job_id, warning.message, warning.advice)
        self.publish(warning=warning)

    def has_warned(self, code: scheduler_pb2.WarningCode) -> bool:
        """Returns whether a warning of this code was told before."""
        return code in self._warned

    def set_trouble(self, trouble: scheduler_pb2.JobTrouble) -> None:
        """Takes what the job lacks now, and publishes it if more than its times has changed."""
        before, self.document.trouble = self.document.trouble, trouble
        if _without_times(before) != _without_times(trouble):
            self.publish(status=self.document.status())

    def set_state(self, state: scheduler_pb2.JobState, message: str) -> None:
        """Publishes and stores a state, unless it is the present one."""
        if self._stored == (state, message):
            return
        self.document.state, self.document.message = state, message
        self.publish(status=self.document.status())
        self.save()
        self._stored = state, message

    def say(self, message: str) -> None:
        """Publishes a message beside the present state, unless it is the present one. It is not stored: a restarted scheduler
        looks again."""
        if message != self.document.message:
            self.document.message = message
            self.publish(status=self.document.status())

    def end(self, state: scheduler_pb2.JobState, message: str) -> None:
        """Sets the final state. Clients see it even if a full disk prevents storing it."""
        self.document.trouble = scheduler_pb2.JobTrouble()
        outcome = scheduler_pb2.JobState.Name(state).removeprefix("JOB_STATE_").lower()
        metrics.JOBS_ENDED.labels(outcome).inc()
        self.jobs.note_end(self.document)
        try:
            self.set_state(state, message)
        except NOT_STORED:
            logger.exception("the final state of job %s could not be stored", self.job_id)

    def begin_attempt(self) -> None:
        """Counts and stores a further attempt, so that no host mistakes it for an earlier one."""
        self.document.attempt += 1
        self.save()

    def begin_private_round(self) -> None:
        """Counts and stores what an attempt at a round reveals, before any host may send an update."""
        document = self.document
        document.privacy = document.privacy.after_rounds(self.job, 1)
        self.save()
        loss = document.privacy.loss(self.job)
        metrics.JOB_EPSILON.labels("averages").set(loss.epsilon)
        metrics.JOB_EPSILON.labels("updates").set(loss.update_epsilon)

    def committed(self, commit: plan_pb2.Commit) -> None:
        """Stores how many rounds a new commit has."""
        document = self.document
        document.num_rounds_committed = commit.num_rounds
        document.num_rounds_reached = max(document.num_rounds_reached, commit.num_rounds)
        document.last_commit = commit.attempt, commit.num_rounds
        document.num_rounds_restorable = commit.restore_point.num_rounds
        self.save()

    def round_committed(
        self,
        committed: scheduler_pb2.RoundCommitted,
        commit: plan_pb2.Commit,
        planner: PlannerState,
    ) -> None:
        """Stores what a round has changed, all of it or nothing. Then publishes what it has measured.

        Args:
            commit: The new commit.
            planner: What the planner knows after the round.
        """
        result = RoundResult(committed=committed, attempt=commit.attempt)
        with self.jobs.transaction():
            self.jobs.save_planner_state(self.job_id, planner)
            self.jobs.save_result(self.job_id, committed.num_rounds - 1, result)
            self.committed(commit)
        self.publish(round_committed=committed)
        self.warn(self._flat_loss.look_at(self.job, committed))
        self.warn(self._waiting.look_at(committed))

    def evaluated(self, evaluation: job_pb2.Evaluation) -> None:
        """Publishes an evaluation, and stores it with the round that made the model."""
        self.document.evaluation = evaluation
        round_index = evaluation.num_rounds - 1
        try:
            result = self.jobs.find_result(self.job_id, round_index) if round_index >= 0 else None
            if result is not None:
                result.evaluation = evaluation
                self.jobs.save_result(self.job_id, round_index, result)
        except NOT_STORED:  # No later round depends on it.
            logger.exception(
                "job %s: the evaluation of round %d is not stored", self.job_id, round_index + 1
            )
        self.publish(evaluation=evaluation)
        self.warn(self._one_answer.look_at(self.job, evaluation))

    def save(self) -> None:
        self.jobs.save(self.document)

    def attempt(self, round_index: int, plan_id: str = "") -> plan_pb2.Attempt:
        """Returns the name of the present attempt at a round."""
        return plan_pb2.Attempt(
            job_id=self.job_id,
            round_index=round_index,
            attempt=self.document.attempt,
            plan_id=plan_id,
        )


def _without_times(trouble: scheduler_pb2.JobTrouble) -> scheduler_pb2.JobTrouble:
    copy = scheduler_pb2.JobTrouble()
    copy.CopyFrom(trouble)
    copy.ClearField("gives_up_at")
    for host in copy.missing:
        host.ClearField("last_seen")
    return copy
