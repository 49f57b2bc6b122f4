"""What the page shows of past rounds, from the records of the job store."""

import time
from collections.abc import Sequence

from collapipe.errors import CollapipeError
from collapipe.evaluation import evaluation_delay
from collapipe.planning.decisions import RoundDecision
from collapipe.planning.explanation import explain
from collapipe.planning.round_sum import computing_seconds
from collapipe.recorded_decisions import prediction_of, prediction_of_plan
from collapipe.rpc import ChannelPool
from collapipe.scheduler.host_registry import HostRegistry
from collapipe.scheduler.job_documents import JobDocument, RoundDocument, RoundResult
from collapipe.scheduler.job_store import JobStore
from collapipe.scheduler.trace_collection import collect_trace
from collapipe.scheduler.web.timeline import timeline
from collapipe.scheduler.web.values import (
    Value,
    links,
    mean,
    metrics_of,
    number,
    stages,
    text,
)
from collapipe.v1 import job_pb2, plan_pb2

MOST_ROUNDS = 300
"""Rounds of a job that the page shows. A longer job shows every second one, or fewer."""
_MOST_LOSSES = 1200
"""Losses of a whole job that the page draws."""
_PAGE_SECONDS = 0.5
"""Reading rounds ends after this time, and the page asks again. Documents of many clusters are large."""
_MOST_EXPLAINED = 20
"""With more clusters, an explanation would hold up the scheduler."""
_MOST_CLUSTERS = 12
_MOST_QUEUES = 20


