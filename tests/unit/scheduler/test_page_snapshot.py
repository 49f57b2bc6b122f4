"""What the page shows of the present: whole for few hosts, summed up for many, and always within bounds."""

import json
import math
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from collapipe.errors import NotFoundError, NotPermittedError
from collapipe.scheduler.events import Event, EventLog
from collapipe.scheduler.host_registry import (
    CONTROL_UNIT,
    DEVICE_AGENT,
    EDGE_SERVER,
    SILENCE_SECONDS,
    HostRegistry,
    JobHosts,
)
from collapipe.scheduler.job_store import JobDocument, JobStore, RoundDocument
from collapipe.scheduler.telemetry_window import Telemetry
from collapipe.scheduler.web import job_values, snapshot
from collapipe.scheduler.web.job_values import status_of
from collapipe.scheduler.web.rates import RateReader
from collapipe.scheduler.web.snapshot import MOST_CLUSTERS, MOST_DETAILED, Focus, Snapshots
from collapipe.telemetry.sources import Series
from collapipe.v1 import plan_pb2, scheduler_pb2
from collapipe.v1.job_pb2 import Evaluation, RoundProgress
from collapipe.v1.scheduler_pb2 import Host, Incident, RoundCommitted, RoundStarted

from .jobs import Clock, Source, hosts, job, knowledge, planner

LIMIT_SECONDS = 60.0


@dataclass
class World:
    """A scheduler's memory, as `Snapshots` reads it."""

    jobs: JobStore
    clock: Clock = field(default_factory=Clock)
    source: Source = field(default_factory=Source)
    logs: dict[str, EventLog] = field(default_factory=dict)
    queued: list[str] = field(default_factory=list)
    cancelled: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.registry = HostRegistry(self.clock)
        rates = RateReader(Telemetry(self.source, 1.0, self.clock), self.registry)
        self.snapshots = Snapshots(self.registry, self.jobs, self, rates)

    def log(self, job_id: str) -> EventLog | None:
        return self.logs.get(job_id)

    def queue(self) -> list[str]:
        return self.queued

    def cancel(self, job_id: str) -> None:
        self.cancelled.append(job_id)

    def sections(self, job_id: str = "", *clusters: int) -> dict[str, Any]:
        """Returns a snapshot as the browser gets it."""
        sections = self.snapshots.sections(Focus(job_id, frozenset(clusters)))
        found: dict[str, Any] = json.loads(json.dumps(sections, allow_nan=False))
        return found

    def submit(self, state: Any = scheduler_pb2.JOB_STATE_RUNNING, **training: Any) -> JobDocument:
        document = self.jobs.create(job(training), "client:me")
        document.state = state
        self.logs[document.job_id] = EventLog()
        return document

    def publish(self, document: JobDocument, **event: Any) -> None:
        self.logs[document.job_id].publish(Event(**event))


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    monkeypatch.setattr(snapshot, "_FRESH_SECONDS", -1.0)
    return World(JobStore(tmp_path))


def begin_round(world: World, document: JobDocument, of: JobHosts) -> list[str]:
    """Registers hosts, and decides and begins the first round of a job. Returns the pipeline."""
    for host in of.by_id.values():
        world.registry.register(host)
    plans, decision = planner(of, knowledge(of), Source(), Clock()).decide(0, ())
    record = RoundDocument(attempt=0, plans=plans, decision=decision.to_json(), total_steps=1)
    world.jobs.save_round(document.job_id, 0, record)
    world.publish(document, round_started=RoundStarted(plans=plans))
    return [stage.host_id for stage in plans[0].stages]


