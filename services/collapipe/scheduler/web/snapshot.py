"""What the page shows of the present, from the memory of the scheduler and its job store.

A snapshot is bounded: clusters are summed up, and hosts and links are told of few clusters only.
"""

import statistics
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from types import MappingProxyType
from typing import Any, Protocol

from collapipe.errors import CollapipeError, NotPermittedError
from collapipe.job import JobConfig
from collapipe.scheduler.events import Event, EventLog
from collapipe.scheduler.explanation import say_bottleneck
from collapipe.scheduler.host_registry import (
    CONTROL_UNIT,
    DEVICE_AGENT,
    EDGE_SERVER,
    ROLE_NAMES,
    HostRegistry,
)
from collapipe.scheduler.job_store import JobDocument, JobStore, RoundDocument
from collapipe.scheduler.web.rates import RateReader, Rates
from collapipe.scheduler.web.values import Value, links, mean, number, stages, text
from collapipe.v1 import job_pb2, plan_pb2, scheduler_pb2

MOST_CLUSTERS, MOST_JOBS, MOST_EVENTS = 200, 50, 60
"""How many of each a snapshot has. It says how many more there are."""
MOST_DETAILED = 12
"""Clusters whose hosts and links a snapshot has, at most."""
_HOSTS_AT_A_GLANCE = 60
"""With no more hosts than these, a snapshot has the hosts and links of all clusters."""
_MOST_HOSTS_OF_CLUSTER = 64
_RECENT_ROUNDS = 8
"""Time left rests on so many rounds."""
_FRESH_SECONDS = 0.9


class Scheduling(Protocol):
    """The part of `SchedulerServicer` that the page uses."""

    def log(self, job_id: str) -> EventLog | None: ...

    def queue(self) -> list[str]: ...

    def cancel(self, job_id: str) -> None: ...


@dataclass(frozen=True)
class Focus:
    """What a visitor looks at.

    Args:
        job_id: A job, or "" for the newest that runs, else the newest.
        clusters: Indices of clusters of the deployment whose hosts and links it wants to see.
    """

    job_id: str = ""
    clusters: frozenset[int] = frozenset()


@dataclass
class _Running:
    """A job whose events this scheduler has.

    Args:
        round: The start of the present round, if one has begun.
        progress: The last report of each cluster of the job in it.
        committed: The rounds that this scheduler has committed, in order.
    """

    document: JobDocument
    log: EventLog
    events: list[Event]
    started: Event | None = None
    progress: dict[int, job_pb2.RoundProgress] = field(default_factory=dict)
    committed: list[scheduler_pb2.RoundCommitted] = field(default_factory=list)

    @classmethod
    def of(cls, document: JobDocument, log: EventLog) -> "_Running":
        running = cls(document, log, log.kept())
        for event in running.events:
            kind = event.WhichOneof("event")
            if kind == "round_started":
                running.started = event
                running.progress.clear()
            elif kind == "progress" and not document.has_ended:
                running.progress[event.progress.cluster_index] = event.progress
            elif kind == "round_committed":
                running.committed.append(event.round_committed)
        return running


@dataclass
class _Base:
    """What all visitors see."""

    at: float
    statuses: list[scheduler_pb2.HostStatus]
    running: dict[str, _Running]
    """The jobs that have not ended, by id."""
    of_cluster: dict[int, tuple[_Running, int]]
    """The job on each cluster of the deployment that has one, and the index of the cluster in that job."""
    rates: Rates
    sections: dict[str, Value | list[Value]]


