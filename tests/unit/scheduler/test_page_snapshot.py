"""What the page shows of the present: whole for few hosts, summed up for many, and always within bounds."""

import json
import math
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import pytest
from planned_jobs import Clock, Rounds, Source, hosts, job

from collapipe.errors import NotFoundError, NotPermittedError
from collapipe.planning.job_hosts import JobHosts
from collapipe.scheduler.events import Event, EventLog
from collapipe.scheduler.host_registry import (
    CONTROL_UNIT,
    DEVICE_AGENT,
    EDGE_SERVER,
    SILENCE_SECONDS,
    HostRegistry,
)
from collapipe.scheduler.job_documents import JobDocument, RoundDocument
from collapipe.scheduler.job_store import JobStore
from collapipe.scheduler.telemetry_window import Telemetry
from collapipe.scheduler.web import job_values, snapshot
from collapipe.scheduler.web.job_values import status_of
from collapipe.scheduler.web.rates import RateReader
from collapipe.scheduler.web.snapshot import MOST_CLUSTERS, MOST_DETAILED, Focus, Snapshots
from collapipe.telemetry.sources import Series
from collapipe.v1 import plan_pb2, scheduler_pb2
from collapipe.v1.job_pb2 import Evaluation, RoundProgress
from collapipe.v1.scheduler_pb2 import Host, Incident, RoundCommitted, RoundStarted

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
        self.source.now = self.clock
        self.registry = HostRegistry(self.clock)
        self.snapshots = self.read()

    def read(self) -> Snapshots:
        rates = RateReader(Telemetry(self.source, 1.0), self.registry)
        return Snapshots(self.registry, self.jobs, self, rates)

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

    def commit(self, document: JobDocument, *round_seconds: float) -> None:
        """Publishes rounds from the first one on."""
        for index, seconds in enumerate(round_seconds):
            self.publish(document, round_started=RoundStarted(round_index=index))
            committed = RoundCommitted(num_rounds=index + 1, round_seconds=seconds)
            self.publish(document, round_committed=committed)
        document.num_rounds_committed = len(round_seconds)

    def register(self, host_id: str, role: Any = DEVICE_AGENT, cluster: int = 0) -> None:
        self.registry.register(Host(host_id=host_id, role=role, cluster_index=cluster))


@pytest.fixture
def world(store: JobStore, monkeypatch: pytest.MonkeyPatch) -> World:
    monkeypatch.setattr(snapshot, "_FRESH_SECONDS", -1.0)
    return World(store)


@pytest.fixture
def document(world: World) -> JobDocument:
    """A job that runs."""
    return world.submit()


def begin_round(world: World, document: JobDocument, of: JobHosts) -> list[str]:
    """Registers hosts, and decides and begins the first round of a job. Returns the pipeline."""
    for host in of.by_id.values():
        world.registry.register(host)
    plans, decision = Rounds(of).decide()
    record = RoundDocument(attempt=0, plans=plans, decision=decision.to_json(), total_steps=1)
    world.jobs.save_round(document.job_id, 0, record)
    world.publish(document, round_started=RoundStarted(plans=plans))
    return [stage.host_id for stage in plans[0].stages]


def test_few_hosts_are_told_in_the_order_of_stages(world: World, document: JobDocument) -> None:
    of = hosts()
    of.devices[0].memory_bytes = 10**9
    pipeline = begin_round(world, document, of)
    at = world.clock.now
    link = (("link", f"{pipeline[0]}>{pipeline[1]}"),)
    receiver = of.by_id[pipeline[1]].metrics_address
    world.source.series = [
        Series(receiver, name, labels, points)
        for name, labels, points in (
            ("collapipe_link_transfer_bytes_total", link, ((at - 4, 0.0), (at, 5e5))),
            ("collapipe_stage_forward_seconds_sum", (), ((at - 4, 1.0), (at, 3.0))),
            ("collapipe_process_peak_resident_memory_bytes", (), ((at, 4e8),)),
        )
    ]
    sections = world.sections()
    detail = sections["details"]["0"]
    assert [host["id"] for host in detail["pipeline"]] == pipeline
    first, second, *_, last = detail["pipeline"]
    assert (first["units"], last["units"]) == ("embedding", "head")
    assert (second["state"], second["busy"], second["memory_bytes"]) == ("working", 0.5, 4e8)
    assert second["needs_bytes"] > 0
    assert (detail["links"][0]["from"], detail["links"][0]["to"]) == tuple(pipeline[:2])
    assert detail["links"][0]["forward_bps"] == 1e6
    kind, number = detail["bottleneck"].split()
    [held_back] = sections["job"]["held_back"]
    assert kind == "stage" and pipeline[int(number)] in held_back["by"]
    unused = {host["id"] for host in detail["others"]}
    assert unused == of.by_id.keys() - set(pipeline) and len(detail["links"]) == len(pipeline) - 1
    [status] = sections["jobs"]
    assert status["ends_by"] == "the plan" and math.isfinite(status["ends"]["middle"])