def test_few_hosts_are_told_in_the_order_of_the_pipeline(world: World) -> None:
    document = world.submit()
    of = hosts()
    of.devices[0].memory_bytes = 10**9
    pipeline = begin_round(world, document, of)
    link = f"{pipeline[0]}>{pipeline[1]}"
    at = world.clock.now
    receiver = of.by_id[pipeline[1]].metrics_address
    world.source.series = [
        Series(
            receiver,
            "collapipe_link_transfer_bytes_total",
            (("link", link),),
            ((at - 4, 0.0), (at, 5e5)),
        ),
        Series(receiver, "collapipe_stage_forward_seconds_sum", (), ((at - 4, 1.0), (at, 3.0))),
        Series(receiver, "collapipe_process_peak_resident_memory_bytes", (), ((at, 4e8),)),
    ]
    sections = world.sections()
    detail = sections["details"]["0"]
    assert [host["id"] for host in detail["pipeline"]] == pipeline
    assert [host["units"] for host in detail["pipeline"]][:: len(pipeline) - 1] == [
        "embedding",
        "head",
    ]
    second = detail["pipeline"][1]
    assert (second["state"], second["busy"], second["memory_bytes"]) == ("working", 0.5, 4e8)
    assert second["needs_bytes"] > 0
    assert (detail["links"][0]["from"], detail["links"][0]["to"]) == tuple(pipeline[:2])
    assert detail["links"][0]["forward_bps"] == 1e6
    kind, number = detail["bottleneck"].split()
    [held_back] = sections["job"]["held_back"]
    assert kind == "stage" and pipeline[int(number)] in held_back["by"]
    unused = {host["id"] for host in detail["others"]}
    assert unused == of.by_id.keys() - set(pipeline) and len(detail["links"]) == len(pipeline) - 1


def test_lost_host_of_the_pipeline_says_when_it_was_last_seen(world: World) -> None:
    document = world.submit()
    of = hosts()
    pipeline = begin_round(world, document, of)
    world.clock.now += SILENCE_SECONDS + 1
    for host in of.by_id.values():
        if host.host_id != pipeline[1]:
            world.registry.heartbeat(host.host_id, host.incarnation)
    sections = world.sections()
    states = {host["id"]: host for host in sections["details"]["0"]["pipeline"]}
    assert [states[host_id]["state"] for host_id in pipeline] == [
        "working",
        "lost",
        *["working"] * (len(pipeline) - 2),
    ]
    assert states[pipeline[1]]["last_seen"] > 0
    assert sections["clusters"][0]["lost"] == 1


def test_a_thousand_devices_are_summed_up(world: World) -> None:
    num_clusters = 250
    for cluster in range(num_clusters):
        world.registry.register(
            Host(host_id=f"control-unit-{cluster}", role=CONTROL_UNIT, cluster_index=cluster)
        )
        for device in range(10):
            world.registry.register(
                Host(host_id=f"device-{cluster}-{device}", role=DEVICE_AGENT, cluster_index=cluster)
            )
    world.registry.register(Host(host_id="edge-server", role=EDGE_SERVER))
    sections = world.sections()
    assert sections["details"] == {} and len(sections["clusters"]) == MOST_CLUSTERS
    assert sections["counts"]["clusters"] == num_clusters and sections["counts"]["devices"] == 2500
    assert sections["clusters"][3] == {
        "index": 3,
        "working": 0,
        "idle": 11,
        "lost": 0,
        "suspected": 0,
    }
    assert len(json.dumps(sections)) < 32_768
    chosen = world.sections("", *range(100, 120), 999)["details"]
    assert list(chosen) == [str(index) for index in range(100, 100 + MOST_DETAILED)]
    assert len(json.dumps(chosen)) < 65_536


def test_lost_hosts_of_a_large_cluster_come_before_those_that_are_left_out(world: World) -> None:
    for device in range(200):
        world.registry.register(Host(host_id=f"device-{device}", role=DEVICE_AGENT))
    world.registry.suspect("device-199", "device-3 could not reach it")
    detail = world.sections("", 0)["details"]["0"]
    assert detail["others"][0]["id"] == "device-199" and detail["others"][0]["state"] == "lost"
    assert len(detail["others"]) + detail["more"] == 200