class Snapshots:
    """Makes snapshots. All visitors share what is the same for all."""

    def __init__(
        self, registry: HostRegistry, jobs: JobStore, scheduling: Scheduling, rates: RateReader
    ) -> None:
        self._registry = registry
        self._jobs = jobs
        self._scheduling = scheduling
        self._rates = rates
        self._lock = threading.Lock()
        self._last: _Base | None = None
        self._rounds: dict[str, tuple[tuple[int, int], RoundDocument | None]] = {}
        """The document of the present round of each running job, with the round and the attempt."""

    def sections(self, focus: Focus) -> dict[str, Value | list[Value] | None]:
        """Returns the sections of a snapshot by name: clusters, edge, jobs, details and job."""
        base = self._base()
        members: dict[int, list[scheduler_pb2.HostStatus]] = {}
        for status in base.statuses:
            if status.host.role != EDGE_SERVER:
                members.setdefault(status.host.cluster_index, []).append(status)
        wanted: Collection[int] = sorted(focus.clusters & members.keys())[:MOST_DETAILED]
        if not focus.clusters and len(base.statuses) <= _HOSTS_AT_A_GLANCE:
            wanted = sorted(members)[:MOST_DETAILED]
        details: Value = {
            str(index): self._details(base, index, members[index]) for index in wanted
        }
        return {**base.sections, "details": details, "job": self._job(base, focus.job_id)}

    def cancel(self, job_id: str, may: Callable[[str], bool]) -> None:
        """Cancels a job.

        Args:
            may: Says whether the visitor may change a job of this owner.

        Raises:
            NotFoundError: There is no such job, or it does not run.
            NotPermittedError: It is not the visitor's.
        """
        owner = self._jobs.get(job_id).owner
        if not may(owner):
            raise NotPermittedError(
                f"job {job_id} belongs to {owner or 'everybody with a certificate'}, and you may only look at it: open the "
                "page with the certificate of its owner or of an admin in your browser"
            )
        self._scheduling.cancel(job_id)

    def _base(self) -> _Base:
        with self._lock:
            if self._last is None or time.monotonic() - self._last.at > _FRESH_SECONDS:
                self._last = self._read()
            return self._last

    def _read(self) -> _Base:
        documents = self._jobs.all()
        running: dict[str, _Running] = {}
        of_cluster: dict[int, tuple[_Running, int]] = {}
        queued = self._scheduling.queue()
        for document in documents:
            log = None if document.has_ended else self._scheduling.log(document.job_id)
            if log is None:
                continue
            one = running[document.job_id] = _Running.of(document, log)
            if document.job_id not in queued:
                for index, host_cluster in enumerate(_config(document.config_json).host_clusters):
                    of_cluster[host_cluster] = one, index
        self._rounds = {key: kept for key, kept in self._rounds.items() if key in running}
        base = _Base(
            time.monotonic(),
            self._registry.statuses(),
            running,
            of_cluster,
            self._rates.read(),
            {},
        )
        listed = sorted(documents, key=_rank)[:MOST_JOBS]
        clusters = self._clusters(base)
        edge = [s for s in base.statuses if s.host.role == EDGE_SERVER]
        working = [s.host.host_id for s in edge if of_cluster]
        base.sections = {
            "clusters": clusters[:MOST_CLUSTERS],
            "edge": [_host(status, working, base.rates) for status in edge],
            "jobs": [self._status(base, one, queued) for one in listed],
            "counts": {
                "clusters": len(clusters),
                "jobs": len(documents),
                "devices": sum(s.host.role == DEVICE_AGENT for s in base.statuses),
                "lost": sum(not s.alive for s in base.statuses),
            },
        }
        return base

    def _clusters(self, base: _Base) -> list[Value]:
        """Sums up each cluster of the deployment."""
        counts: dict[int, dict[str, int]] = {}
        used = {
            stage.host_id
            for one, index in base.of_cluster.values()
            for stage in _plan_stages(one, index)
        }
        for status in base.statuses:
            if status.host.role == EDGE_SERVER:
                continue
            states = counts.setdefault(
                status.host.cluster_index, {"working": 0, "idle": 0, "lost": 0, "suspected": 0}
            )
            states[_state(status, used)] += 1
        clusters: list[Value] = []
        for index in sorted(counts):
            summary: Value = {"index": index, **counts[index]}
            if index in base.of_cluster:
                one, own_index = base.of_cluster[index]
                summary["job"] = one.document.job_id
                if (progress := one.progress.get(own_index)) is not None:
                    summary |= _progress(progress)
            clusters.append(summary)
        return clusters

    def _details(
        self, base: _Base, cluster: int, members: Sequence[scheduler_pb2.HostStatus]
    ) -> Value:
        """Tells the hosts and links of a cluster, in the order of its pipeline, then those that take no part."""
        edge = [s for s in base.statuses if s.host.role == EDGE_SERVER]
        statuses = {s.host.host_id: s for s in [*members, *edge]}
        detail: Value = {"pipeline": [], "links": [], "bottleneck": None}
        used: set[str] = set()
        if cluster in base.of_cluster:
            one, index = base.of_cluster[cluster]
            planned = _plan_stages(one, index)
            used = {stage.host_id for stage in planned}
            reports = one.progress[index].stages if index in one.progress else ()
            busy = {report.host_id: report.busy_ratio for report in reports}
            document = self._round(one)
            predicted = _prediction(document, index)
            needs = {s["host_id"]: s["memory_bytes"] for s in predicted.get("stages", ())}
            detail["pipeline"] = [
                {
                    **_host(statuses.get(stage.host_id), used, base.rates, busy),
                    **told,
                    "needs_bytes": number(needs.get(stage.host_id)),
                }
                for stage, told in zip(planned, stages(planned), strict=True)
            ]
            if one.started is not None and index < len(one.started.round_started.plans):
                plan = one.started.round_started.plans[index]
                detail["links"] = [_with_rates(link, base.rates) for link in links(plan)]
                if "bottleneck" in predicted:
                    name, seconds = predicted["bottleneck"], predicted["bottleneck_seconds"]
                    detail["bottleneck"] = name
                    detail["seconds"] = number(predicted["round_seconds"])
                    detail["limiting"] = say_bottleneck(name, seconds, plan.stages)
        others = [s for s in members if s.host.host_id not in used]
        # Hosts with a problem first: they must not be among those that are left out.
        others.sort(key=lambda s: (s.alive and not s.suspicion, s.host.role != CONTROL_UNIT))
        detail["others"] = [_host(s, used, base.rates) for s in others[:_MOST_HOSTS_OF_CLUSTER]]
        detail["more"] = len(others[_MOST_HOSTS_OF_CLUSTER:])
        return detail

    def _round(self, one: _Running) -> RoundDocument | None:
        """Returns the document of the present round of a job, with its decision."""
        if one.started is None:
            return None
        started, job_id = one.started.round_started, one.document.job_id
        wanted = started.round_index, started.attempt
        if job_id not in self._rounds or self._rounds[job_id][0] != wanted:
            try:
                document = self._jobs.find_round(job_id, started.round_index)
            except CollapipeError:  # A damaged file: the job itself will tell.
                document = None
            self._rounds[job_id] = wanted, document
        return self._rounds[job_id][1]

    def _status(self, base: _Base, document: JobDocument, queued: Sequence[str]) -> Value:
        config = _config(document.config_json)
        state = scheduler_pb2.JobState.Name(document.state).removeprefix("JOB_STATE_").lower()
        status: Value = {
            "id": document.job_id,
            "name": config.name,
            "state": state,
            "message": text(document.message),
            "committed": document.num_rounds_committed,
            "rounds": config.training.rounds,
            "owner": document.owner,
            "task": config.task.kind,
            "strategy": config.schedule.strategy,
            "submitted": number(document.submitted_at, 13),
            "ended": number(document.ended_at, 13) or None,
            "evaluation": _evaluation(document.evaluation),
            "stored_bytes": document.stored_bytes,
            "clusters": list(config.host_clusters)[:MOST_CLUSTERS],
        }
        if document.job_id in queued:
            status["queue_position"] = 1 + queued.index(document.job_id)
        one = base.running.get(document.job_id)
        if one is not None and one.started is not None:
            status |= self._left(one, config)
        return status

    def _left(self, one: _Running, config: JobConfig) -> Value:
        """Estimates when a job ends, in Unix seconds, with the shortest and the longest of its last rounds."""
        assert one.started is not None
        total, committed = config.training.rounds, one.document.num_rounds_committed
        shares = [p.steps_done / p.local_steps for p in one.progress.values() if p.local_steps]
        is_under_way = one.started.round_started.round_index >= committed
        done = committed + (sum(shares) / len(shares) if shares and is_under_way else 0.0)
        recent = [each.round_seconds for each in one.committed[-_RECENT_ROUNDS:]]
        basis = "the last rounds"
        if not recent:
            document = self._round(one)
            prediction = document.decision.get("prediction", {}) if document else {}
            recent, basis = [prediction.get("full_round_seconds", float("nan"))], "the plan"
        into = one.log.elapsed_seconds - one.started.elapsed_seconds if is_under_way else 0.0
        low, middle, high = min(recent), statistics.median(recent), max(recent)
        after = max(total - committed - 1, 0)
        now = time.time()
        return {
            "done": number(done / total, 3) if total else None,
            # The time of the end changes less often than the time left.
            "ends": {
                name: number(now + max(each - into, 0.0) + after * each, 10)
                for name, each in (("low", low), ("middle", middle), ("high", high))
            },
            "ends_basis": basis,
        }

    def _job(self, base: _Base, job_id: str) -> Value | None:
        """Tells more of one job: its round, the progress of each cluster, and its events."""
        documents = self._jobs.all()
        chosen = next((one for one in documents if one.job_id == job_id), None)
        if chosen is None:
            chosen = min(documents, key=_rank, default=None)
        if chosen is None:
            return None
        log = self._scheduling.log(chosen.job_id)
        one = base.running.get(chosen.job_id) or (_Running.of(chosen, log) if log else None)
        job: Value = {"id": chosen.job_id, "round": None, "progress": [], "events": []}
        if trouble := [text(each) for each in _trouble(chosen.trouble)]:
            job["trouble"] = trouble
        if one is None:
            return job
        if one.started is not None:
            started = one.started.round_started
            job["round"] = {"number": started.round_index + 1, "attempt": started.attempt}
        progress = [
            {"cluster": index, **_progress(one.progress[index])}
            for index in sorted(one.progress)[:MOST_CLUSTERS]
        ]
        job["progress"] = progress
        job["loss"] = mean(p.loss for p in one.progress.values() if p.HasField("loss"))
        rates = [p.samples_per_second for p in one.progress.values()]
        job["samples_per_second"] = number(sum(rates), 3) if rates else None
        told = [_event(each, one.log.began) for each in one.events]
        job["events"] = [each for each in told if each is not None][-MOST_EVENTS:]
        return job