def test_words_of_hosts_reach_the_page_short_and_in_one_direction(
    world: World, document: JobDocument
) -> None:
    words = "\u202e\x1b" + "w" * 100_000
    document.message = document.trouble.failure = words
    document.trouble.num_failures = 1
    for number in range(1000):
        document.trouble.missing.add(host_id=f"device-{number}", left_out=words)
    sections = world.sections()
    assert sections["jobs"][0]["message"].startswith(r"\u202e\x1bww")
    trouble = sections["job"]["trouble"]
    assert len(trouble) == 10 and "992 more hosts" in trouble[8] and "\u202e" not in str(trouble)
    assert len(json.dumps(sections)) < 32_768


def test_lost_host_has_the_time_when_it_was_seen(world: World, document: JobDocument) -> None:
    of = hosts()
    pipeline = begin_round(world, document, of)
    world.clock.now += SILENCE_SECONDS + 1
    for host_id in of.by_id.keys() - {pipeline[1]}:
        world.registry.heartbeat(host_id, "")
    sections = world.sections()
    shown = sections["details"]["0"]["pipeline"]
    lost = [host["id"] for host in shown if host["state"] != "working"]
    assert (lost, shown[1]["state"]) == ([pipeline[1]], "lost")
    assert shown[1]["last_seen"] > 0
    assert sections["clusters"][0]["lost"] == 1


def test_host_without_shaped_links_says_why_as_long_as_it_is_alive(
    world: World, document: JobDocument
) -> None:
    pipeline = begin_round(world, document, hosts())

    def told() -> list[str | None]:
        return [host.get("unshaped") for host in world.sections()["details"]["0"]["pipeline"][:2]]

    assert told() == [None, None]
    world.registry.heartbeat(pipeline[1], "", "this kernel has no netem")
    assert told() == [None, "this kernel has no netem"]
    world.clock.now += SILENCE_SECONDS + 1
    assert told() == [None, None]


def test_a_thousand_devices_are_summed_up(world: World) -> None:
    for cluster in range(250):
        world.register(f"control-unit-{cluster}", CONTROL_UNIT, cluster)
        for device in range(10):
            world.register(f"device-{cluster}-{device}", cluster=cluster)
    world.register("edge-server", EDGE_SERVER)
    sections = world.sections()
    assert sections["counts"]["unreadable"] == 0
    assert sections["details"] == {} and len(sections["clusters"]) == MOST_CLUSTERS
    assert sections["counts"]["clusters"] == 250 and sections["counts"]["devices"] == 2500
    counted = {"working": 0, "idle": 11, "lost": 0, "suspected": 0}
    assert sections["clusters"][3] == {"index": 3, **counted}
    assert len(json.dumps(sections)) < 32_768
    chosen = world.sections("", *range(100, 120), 999)["details"]
    assert list(chosen) == [str(index) for index in range(100, 100 + MOST_DETAILED)]
    assert len(json.dumps(chosen)) < 65_536
    # Of many hosts in a cluster, lost ones come first.
    for device in range(200):
        world.register(f"device-{device}")
    world.registry.suspect("device-199", "device-3 could not reach it")
    detail = world.sections("", 0)["details"]["0"]
    assert detail["others"][0]["id"] == "device-199" and detail["others"][0]["state"] == "lost"
    assert len(detail["others"]) + detail["more"] == 211


