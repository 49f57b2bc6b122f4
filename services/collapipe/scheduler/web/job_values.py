"""What the page shows of jobs: their state, when they end, and what has happened in them."""

import math
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from collapipe.evaluation import evaluation_delay
from collapipe.job import JobConfig
from collapipe.scheduler.events import Event, EventLog
from collapipe.scheduler.job_documents import JobDocument
from collapipe.scheduler.web.values import Value, mean, metrics_of, number, text
from collapipe.v1 import job_pb2, plan_pb2, scheduler_pb2

MOST_EVENTS = 60
_ORDINARY = ("round_started", "round_committed", "evaluation")
"""Events of every round."""
_MOST_ORDINARY = 20
"""Of these, the page shows the last ones only. Otherwise they would soon hide what is rare."""
_MOST_MISSING = 8
"""Hosts that a job lacks and that are named."""
_RECENT_ROUNDS = 8
"""The estimate of the end rests on so many rounds."""


@dataclass
class WatchedJob:
    """A job whose events this scheduler has.

    Args:
        started: The start of the present round, if one has begun.
        progress: The last report of each cluster of the job in it.
        round_seconds: Those of the rounds that this scheduler has committed, in order.
        warnings: Those that no later evaluation contradicts, by code.
    """

    document: JobDocument
    log: EventLog
    events: list[Event]
    started: Event | None = None
    progress: dict[int, job_pb2.RoundProgress] = field(default_factory=dict)
    round_seconds: list[float] = field(default_factory=list)
    warnings: dict[int, Event] = field(default_factory=dict)

    @classmethod
    def of(cls, document: JobDocument, log: EventLog) -> "WatchedJob":
        """Reads the kept events of a job."""
        watched = cls(document, log, log.kept())
        for event in watched.events:
            kind = event.WhichOneof("event")
            if kind == "round_started":
                watched.started = event
                watched.progress.clear()
            elif kind == "progress" and not document.has_ended:
                watched.progress[event.progress.cluster_index] = event.progress
            elif kind == "round_committed":
                watched.round_seconds.append(event.round_committed.round_seconds)
            elif kind == "warning":
                watched.warnings[event.warning.code] = event
            elif kind == "evaluation" and not event.evaluation.one_answer:
                watched.warnings.pop(scheduler_pb2.WARNING_CODE_ONE_CLASS, None)
        return watched

    def plan(self, index: int) -> plan_pb2.Plan:
        """Returns the present plan of a cluster of the job. It is empty before the first round."""
        plans = self.started.round_started.plans if self.started is not None else ()
        return plans[index] if index < len(plans) else plan_pb2.Plan()

    def end(self, planned_seconds: float) -> Value:
        """Estimates when the job ends, in Unix seconds: from the median, the shortest and the longest of its last rounds.

        Args:
            planned_seconds: Predicted time of the present round, for a job that has committed none yet.
        """
        assert self.started is not None
        total, committed = (
            config_of(self.document).training.rounds,
            self.document.num_rounds_committed,
        )
        shares = [p.steps_done / p.local_steps for p in self.progress.values() if p.local_steps]
        if committed >= total:  # Only an evaluation is left.
            return {"done": 1.0}
        is_under_way = self.started.round_started.round_index >= committed
        done = committed + (sum(shares) / len(shares) if shares and is_under_way else 0.0)
        recent = self.round_seconds[-_RECENT_ROUNDS:] or [planned_seconds]
        into = self.log.elapsed_seconds - self.started.elapsed_seconds if is_under_way else 0.0
        estimates = {"low": min(recent), "middle": statistics.median(recent), "high": max(recent)}
        after, now = max(total - committed - 1, 0), time.time()
        return {
            "done": number(done / total, 3),
            # The time of the end changes less often than the time left.
            "ends": {
                name: number(now + max(each - into, 0.0) + after * each, 10)
                for name, each in estimates.items()
            },
            "ends_by": "the last rounds" if self.round_seconds else "the plan",
        }

    def say_left(self) -> str:
        """Says in words how long the job still takes, if that is known from its rounds."""
        if self.started is None or not self.round_seconds:
            return "time left not known yet"
        ends: Any = self.end(math.nan).get("ends")
        if ends is None:
            return "only its last evaluation is left"
        minutes = max(ends["middle"] - time.time(), 0.0) / 60
        if minutes < 1:
            return "less than 1 min left"
        return (
            f"about {minutes:.0f} min left" if minutes < 90 else f"about {minutes / 60:.0f} h left"
        )

    def detail(self) -> Value:
        """Tells of the present round and of the last events."""
        rates = [progress.samples_per_second for progress in self.progress.values()]
        ordinary = [e.number for e in self.events if e.WhichOneof("event") in _ORDINARY]
        old = set(ordinary[:-_MOST_ORDINARY])
        told = [_event(each, self.log.began) for each in self.events if each.number not in old]
        return {
            "round": self.started.round_started.round_index + 1 if self.started else None,
            "loss": mean(p.loss for p in self.progress.values() if p.HasField("loss")),
            "samples_per_second": number(sum(rates), 3) if rates else None,
            "events": [each for each in told if each is not None][-MOST_EVENTS:],
            "warnings": [_event(each, self.log.began) for each in self.warnings.values()],
        }