@lru_cache(maxsize=256)
def _config(config_json: str) -> JobConfig:
    return JobConfig.from_json(config_json)


def _rank(document: JobDocument) -> tuple[bool, bool, int]:
    """Orders jobs: those that run, those that wait, those that have ended, the newest first."""
    is_queued = document.state == scheduler_pb2.JOB_STATE_QUEUED
    return document.has_ended, is_queued, -document.number


def _plan_stages(one: _Running, index: int) -> Sequence[plan_pb2.Stage]:
    plans = one.started.round_started.plans if one.started is not None else ()
    return plans[index].stages if index < len(plans) else ()


def _prediction(document: RoundDocument | None, index: int) -> dict[str, Any]:
    clusters = document.decision.get("prediction", {}).get("clusters", ()) if document else ()
    return clusters[index] if index < len(clusters) else {}


def _state(status: scheduler_pb2.HostStatus, used: Collection[str]) -> str:
    if not status.alive:
        return "lost"
    if status.suspicion:
        return "suspected"
    return "working" if status.host.host_id in used else "idle"


def _host(
    status: scheduler_pb2.HostStatus | None,
    used: Collection[str],
    rates: Rates,
    busy: Mapping[str, float] = MappingProxyType({}),
) -> Value:
    """Tells of a host. `None` is one that has not registered since the scheduler started.

    Args:
        used: The ids of the hosts that work for a job.
        busy: What control units report of the busy share of hosts, by id.
    """
    if status is None:
        return {"role": "device", "state": "lost"}
    host = status.host
    share = rates.busy.get(host.host_id, busy.get(host.host_id))
    told: Value = {
        "id": host.host_id,
        "role": ROLE_NAMES[host.role].lower().replace("_agent", "").replace("_", " "),
        "state": _state(status, used),
        "address": host.address,
        "busy": number(share, 2),
        "memory_bytes": number(rates.memory_bytes.get(host.host_id), 3),
        "limit_bytes": host.memory_bytes or None,
    }
    if not status.alive:
        told["last_seen"] = number(status.last_seen.ToMilliseconds() / 1000, 11)
    if status.suspicion:
        told["suspicion"] = text(status.suspicion)
    return told