def test_time_of_the_end_has_a_spread(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job_values.time, "time", lambda: 5000.0)
    document = world.submit(rounds=10)
    world.commit(document, 20.0, 10.0, 40.0)
    [status] = world.sections()["jobs"]
    assert status["ends"] == {"low": 5000 + 70, "middle": 5000 + 140, "high": 5000 + 280}
    world.publish(document, round_started=RoundStarted(round_index=3))
    world.publish(document, progress=RoundProgress(steps_done=2, local_steps=4))
    assert world.sections()["jobs"][0]["done"] == 0.35
    document.num_rounds_committed = 10
    [status] = world.sections()["jobs"]
    assert status["done"] == 1 and "ends" not in status


def test_client_gets_its_job_and_some_clusters(world: World, document: JobDocument) -> None:
    pipeline = begin_round(world, document, hosts())
    for index in range(1, 3):
        world.register(f"device-{index}-0", cluster=index)
    world.queued.append(world.submit(scheduler_pb2.JOB_STATE_QUEUED).job_id)
    found = json.loads(json.dumps(world.snapshots.of_job(document.job_id), allow_nan=False))
    assert found["status"]["id"] == document.job_id and found["status"]["ends_by"] == "the plan"
    assert [host["id"] for host in found["details"]["0"]["pipeline"]] == pipeline
    assert found["details"].keys() == {"0"}
    assert 0 < found["job"]["held_back"][0]["share"] <= 1
    assert found["now"] > 0 and "events" not in found["job"]
    again, seventh = (world.snapshots.of_job(document.job_id, listed) for listed in ([], [7]))
    assert seventh | {"now": 0} == again | {"now": 0}
    with pytest.raises(NotFoundError):
        world.snapshots.of_job("unknown")