class Records:
    """Reads past rounds."""

    def __init__(self, registry: HostRegistry, jobs: JobStore, channels: ChannelPool) -> None:
        self._registry = registry
        self._jobs = jobs
        self._channels = channels

    def rounds(self, job_id: str, after: int) -> Value:
        """Returns rounds of a job that are committed, from the one with this index on, and where to go on.

        Raises:
            CollapipeError: There is no such job, or a record is damaged.
        """
        document = self._jobs.get(job_id)
        committed, started = document.num_rounds_committed, time.monotonic()
        every = -(-max(committed, 1) // MOST_ROUNDS)
        most_losses = max(1, _MOST_LOSSES * every // max(committed, 1))
        index, rounds = -(-after // every) * every, list[Value]()
        while index < committed and time.monotonic() - started < _PAGE_SECONDS:
            rounds.append(self._summary(document, index, most_losses))
            index += every
        return {"rounds": rounds, "every": every, "next": index, "done": index >= committed}

    def _summary(self, document: JobDocument, index: int, most_losses: int) -> Value:
        planned = self._jobs.find_round(document.job_id, index)
        result = self._jobs.find_result(document.job_id, index)
        summary: Value = {"round": index + 1}
        if planned is not None:
            prediction = prediction_of(planned.decision)
            summary["predicted_seconds"] = number(prediction.get("full_round_seconds"))
            summary["kept_because"] = planned.decision.get("kept_because", "")
            summary["holders"] = [_holders(plan) for plan in planned.plans[:_MOST_CLUSTERS]]
            summary["queues"] = _queues(planned)
        if result is not None:
            committed = result.committed
            mini_batch = document.job.training.mini_batch
            late = set(committed.late_clusters)
            in_time = [s for index, s in enumerate(committed.summaries) if index not in late]
            trained = [s for s in committed.summaries if s.training_seconds > 0]
            rates = [mini_batch * s.local_steps / s.training_seconds for s in trained]
            summary |= {
                "seconds": number(committed.round_seconds),
                # No prediction counts the evaluation.
                "seconds_without_evaluation": number(
                    committed.round_seconds - evaluation_delay(in_time)
                ),
                "losses": _losses(committed.summaries, most_losses),
                "samples_per_second": number(sum(rates), 3),
                "late": list(committed.late_clusters)[:_MOST_CLUSTERS],
                "pushed_bytes": sum(map(_pushed_bytes, committed.summaries)),
                "fetched_bytes": sum(s.fetched_bytes for s in committed.summaries),
            }
            if result.evaluation is not None:
                summary["metrics"] = metrics_of(result.evaluation)
        return summary

    def round(self, job_id: str, index: int, *, explained: bool = True) -> Value:
        """Returns who held what in the first clusters in a round, why, and what it was predicted to take.

        Args:
            explained: Whether to say why, which takes longer than the rest.

        Raises:
            CollapipeError: There is no such round, or its record is damaged.
        """
        document = self._jobs.round(job_id, index)
        result = self._jobs.find_result(job_id, index, document.attempt)
        prediction = prediction_of(document.decision)
        listed = range(min(len(document.plans), _MOST_CLUSTERS))
        return {
            "round": index + 1,
            "attempt": document.attempt,
            "predicted_seconds": number(prediction.get("full_round_seconds")),
            "seconds": number(result.committed.round_seconds) if result else None,
            "energy_joules": number(sum(prediction.get("energy_joules", {}).values())),
            "why": _why(document, result) if explained else [],
            "num_clusters": len(document.plans),
            "clusters": [_cluster(document, result, one) for one in listed],
        }

    def trace(self, job_id: str, index: int, cluster: int) -> Value:
        """Asks the hosts of one cluster of a job what they did in a round, and returns it as bars.

        Raises:
            CollapipeError: There is no such round, or its record is damaged.
        """
        document = self._jobs.round(job_id, index)
        attempt = plan_pb2.Attempt(job_id=job_id, round_index=index, attempt=document.attempt)
        plans = document.plans[cluster : cluster + 1]
        messages = collect_trace(attempt, plans, self._registry.statuses(), self._channels)
        return timeline(messages)


def _holders(plan: plan_pb2.Plan) -> list[list[object]]:
    """Returns each host of a plan with its units in words."""
    return [[stage["id"], stage["units"]] for stage in stages(plan.stages)]


def _queues(document: RoundDocument) -> Value:
    """Returns the virtual queues of devices with an energy budget, in budgets of a round: docs/scheduling.md (12)."""
    problem = document.decision.get("question", {}).get("problem", {})
    devices = [
        device
        for cluster in problem.get("clusters", ())
        for device in cluster["devices"]
        if device.get("energy_budget_joules")
    ]
    devices.sort(key=lambda device: -device["backlog"])
    return {device["host_id"]: number(device["backlog"]) for device in devices[:_MOST_QUEUES]}


def _losses(summaries: Sequence[job_pb2.RoundSummary], most: int) -> list[float | None]:
    """Returns the mean loss over the clusters, for at most so many equal parts of a round."""
    steps = max((len(s.losses) for s in summaries), default=0)
    parts = min(steps, most)
    return [
        mean(
            loss
            for s in summaries
            for loss in s.losses[part * steps // parts : (part + 1) * steps // parts]
        )
        for part in range(parts)
    ]


def _why(document: RoundDocument, result: RoundResult | None) -> list[str]:
    if len(document.plans) > _MOST_EXPLAINED:
        return [
            f"`collapipe plan explain` explains rounds with more than {_MOST_EXPLAINED} clusters"
        ]
    try:
        committed = result.committed if result else None
        return [
            text(line) for line in explain(RoundDecision.from_json(document.decision), committed)
        ]
    except (CollapipeError, LookupError, ValueError, TypeError, ArithmeticError) as error:
        return [f"the record of the decision cannot be used: {error}"]


def _cluster(document: RoundDocument, result: RoundResult | None, index: int) -> Value:
    plan = document.plans[index]
    predicted = prediction_of_plan(document.decision, plan)
    problems = document.decision.get("question", {}).get("problem", {}).get("clusters", ())
    devices = {d["host_id"] for d in problems[index]["devices"]} if index < len(problems) else set()
    told: Value = {
        "cluster": index,
        "pipeline": stages(plan.stages),
        "devices": [stage.host_id for stage in plan.stages if stage.host_id in devices],
        "links": links(plan),
        "micro_batches": plan.num_micro_batches,
        "upload_codec": plan.upload_codec or "fp32",
        "bottleneck": predicted.get("bottleneck"),
        "needs_bytes": {
            stage["host_id"]: number(stage["memory_bytes"]) for stage in predicted.get("stages", ())
        },
    }
    if result is not None and index < len(result.committed.summaries):
        summary = result.committed.summaries[index]
        computing = computing_seconds(summary)
        # The busy ratio of a report is that of its last step.
        busy = {
            stage.host_id: number(computing[stage.host_id] / stage.times.total_seconds, 2)
            for stage in summary.stages
            if stage.times.total_seconds
        }
        told |= {
            "busy": busy,
            "computing_seconds": {
                host_id: number(seconds) for host_id, seconds in computing.items()
            },
            "steps": summary.local_steps,
            "phases": {
                name: number(getattr(summary, f"{name}_seconds"))
                for name in ("configure", "evaluation", "training", "gather")
            },
            "pushed_bytes": _pushed_bytes(summary),
        }
    return told


def _pushed_bytes(summary: job_pb2.RoundSummary) -> int:
    return sum(each.bytes for each in summary.pushed)