def _with_rates(link: Value, rates: Rates) -> Value:
    one, other = link["from"], link["to"]
    return {
        **link,
        "forward_bps": number(rates.bits_per_second.get(f"{one}>{other}"), 3),
        "backward_bps": number(rates.bits_per_second.get(f"{other}>{one}"), 3),
    }


def _progress(progress: job_pb2.RoundProgress) -> Value:
    return {
        "steps_done": progress.steps_done,
        "steps": progress.local_steps,
        "loss": number(progress.loss) if progress.HasField("loss") else None,
        "samples_per_second": number(progress.samples_per_second, 3),
        "waiting_for": text(progress.waiting_for),
    }


def _evaluation(evaluation: job_pb2.Evaluation | None) -> Value | None:
    if evaluation is None:
        return None
    return {
        "metric": evaluation.metric,
        "value": number(evaluation.value),
        "rows": evaluation.num_rows,
        "round": evaluation.num_rounds,
    }


def _trouble(trouble: scheduler_pb2.JobTrouble) -> list[str]:
    lines = [
        f"{'waits for' if trouble.waiting else 'goes on without'} {host.host_id or host.wanted}"
        + (f": {host.left_out}" if host.left_out else "")
        for host in trouble.missing
    ]
    if trouble.num_failures:
        lines.append(f"attempt {trouble.num_failures} failed: {trouble.failure}")
    return lines