def test_deleted_job_is_not_replaced(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    ended = [world.submit(scheduler_pb2.JOB_STATE_CANCELLED).job_id for _ in range(2)]
    read = world.snapshots.sections

    def sections(focus: Focus) -> Any:
        world.jobs.delete(focus.job_id, "a test")
        return read(focus)

    monkeypatch.setattr(world.snapshots, "sections", sections)
    for job_id in ended:  # After the second, there is no job at all.
        with pytest.raises(NotFoundError, match=job_id):
            world.snapshots.of_job(job_id)


@pytest.mark.parametrize("of_next_attempt", [False, True])
def test_record_of_other_plans_or_of_the_next_attempt_predicts_nothing_for_the_present_plan(
    world: World, document: JobDocument, of_next_attempt: bool
) -> None:
    pipeline = begin_round(world, document, hosts())
    record = world.jobs.round(document.job_id, 0)
    if of_next_attempt:
        record.attempt = 1
    else:
        assert world.sections()["job"]["held_back"]
        [cluster] = record.decision["prediction"]["clusters"]
        cluster["bottleneck"] = f"stage {len(pipeline)}"
        cluster["stages"].append({**cluster["stages"][-1], "host_id": "device-9"})
        world.snapshots = world.read()
    world.jobs.save_round(document.job_id, 0, record)
    sections = world.sections()
    assert sections["details"]["0"]["bottleneck"] is None and sections["job"]["held_back"] == []


def test_only_one_visitor_waits_for_the_rates(
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


def test_warnings_and_changes_are_among_the_events(world: World, document: JobDocument) -> None:
    code = scheduler_pb2.WARNING_CODE_FLAT_LOSS
    warning = scheduler_pb2.JobWarning(code=code, message="it stays", advice="change it")
    world.publish(document, warning=warning)
    for message, is_warning in (("9 rows are held out", False), ("2 rows contradict", True)):
        note = scheduler_pb2.DataNote(message=message, is_warning=is_warning)
        world.publish(document, data_note=note)
    world.publish(document, round_started=RoundStarted(change="device-1 takes block 2"))
    without = RoundCommitted(num_rounds=1, round_seconds=2.0, late_clusters=[0, 2])
    world.publish(document, round_committed=without)
    told = [(each["kind"], each["text"]) for each in world.sections()["job"]["events"]]
    assert told == [
        ("FLAT_LOSS", "it stays: change it"),
        ("data_note", "9 rows are held out"),
        ("warning", "2 rows contradict"),
        ("round_started", "round 1 starts: device-1 takes block 2"),
        ("round_committed", "round 1 is committed after 2.0 s without clusters 0, 2"),
    ]


def test_warning_goes_if_an_evaluation_differs(world: World, document: JobDocument) -> None:
    few_rows, one_class = (
        scheduler_pb2.JobWarning(code=code, message="look")
        for code in (scheduler_pb2.WARNING_CODE_FEW_ROWS, scheduler_pb2.WARNING_CODE_ONE_CLASS)
    )
    world.publish(document, warning=few_rows)
    world.publish(document, warning=one_class)
    for is_one, expected in ((True, ["FEW_ROWS", "ONE_CLASS"]), (False, ["FEW_ROWS"])):
        world.publish(document, evaluation=Evaluation(num_rounds=4, one_answer=is_one))
        assert [each["kind"] for each in world.sections()["job"]["warnings"]] == expected


@pytest.mark.parametrize(
    ("rounds", "round_seconds", "words"),
    [
        (10, [], "not known"),
        (10, [5.0], "less than 1 min"),
        (10, [100.0], "15 min"),
        (10, [3600.0], "9 h"),
        (1, [3600.0], "evaluation"),
    ],
)
def test_time_left_in_words(
    world: World, rounds: int, round_seconds: list[float], words: str
) -> None:
    document = world.submit(rounds=rounds)
    world.commit(document, *round_seconds)
    log = world.logs[document.job_id]
    assert words in job_values.WatchedJob.of(document, log).say_left()


def test_queue_positions_and_the_jobs_that_are_shown_first_or_because_they_are_chosen(
    world: World, document: JobDocument, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = (world.submit(scheduler_pb2.JOB_STATE_QUEUED).job_id for _ in range(2))
    ended = world.submit(scheduler_pb2.JOB_STATE_FAILED).job_id
    world.queued = [first, second]
    sections = world.sections()
    positions = {one["id"]: one.get("queue_position") for one in sections["jobs"]}
    assert positions == {document.job_id: None, first: 1, second: 2, ended: None}
    assert sections["job"]["id"] == document.job_id == sections["jobs"][0]["id"]
    assert world.sections(ended)["job"]["id"] == ended
    monkeypatch.setattr(snapshot, "MOST_JOBS", 1)
    assert [each["id"] for each in world.sections()["jobs"]] == [document.job_id]
    chosen = world.sections(second)["jobs"][-1]
    assert (chosen["id"], chosen["queue_position"]) == (second, 2)


def test_odd_values_and_long_words_do_no_harm(world: World, document: JobDocument) -> None:
    world.register("control-unit-0", CONTROL_UNIT)
    progress = RoundProgress(loss=math.nan, samples_per_second=math.inf, waiting_for="w" * 5000)
    world.publish(document, progress=progress)
    lost = Incident(code=scheduler_pb2.INCIDENT_CODE_HOST_LOST, message="m" * 5000)
    world.publish(document, incident=lost)
    sections = world.sections()
    [cluster], shown = sections["clusters"], sections["job"]
    assert shown["loss"] is None and cluster["samples_per_second"] is None
    assert len(cluster["waiting_for"]) == len(shown["events"][0]["text"]) == 400
    assert shown["events"][0]["kind"] == "HOST_LOST"


def test_only_whom_the_owner_allows_cancels(world: World, document: JobDocument) -> None:
    with pytest.raises(NotPermittedError, match="client:me"):
        world.snapshots.cancel(document.job_id, lambda owner: False)
    with pytest.raises(NotFoundError):
        world.snapshots.cancel("nothing", lambda owner: True)
    assert not world.cancelled
    world.snapshots.cancel(document.job_id, lambda owner: owner == "client:me")
    assert world.cancelled == [document.job_id]


def test_ordinary_rounds_do_not_hide_rare_events(world: World, document: JobDocument) -> None:
    lost = Incident(code=scheduler_pb2.INCIDENT_CODE_HOST_LOST, message="device-0 is lost")
    world.publish(document, incident=lost)
    for number in range(1, 101):
        world.publish(document, round_committed=RoundCommitted(num_rounds=number))
    first, *others = world.sections()["job"]["events"]
    assert first["text"] == "device-0 is lost"
    assert len(others) == 20 and others[-1]["text"].startswith("round 100 is committed")


def test_job_tells_which_clusters_it_uses_unless_they_are_the_first_ones() -> None:
    for config, told in ((job(), None), (job(more={"use_clusters": [3]}), [3])):
        document = JobDocument(job_id="a", number=1, config_json=config.to_json(), owner="")
        assert status_of(document, ())["host_clusters"] == told


LINKS = [
    {"limit_bps": 1e6, "forward_bps": 9e5, "backward_bps": None},
    {"limit_bps": None, "forward_bps": 5e7, "backward_bps": 5e7},
]


@pytest.mark.parametrize(
    ("predicted", "busy", "found"),
    [
        (
            "stage 1",
            (0.2, 0.52, 0.95),
            ("stage 2", 0.95),
        ),  # The busiest host, not the predicted one.
        ("stage 1", (0.2, 0.95, 0.95), ("stage 1", 0.95)),
        ("edge server", (0.2, 0.95, 0.95), ("stage 2", 0.95)),
        ("stage 1", (0.2, 0.52, 0.78), ("forward link 0", 0.9)),
        ("link 0", (0.2, 0.52, 0.78), ("link 0", 0.9)),
        ("link 1", (0.2, 0.52, 0.78), ("link 1", None)),  # Its limit is not known.
        ("window 0", (0.2, 0.52, 0.78), ("window 0", None)),
        ("stage 1", (0.2, None, 0.78), ("stage 1", None)),
        (None, (0.2, 0.52, 0.78), (None, None)),
    ],
)
def test_bottleneck_is_the_part_with_the_largest_share_that_is_shown(
    predicted: str | None,
    busy: tuple[float | None, ...],
    found: tuple[str | None, float | None],
) -> None:
    assert snapshot.bottleneck_of(predicted, [{"busy": each} for each in busy], LINKS) == found


@pytest.mark.parametrize(
    ("forward", "backward", "predicted", "found"),
    [
        (1e5, 9e5, "stage 0", ("backward link 0", 0.9)),
        (9e5, 1e5, "stage 0", ("forward link 0", 0.9)),
        (1e5, 9e5, "forward link 0", ("backward link 0", 0.9)),
        (1e5, 9e5, "link 0", ("link 0", 0.9)),
        (None, 9e5, "forward link 0", ("forward link 0", None)),
    ],
)
def test_bottleneck_is_the_direction_of_a_link_that_has_the_share(
    forward: float | None, backward: float, predicted: str, found: tuple[str, float | None]
) -> None:
    link = {"limit_bps": 1e6, "forward_bps": forward, "backward_bps": backward}
    assert snapshot.bottleneck_of(predicted, [{"busy": 0.5}, {"busy": 0.6}], [link]) == found


def test_page_names_the_host_with_the_longest_bar(world: World, document: JobDocument) -> None:
    of = hosts()
    pipeline = begin_round(world, document, of)
    at = world.clock.now
    world.source.series = [
        Series(
            of.by_id[host_id].metrics_address,
            "collapipe_stage_forward_seconds_sum",
            (),
            ((at - 4, 1.0), (at, 1.0 + 4 * share)),
        )
        for host_id, share in zip(pipeline, (0.1, 0.3, 0.2, 0.78, 0.4), strict=False)
    ]
    sections = world.sections()
    bars = {host["id"]: host["busy"] for host in sections["details"]["0"]["pipeline"]}
    busiest = max(bars, key=lambda host_id: bars[host_id] or 0)
    [held_back] = sections["job"]["held_back"]
    assert held_back["share"] == bars[busiest] and held_back["is_measured"]
    assert held_back["by"] == f"the processor of {busiest}"


def test_busy_share_counts_every_slice() -> None:
    predicted = {"mini_batch_seconds": 4.0, "bottleneck_seconds": 0.25}
    for num_slices, share in ((4, 0.5), (0, 0.12)):
        plan = plan_pb2.Plan(num_micro_batches=2, num_slices=num_slices)
        assert snapshot._busy_share(predicted, plan) == share
