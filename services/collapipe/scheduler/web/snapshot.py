"""What the page shows of the present, from the memory of the scheduler and its job store.

A snapshot is bounded: clusters are summed up, and hosts and links are told of few clusters only.
"""

import math
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Protocol

from collapipe.errors import CollapipeError, NotFoundError, NotPermittedError
from collapipe.planning.explanation import say_bottleneck
from collapipe.recorded_decisions import prediction_of, prediction_of_plan
from collapipe.scheduler.events import EventLog
from collapipe.scheduler.host_registry import (
    CONTROL_UNIT,
    DEVICE_AGENT,
    EDGE_SERVER,
    ROLE_NAMES,
    HostRegistry,
)
from collapipe.scheduler.job_documents import JobDocument, RoundDocument
from collapipe.scheduler.job_store import JobStore
from collapipe.scheduler.web.job_values import (
    WatchedJob,
    config_of,
    progress_of,
    rank,
    status_of,
    trouble_of,
)
from collapipe.scheduler.web.rates import RateReader, Rates
from collapipe.scheduler.web.values import (
    Value,
    decision_of,
    links,
    number,
    stages,
    text,
)
from collapipe.v1 import plan_pb2, scheduler_pb2

MOST_CLUSTERS, MOST_JOBS = 200, 50
"""How many of each a snapshot has. It says how many more there are."""
MOST_DETAILED = 12
"""Clusters whose hosts and links a snapshot has, at most."""
_HOSTS_AT_A_GLANCE = 60
"""With no more hosts than these, a snapshot has the hosts and links of all clusters."""
_MOST_HOSTS_OF_CLUSTER = 64
_MOST_HELD_BACK = 2
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
class _Base:
    """What all visitors see."""

    at: float
    statuses: list[scheduler_pb2.HostStatus]
    running: dict[str, WatchedJob]
    """The jobs that have not ended, by id."""
    of_cluster: dict[int, tuple[WatchedJob, int]]
    """The job on each cluster of the deployment that has one, and the index of the cluster in that job."""
    rates: Rates
    jobs: list[Value]
    queued: list[str]
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
        """Returns the sections of a snapshot by name: clusters, edge, jobs, counts, details and job."""
        rates = self._rates.read()  # Only one visitor waits for its answer.
        with self._lock:
            base = self._base(rates)
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
            jobs = [*base.jobs, *self._unlisted(base, focus.job_id)]
            job = self._job(base, focus.job_id, members)
            return {**base.sections, "jobs": jobs, "details": details, "job": job}

    def of_job(self, job_id: str, clusters: Sequence[int] = ()) -> Value:
        """Returns what a client shows of one job: its entry among `jobs`, the section `job`, and the section `details`.

        Args:
            clusters: Indices of clusters of the job for `details`. Without any, the first ones.

        Raises:
            NotFoundError: There is no such job.
        """
        hosts = dict(enumerate(config_of(self._jobs.get(job_id)).host_clusters))
        wanted = [hosts[index] for index in clusters if index in hosts] or hosts.values()
        sections = self.sections(Focus(job_id, frozenset(wanted)))
        jobs, job = sections["jobs"], sections["job"]
        assert isinstance(jobs, list) and (job is None or isinstance(job, dict))
        if job is None or job["id"] != job_id:
            raise NotFoundError(
                f"job {job_id} was deleted meanwhile: `collapipe jobs list` lists the jobs"
            )
        return {
            "now": number(time.time(), 13),
            "status": next((each for each in jobs if each["id"] == job_id), None),
            # A client has the events, and the warnings among them.
            "job": {k: v for k, v in job.items() if k not in ("events", "warnings")},
            "details": sections["details"],
        }

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

    def _base(self, rates: Rates) -> _Base:
        if self._last is None or time.monotonic() - self._last.at > _FRESH_SECONDS:
            self._last = self._read(rates)
        return self._last

    def _read(self, rates: Rates) -> _Base:
        documents = self._jobs.all()
        running: dict[str, WatchedJob] = {}
        of_cluster: dict[int, tuple[WatchedJob, int]] = {}
        queued = self._scheduling.queue()
        for document in documents:
            log = None if document.has_ended else self._scheduling.log(document.job_id)
            if log is None:
                continue
            one = running[document.job_id] = WatchedJob.of(document, log)
            if document.job_id not in queued:
                for index, host_cluster in enumerate(config_of(document).host_clusters):
                    of_cluster[host_cluster] = one, index
        self._rounds = {key: kept for key, kept in self._rounds.items() if key in running}
        base = _Base(
            time.monotonic(),
            [*self._registry.statuses(), *self._registry.refused()],
            running,
            of_cluster,
            rates,
            [],
            queued,
            {},
        )
        listed = sorted(documents, key=rank)[:MOST_JOBS]
        clusters = self._clusters(base)
        edge = [s for s in base.statuses if s.host.role == EDGE_SERVER]
        working = [s.host.host_id for s in edge if of_cluster]
        base.jobs = [self._listed(base, one) for one in listed]
        base.sections = {
            "clusters": clusters[:MOST_CLUSTERS],
            "edge": [_host(status, working, base.rates) for status in edge],
            "counts": {
                "clusters": len(clusters),
                "jobs": len(documents),
                "unreadable": self._jobs.num_unreadable,
                "devices": sum(s.host.role == DEVICE_AGENT for s in base.statuses),
            },
        }
        return base

    def _clusters(self, base: _Base) -> list[Value]:
        """Sums up each cluster of the deployment."""
        counts: dict[int, dict[str, int]] = {}
        used = {
            stage.host_id
            for one, index in base.of_cluster.values()
            for stage in one.plan(index).stages
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
                    summary |= progress_of(progress)
            clusters.append(summary)
        return clusters

    def _details(
        self, base: _Base, cluster: int, members: Sequence[scheduler_pb2.HostStatus]
    ) -> Value:
        """Tells the hosts and links of a cluster, in the order of its pipeline, then those that take no part."""
        edge = [s for s in base.statuses if s.host.role == EDGE_SERVER]
        statuses = {s.host.host_id: s for s in [*members, *edge]}
        detail: dict[str, Any] = {"pipeline": [], "links": [], "bottleneck": None}
        used: set[str] = set()
        if cluster in base.of_cluster:
            one, index = base.of_cluster[cluster]
            plan = one.plan(index)
            used = {stage.host_id for stage in plan.stages}
            reports = one.progress[index].stages if index in one.progress else ()
            busy = {report.host_id: report.busy_ratio for report in reports}
            document = self._round(one)
            predicted = prediction_of_plan(decision_of(document), plan)
            needs = {s["host_id"]: s["memory_bytes"] for s in predicted.get("stages", ())}
            detail["pipeline"] = [
                {
                    **_host(statuses.get(stage.host_id), used, base.rates, busy),
                    **told,
                    "needs_bytes": number(needs.get(stage.host_id)),
                }
                for stage, told in zip(plan.stages, stages(plan.stages), strict=True)
            ]
            detail["links"] = [_with_rates(link, base.rates) for link in links(plan)]
            detail["bottleneck"], detail["bottleneck_busy"] = bottleneck_of(
                predicted.get("bottleneck"), detail["pipeline"], detail["links"]
            )
        others = [s for s in members if s.host.host_id not in used]
        # Hosts with a problem first: they must not be among those that are left out.
        others.sort(
            key=lambda s: (
                s.alive and not s.suspicion and not s.unshaped,
                s.host.role != CONTROL_UNIT,
            )
        )
        detail["others"] = [_host(s, used, base.rates) for s in others[:_MOST_HOSTS_OF_CLUSTER]]
        detail["more"] = len(others[_MOST_HOSTS_OF_CLUSTER:])
        return detail

    def _round(self, one: WatchedJob) -> RoundDocument | None:
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
            if document is not None and document.attempt != started.attempt:
                return None  # The next attempt has begun, and its event comes at once.
            self._rounds[job_id] = wanted, document
        return self._rounds[job_id][1]

    def _unlisted(self, base: _Base, job_id: str) -> list[Value]:
        """Returns the entry of a chosen job that is not listed, because there are too many."""
        if not job_id or any(each["id"] == job_id for each in base.jobs):
            return []
        found = next((one for one in self._jobs.all() if one.job_id == job_id), None)
        return [self._listed(base, found)] if found is not None else []

    def _listed(self, base: _Base, document: JobDocument) -> Value:
        ends = self._end(base.running.get(document.job_id))
        return status_of(document, base.queued) | ends

    def _end(self, one: WatchedJob | None) -> Value:
        if one is None or one.started is None:
            return {}
        document = None if one.round_seconds else self._round(one)
        return one.end(prediction_of(decision_of(document)).get("full_round_seconds", math.nan))

    def _job(
        self, base: _Base, job_id: str, members: Mapping[int, list[scheduler_pb2.HostStatus]]
    ) -> Value | None:
        """Tells more of one job. Without its id, it is the one that comes first."""
        documents = self._jobs.all()
        chosen = next((one for one in documents if one.job_id == job_id), None)
        if chosen is None:
            chosen = min(documents, key=rank, default=None)
        if chosen is None:
            return None
        log = self._scheduling.log(chosen.job_id)
        one = base.running.get(chosen.job_id) or (WatchedJob.of(chosen, log) if log else None)
        told: Value = {"id": chosen.job_id, "trouble": trouble_of(chosen)}
        if one is not None:
            told |= one.detail()
        if one is not None and not chosen.has_ended:
            told["held_back"] = self._held_back(base, one, members)
        return told

    def _held_back(
        self,
        base: _Base,
        one: WatchedJob,
        members: Mapping[int, list[scheduler_pb2.HostStatus]],
    ) -> list[Value]:
        """Names the clusters that need the most time for the round, the slowest first, and what limits each of them."""
        decision = decision_of(self._round(one))
        host_clusters = config_of(one.document).host_clusters
        predicted = [
            (prediction_of_plan(decision, one.plan(i)), i) for i in range(len(host_clusters))
        ]
        predicted = [each for each in predicted if each[0]]
        predicted.sort(key=lambda each: -each[0]["round_seconds"])
        found: list[Value] = []
        for each, i in predicted[:_MOST_HELD_BACK]:
            detail: dict[str, Any] = self._details(
                base, host_clusters[i], members.get(host_clusters[i], [])
            )
            name, share = detail["bottleneck"], detail.get("bottleneck_busy")
            seconds = each["bottleneck_seconds"] if share is None else None
            found.append(
                {
                    "cluster": host_clusters[i],
                    "by": say_bottleneck(name or each["bottleneck"], seconds, one.plan(i)),
                    "share": _busy_share(each, one.plan(i)) if share is None else share,
                    "is_measured": share is not None,
                }
            )
        return found


def bottleneck_of(
    predicted: str | None, hosts: Sequence[Mapping[str, Any]], links: Sequence[Mapping[str, Any]]
) -> tuple[str | None, float | None]:
    """Chooses what limits a pipeline: the part that is busy for the largest share of the time, by the shares that are shown.

    A link without a limit has no such share, nor has an in-flight window. If the prediction names one of these, or a host
    is not measured, the result is the part that was predicted.

    Args:
        predicted: The name of the limit in the prediction of the plan, such as "stage 2"; `None` without a prediction.
        hosts: In the order of the pipeline, with their shares in `busy`.
        links: As `collapipe.scheduler.web.values.links` describes them, with their rates.

    Returns:
        Its name, and its share, 0 to 1; `None` as the share if it is only predicted.
    """
    shares = {f"stage {i}": host.get("busy") for i, host in enumerate(hosts)}
    if predicted is None or None in shares.values():
        return predicted, None
    for index, link in enumerate(links):
        rates = {way: link[f"{way}_bps"] for way in ("forward", "backward")}
        ways = {
            f"{way} link {index}": rate / link["limit_bps"]
            for way, rate in rates.items()
            if rate is not None and link["limit_bps"]
        }
        if ways:
            ways[f"link {index}"] = max(ways.values())
        shares |= {name: number(min(share, 1.0), 2) for name, share in ways.items()}
    expected = f"stage {len(hosts) - 1}" if predicted == "edge server" else predicted
    if expected not in shares:
        return predicted, None
    # Of equal shares, the one that was predicted counts.
    busiest = max(shares, key=lambda name: (shares[name], name == expected))
    return busiest, shares[busiest]


def _busy_share(predicted: Mapping[str, Any], plan: plan_pb2.Plan) -> float | None:
    """Returns the share of a mini-batch in which its bottleneck works, 0 to 1, as predicted."""
    seconds = predicted.get("mini_batch_seconds")
    if not seconds:
        return None
    num_parts = plan.num_micro_batches * max(plan.num_slices, 1)
    return number(min(num_parts * predicted["bottleneck_seconds"] / seconds, 1.0), 2)


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
        return {"state": "lost"}
    host = status.host
    share = rates.busy.get(host.host_id, busy.get(host.host_id))
    told: Value = {
        "id": host.host_id,
        "role": ROLE_NAMES[host.role].lower().replace("_agent", "").replace("_", " "),
        "state": _state(status, used),
        "busy": number(share, 2),
        "memory_bytes": number(rates.memory_bytes.get(host.host_id), 3),
        "limit_bytes": host.memory_bytes or None,
    }
    if status.refusal:
        told["refusal"] = text(status.refusal)
    if status.twin_address:
        told["twin"] = text(f"{host.address} and {status.twin_address}")
    if not status.alive and status.HasField("last_seen"):
        told["last_seen"] = number(status.last_seen.ToMilliseconds() / 1000, 11)
    if status.suspicion:
        told["suspicion"] = text(status.suspicion)
    if status.unshaped:
        told["unshaped"] = text(status.unshaped)
    return told


def _with_rates(link: Value, rates: Rates) -> Value:
    one, other = link["from"], link["to"]
    return {
        **link,
        "forward_bps": number(rates.bits_per_second.get(f"{one}>{other}"), 3),
        "backward_bps": number(rates.bits_per_second.get(f"{other}>{one}"), 3),
    }