def _event(event: Event, began: float) -> Value | None:
    """Tells of an event that people want to read; `None` for others.

    Args:
        began: When the log of the job began, in Unix seconds.
    """
    kind, words, hosts = event.WhichOneof("event"), "", list[str]()
    if kind == "incident":
        words, hosts = event.incident.message, list(event.incident.host_ids)[:8]
        kind = scheduler_pb2.IncidentCode.Name(event.incident.code).removeprefix("INCIDENT_CODE_")
    elif kind == "round_started":
        started = event.round_started
        attempt = f" (attempt {started.attempt + 1})" if started.attempt else ""
        words = f"round {started.round_index + 1} starts{attempt}"
    elif kind == "round_committed":
        committed = event.round_committed
        late = ", ".join(map(str, committed.late_clusters))
        words = f"round {committed.num_rounds} is committed after {committed.round_seconds:.1f} s"
        words += f" without late clusters {late}" if late else ""
    elif kind == "evaluation":
        words = f"{event.evaluation.metric} is {event.evaluation.value:.4f} after {event.evaluation.num_rounds} rounds"
    elif kind == "status":
        state = scheduler_pb2.JobState.Name(event.status.state).removeprefix("JOB_STATE_").lower()
        words = f"{state}: {event.status.message}" if event.status.message else state
    if not words:
        return None
    return {
        "number": event.number,
        "at": number(began + event.elapsed_seconds, 13),
        "kind": kind,
        "text": text(words),
        "hosts": hosts,
    }