@lru_cache(maxsize=256)
def _config(config_json: str) -> JobConfig:
    return JobConfig.from_json(config_json)


def config_of(document: JobDocument) -> JobConfig:
    """Returns the parsed job file, and keeps it: a snapshot needs those of many jobs."""
    return _config(document.config_json)


def rank(document: JobDocument) -> tuple[bool, bool, int]:
    """Orders jobs: those that run, those that wait, those that have ended, the newest first."""
    is_queued = document.state == scheduler_pb2.JOB_STATE_QUEUED
    return document.has_ended, is_queued, -document.number


def status_of(document: JobDocument, queued: Sequence[str]) -> Value:
    """Tells of a job in short.

    Args:
        queued: Ids of the jobs that wait for their turn, in order.
    """
    config = config_of(document)
    evaluation = document.evaluation
    status: Value = {
        "id": document.job_id,
        "name": config.name,
        "state": _state(document.state),
        "message": text(document.message),
        "committed": document.num_rounds_committed,
        "rounds": config.training.rounds,
        "owner": document.owner,
        "strategy": config.schedule.strategy,
        "submitted": number(document.submitted_at, 13),
        "ended": number(document.ended_at, 13) or None,
        "stored_bytes": document.stored_bytes,
        # The clusters of the deployment that it uses, unless they have the same numbers as its own.
        "host_clusters": None
        if config.host_clusters == list(range(config.clusters))
        else config.host_clusters,
        "evaluation": None,
    }
    if evaluation is not None:
        status["evaluation"] = {
            "metric": evaluation.metric,
            "value": number(evaluation.value),
            "rows": evaluation.num_rows,
            "round": evaluation.num_rounds,
            "metrics": metrics_of(evaluation),
            "definitions": dict(sorted(evaluation.definitions.items())),
            "one_answer": evaluation.one_answer,
        }
    if document.job_id in queued:
        status["queue_position"] = 1 + queued.index(document.job_id)
    return status


def progress_of(progress: job_pb2.RoundProgress) -> Value:
    """Tells how far a cluster is in its round."""
    return {
        "steps_done": progress.steps_done,
        "steps": progress.local_steps,
        "samples_per_second": number(progress.samples_per_second, 3),
        "waiting_for": text(progress.waiting_for),
    }


def trouble_of(document: JobDocument) -> list[str]:
    """Tells in sentences what a job lacks, and why it was tried again."""
    trouble = document.trouble
    verb = "waits for" if trouble.waiting else "goes on without"
    lines = [
        f"The job {verb} {host.host_id or host.wanted}" + f": {host.left_out}" * bool(host.left_out)
        for host in trouble.missing[:_MOST_MISSING]
    ]
    if more := len(trouble.missing[_MOST_MISSING:]):
        lines.append(f"The job {verb} {more} more hosts")
    if trouble.num_failures:
        times = "once" if trouble.num_failures == 1 else f"{trouble.num_failures} times"
        lines.append(f"The round failed {times} and is tried again: {trouble.failure}")
    return [text(line) for line in lines]


def _state(state: int) -> str:
    name = scheduler_pb2.JobState.Name(scheduler_pb2.JobState.ValueType(state))
    return name.removeprefix("JOB_STATE_").lower()


def _event(event: Event, began: float) -> Value | None:
    """Tells of an event that people want to read; `None` for others.

    Args:
        began: When the log of the job began, in Unix seconds.
    """
    kind, words = event.WhichOneof("event"), ""
    if kind == "incident":
        words = event.incident.message
        kind = scheduler_pb2.IncidentCode.Name(event.incident.code).removeprefix("INCIDENT_CODE_")
    elif kind == "data_note":
        words = event.data_note.message
        kind = "warning" if event.data_note.is_warning else kind
    elif kind == "warning":
        words = f"{event.warning.message}: {event.warning.advice}"
        kind = scheduler_pb2.WarningCode.Name(event.warning.code).removeprefix("WARNING_CODE_")
    elif kind == "round_started":
        attempt, change = event.round_started.attempt, event.round_started.change
        words = f"round {event.round_started.round_index + 1} starts"
        words += f" (attempt {attempt + 1})" if attempt else ""
        words += f": {change}" if change else ""
    elif kind == "round_committed":
        committed = event.round_committed
        late = ", ".join(map(str, committed.late_clusters))
        in_time = [s for i, s in enumerate(committed.summaries) if i not in committed.late_clusters]
        evaluation = evaluation_delay(in_time)
        words = f"round {committed.num_rounds} is committed after {committed.round_seconds:.1f} s"
        words += f", of which {evaluation:.1f} s evaluated the model" if evaluation else ""
        words += f" without clusters {late}" if late else ""
    elif kind == "evaluation":
        num_rounds = event.evaluation.num_rounds
        values = [
            f"{name} {value:.4f}"
            for name, value in metrics_of(event.evaluation).items()
            if value is not None
        ]
        words = f"{', '.join(values)} after {num_rounds} round{'s' * (num_rounds != 1)}"
    elif kind == "status":
        state, message = _state(event.status.state), event.status.message
        words = f"{state}: {message}" if message else state
    if not words:
        return None
    at = number(began + event.elapsed_seconds, 13)
    return {"number": event.number, "at": at, "kind": kind, "text": text(words)}