def test_time_of_the_end_has_the_spread_of_the_last_rounds(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(job_values.time, "time", lambda: 5000.0)
    document = world.submit(rounds=10)
    for number, seconds in enumerate((20.0, 10.0, 40.0), 1):
        world.publish(document, round_started=RoundStarted(round_index=number - 1))
        world.publish(
            document, round_committed=RoundCommitted(num_rounds=number, round_seconds=seconds)
        )
    document.num_rounds_committed = 3
    [status] = world.sections()["jobs"]
    assert status["ends"] == {"low": 5000 + 70, "middle": 5000 + 140, "high": 5000 + 280}
    world.publish(document, round_started=RoundStarted(round_index=3))
    world.publish(document, progress=RoundProgress(steps_done=2, local_steps=4))
    assert world.sections()["jobs"][0]["done"] == 0.35
    document.num_rounds_committed = 10
    [status] = world.sections()["jobs"]
    assert status["done"] == 1 and "ends" not in status


def test_client_gets_its_job_with_the_clusters_that_it_asks_for(world: World) -> None:
    document = world.submit()
    pipeline = begin_round(world, document, hosts())
    for index in range(1, 3):
        world.registry.register(
            Host(host_id=f"device-{index}-0", role=DEVICE_AGENT, cluster_index=index)
        )
    world.queued.append(world.submit(scheduler_pb2.JOB_STATE_QUEUED).job_id)
    found = json.loads(json.dumps(world.snapshots.of_job(document.job_id), allow_nan=False))
    assert found["status"]["id"] == document.job_id and found["status"]["ends_by"] == "the plan"
    assert [host["id"] for host in found["details"]["0"]["pipeline"]] == pipeline
    assert found["details"].keys() == {"0"}
    assert 0 < found["job"]["held_back"][0]["share"] <= 1
    assert found["now"] > 0 and "events" not in found["job"]
    assert world.snapshots.of_job(document.job_id, [7]) == world.snapshots.of_job(
        document.job_id
    ) | {"now": pytest.approx(found["now"], abs=60)}
    with pytest.raises(NotFoundError):
        world.snapshots.of_job("unknown")


def test_client_of_a_job_that_is_deleted_meanwhile_gets_no_other_job(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended = [world.submit(scheduler_pb2.JOB_STATE_CANCELLED).job_id for _ in range(2)]
    read = world.snapshots.sections

    def sections(focus: Focus) -> Any:
        world.jobs.delete(focus.job_id, "a test")
        return read(focus)

    monkeypatch.setattr(world.snapshots, "sections", sections)
    for job_id in ended:  # After the second, there is no job at all.
        with pytest.raises(NotFoundError, match=job_id):
            world.snapshots.of_job(job_id)


def test_kept_plan_of_a_cluster_is_not_told_with_the_prediction_of_another_one(
    world: World,
) -> None:
    document = world.submit()
    pipeline = begin_round(world, document, hosts())
    assert world.sections()["job"]["held_back"]
    record = world.jobs.round(document.job_id, 0)
    for cluster in record.decision["prediction"]["clusters"]:
        cluster["bottleneck"] = f"stage {len(pipeline)}"
        cluster["stages"].append({**cluster["stages"][-1], "host_id": "device-9"})
    world.jobs.save_round(document.job_id, 0, record)
    world.snapshots = Snapshots(
        world.registry, world.jobs, world, RateReader(Telemetry(world.source, 1.0), world.registry)
    )
    sections = world.sections()
    assert sections["job"]["held_back"] == []
    assert sections["details"]["0"]["bottleneck"] is None


def test_visitors_do_not_wait_while_one_waits_for_the_rates(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, answered = threading.Event(), threading.Event()

    def window(start: float, end: float) -> list[Series]:
        asked.set()
        assert answered.wait(LIMIT_SECONDS)
        return []

    monkeypatch.setattr(world.source, "window", window)
    with ThreadPoolExecutor(2) as visitors:
        first = visitors.submit(world.sections)
        try:
            assert asked.wait(LIMIT_SECONDS)
            assert visitors.submit(world.sections).result(LIMIT_SECONDS)["jobs"] == []
            assert not first.done()
        finally:
            answered.set()
        assert first.result(LIMIT_SECONDS)["jobs"] == []


def test_warnings_notes_and_changes_of_plans_are_among_the_events(world: World) -> None:
    document = world.submit()
    code = scheduler_pb2.WARNING_CODE_FLAT_LOSS
    warning = scheduler_pb2.JobWarning(code=code, message="it stays", advice="change it")
    world.publish(document, warning=warning)
    world.publish(document, data_note=scheduler_pb2.DataNote(message="9 rows are held out"))
    world.publish(document, round_started=RoundStarted(change="device-1 takes block 2"))
    without = RoundCommitted(num_rounds=1, round_seconds=2.0, late_clusters=[0, 2])
    world.publish(document, round_committed=without)
    told = [(each["kind"], each["text"]) for each in world.sections()["job"]["events"]]
    assert told == [
        ("FLAT_LOSS", "it stays: change it"),
        ("data_note", "9 rows are held out"),
        ("round_started", "round 1 starts: device-1 takes block 2"),
        ("round_committed", "round 1 is committed after 2.0 s without clusters 0, 2"),
    ]


def test_warning_of_one_answer_goes_with_the_next_evaluation_that_differs(world: World) -> None:
    document = world.submit()
    for code in (
        scheduler_pb2.WARNING_CODE_FEW_ROWS,
        scheduler_pb2.WARNING_CODE_ONE_CLASS,
    ):
        world.publish(document, warning=scheduler_pb2.JobWarning(code=code, message="look"))
    kinds = []
    for is_one in (True, False):
        world.publish(document, evaluation=Evaluation(num_rounds=4, one_answer=is_one))
        kinds.append([each["kind"] for each in world.sections()["job"]["warnings"]])
    assert kinds == [["FEW_ROWS", "ONE_CLASS"], ["FEW_ROWS"]]


@pytest.mark.parametrize(
    ("rounds", "round_seconds", "words"),
    [
        (10, [], "time left not known yet"),
        (10, [5.0], "less than 1 min left"),
        (10, [100.0], "about 15 min left"),
        (10, [3600.0], "about 9 h left"),
        (1, [3600.0], "only its last evaluation is left"),
    ],
)
def test_time_left_is_told_in_words(
    world: World, rounds: int, round_seconds: list[float], words: str
) -> None:
    document = world.submit(rounds=rounds)
    for seconds in round_seconds:
        world.publish(document, round_started=RoundStarted(round_index=0))
        world.publish(document, round_committed=RoundCommitted(num_rounds=1, round_seconds=seconds))
        document.num_rounds_committed += 1
    log = world.logs[document.job_id]
    assert job_values.WatchedJob.of(document, log).say_left() == words


def test_before_the_first_commit_the_end_is_that_of_the_plan(world: World) -> None:
    document = world.submit(rounds=2)
    begin_round(world, document, hosts())
    [status] = world.sections()["jobs"]
    assert status["ends_by"] == "the plan" and math.isfinite(status["ends"]["middle"])


def test_record_of_the_next_attempt_is_not_taken_for_the_present_one(world: World) -> None:
    document = world.submit()
    begin_round(world, document, hosts())
    record = world.jobs.round(document.job_id, 0)
    record.attempt = 1
    for cluster in record.decision["prediction"]["clusters"]:
        cluster["bottleneck"] = "stage 9"
    world.jobs.save_round(document.job_id, 0, record)
    sections = world.sections()
    assert sections["details"]["0"]["bottleneck"] is None and sections["job"]["held_back"] == []


def test_queue_positions_and_the_job_that_is_shown_first(world: World) -> None:
    running = world.submit()
    waiting = [world.submit(scheduler_pb2.JOB_STATE_QUEUED) for _ in range(2)]
    ended = world.submit(scheduler_pb2.JOB_STATE_FAILED)
    world.queued = [one.job_id for one in waiting]
    sections = world.sections()
    positions = {one["id"]: one.get("queue_position") for one in sections["jobs"]}
    assert positions == {
        running.job_id: None,
        waiting[0].job_id: 1,
        waiting[1].job_id: 2,
        ended.job_id: None,
    }
    assert sections["job"]["id"] == running.job_id == sections["jobs"][0]["id"]
    assert world.sections(ended.job_id)["job"]["id"] == ended.job_id


def test_values_that_json_lacks_and_long_words_of_hosts_do_no_harm(world: World) -> None:
    world.registry.register(Host(host_id="control-unit-0", role=CONTROL_UNIT))
    document = world.submit()
    progress = RoundProgress(loss=math.nan, samples_per_second=math.inf, waiting_for="w" * 5000)
    world.publish(document, progress=progress)
    world.publish(
        document, incident=Incident(code=scheduler_pb2.INCIDENT_CODE_HOST_LOST, message="m" * 5000)
    )
    sections = world.sections()
    [cluster], shown = sections["clusters"], sections["job"]
    assert shown["loss"] is None and cluster["samples_per_second"] is None
    assert len(cluster["waiting_for"]) == len(shown["events"][0]["text"]) == 400
    assert shown["events"][0]["kind"] == "HOST_LOST"


@pytest.mark.parametrize(
    ("may", "expected"),
    [(lambda owner: owner == "client:me", None), (lambda owner: False, NotPermittedError)],
)
def test_only_whom_the_owner_allows_cancels(
    world: World, may: Callable[[str], bool], expected: type[Exception] | None
) -> None:
    document = world.submit()
    if expected is None:
        world.snapshots.cancel(document.job_id, may)
        assert world.cancelled == [document.job_id]
    else:
        with pytest.raises(expected, match="belongs to client:me"):
            world.snapshots.cancel(document.job_id, may)
        assert not world.cancelled
    with pytest.raises(NotFoundError):
        world.snapshots.cancel("nothing", may)


def test_events_of_ordinary_rounds_do_not_hide_rare_ones(world: World) -> None:
    document = world.submit()
    lost = Incident(code=scheduler_pb2.INCIDENT_CODE_HOST_LOST, message="device-0 is lost")
    world.publish(document, incident=lost)
    for number in range(1, 101):
        world.publish(document, round_committed=RoundCommitted(num_rounds=number))
    first, *others = world.sections()["job"]["events"]
    assert first["text"] == "device-0 is lost"
    assert len(others) == 20 and others[-1]["text"].startswith("round 100 is committed")


def test_chosen_job_is_listed_even_if_there_are_too_many(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(snapshot, "MOST_JOBS", 1)
    oldest = world.submit(scheduler_pb2.JOB_STATE_QUEUED)
    newest = world.submit()
    world.queued.append(oldest.job_id)
    assert [each["id"] for each in world.sections()["jobs"]] == [newest.job_id]
    chosen = world.sections(oldest.job_id)["jobs"][-1]
    assert (chosen["id"], chosen["queue_position"]) == (oldest.job_id, 1)


def test_job_tells_which_clusters_it_uses_unless_they_are_the_first_ones() -> None:
    plain = job()
    moved = plain.model_copy(update={"use_clusters": [3]})
    clusters = []
    for config in (plain, moved):
        document = JobDocument(job_id="a", number=1, config_json=config.to_json(), owner="")
        clusters.append(status_of(document, ())["host_clusters"])
    assert clusters == [None, [3]]


def test_busy_share_counts_every_slice() -> None:
    predicted = {"mini_batch_seconds": 4.0, "bottleneck_seconds": 0.25}
    plan = plan_pb2.Plan(num_micro_batches=2, num_slices=4)
    assert snapshot._busy_share(predicted, plan) == 0.5
    assert snapshot._busy_share(predicted, plan_pb2.Plan(num_micro_batches=2)) == 0.12
