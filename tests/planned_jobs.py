"""A job, its hosts and their telemetry, a planner, and gRPC servers, for tests of the scheduler."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from collapipe.errors import PeerLostError
from collapipe.job import JobConfig
from collapipe.planning.decisions import RoundDecision
from collapipe.planning.job_hosts import ClusterHosts, JobHosts
from collapipe.planning.knowledge import HostKnowledge, Knowledge, LinkKnowledge
from collapipe.planning.planner_state import PlannerState
from collapipe.planning.round_problem import ModelSizes, link_pairs
from collapipe.rpc import Security, serve
from collapipe.scheduler.events import Event, EventLog
from collapipe.scheduler.host_registry import CONTROL_UNIT, DEVICE_AGENT, EDGE_SERVER
from collapipe.scheduler.planner import Planner
from collapipe.scheduler.telemetry_window import Telemetry
from collapipe.telemetry.sources import Series
from collapipe.v1 import job_pb2, plan_pb2
from collapipe.v1.scheduler_pb2 import Host

NO_STATE = PlannerState(strategy="dssra", knowledge=Knowledge(), current_plans=())
"""The state of a planner that has learnt nothing."""

SIZES = ModelSizes(
    num_blocks=6, unit_bytes=(1000, *[4000] * 6, 2000), frozen_bytes=(0,) * 8, hidden_size=64
)


def job(
    training: Mapping[str, Any] | None = None,
    more: Mapping[str, Any] | None = None,
    **schedule: Any,
) -> JobConfig:
    """Makes a job. `more` has settings outside of its sections `training` and `schedule`."""
    return JobConfig.model_validate(
        {
            "task": {"kind": "classification"},
            "training": {"mini_batch": 16, "local_steps": 5, **(training or {})},
            "schedule": {"strategy": "dssra", "num_micro_batches": 4, **schedule},
            **(more or {}),
        }
    )


def hosts(num_devices: int = 3, budget_joules: float = 0.0) -> JobHosts:
    def host(host_id: str, role: Any, **more: Any) -> Host:
        address = f"{host_id}:1"
        return Host(
            host_id=host_id, role=role, address=address, metrics_address=f"{host_id}:2", **more
        )

    devices = [
        host(f"device-{k}", DEVICE_AGENT, energy_budget_joules=budget_joules * (k == 0))
        for k in range(num_devices)
    ]
    cluster = ClusterHosts(host("control-unit", CONTROL_UNIT), tuple(devices))
    return JobHosts(host("edge-server", EDGE_SERVER), (cluster,))


def knowledge(
    of: JobHosts, seconds: Sequence[float] = (0.01, 0.01, 0.01), rate_bps: float = 1e8
) -> Knowledge:
    cluster = of.clusters[0]
    known = {
        device.host_id: HostKnowledge(seconds_per_sample=each, source="profile", busy_watts=2.0)
        for device, each in zip(cluster.devices, seconds, strict=True)
    }
    links = {
        f"{sender}>{receiver}": LinkKnowledge(capacity_bps=rate_bps, round_trip_seconds=0.001)
        for sender, receiver in link_pairs(cluster, of.edge_server)
    }
    return Knowledge(
        hosts=known,
        links=links,
        block_state_bytes=16000,
        block_stash_bytes=3000,
        activation_bytes=10000.0,
    )


@dataclass
class Source:
    """A telemetry source whose answer a test sets; without an answer it is down."""

    name: str = "scripted"
    instance_field: str = "metrics_address"
    max_gap_seconds: float = 0.0
    pass_seconds: float = 0.0
    series: Sequence[Series] | None = None
    asked: list[tuple[float, float]] = field(default_factory=list)
    now: Callable[[], float] = time.time

    def window(self, start: float, end: float) -> Sequence[Series]:
        self.asked.append((start, end))
        if self.series is None:
            raise PeerLostError("prometheus", "prometheus is down: start it")
        return self.series

    def close(self) -> None:
        pass


class Clock:
    """A clock that a test sets."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def measured(
    of: JobHosts,
    seconds: Sequence[float],
    start: float,
    end: float,
    blocks: int = 2,
    on_control_unit: float = 0.0,
) -> list[Series]:
    """Telemetry of 20 micro-batches with 4 samples. `seconds` are those of a block and sample, by device.

    If the control unit runs blocks, too, `on_control_unit` are the seconds of its blocks.
    """
    listed = [of.clusters[0].control_unit, *of.clusters[0].devices, of.edge_server]
    found = []
    for stage, (host, each) in enumerate(zip(listed, (0.001, *seconds, 0.002), strict=True)):
        is_device = 0 < stage < len(listed) - 1
        num_blocks = blocks * (is_device or (stage == 0 and on_control_unit > 0))
        end_seconds = 80 * each * (not is_device)
        seconds_in_all = 80 * num_blocks * (each if is_device else on_control_unit) + end_seconds
        counters = {
            "collapipe_stage_forward_seconds_sum": seconds_in_all / 3,
            "collapipe_stage_backward_seconds_sum": 2 * seconds_in_all / 3,
            "collapipe_stage_backward_seconds_count": 20.0,
            "collapipe_stage_block_samples_total": 80.0 * num_blocks,
            "collapipe_stage_end_unit_seconds_total": end_seconds,
            "collapipe_stage_samples_total": 80.0,
        }
        labels = (("cluster", "0"), ("stage", str(stage)))
        for name, value in counters.items():
            times = [start + (end - start) * share for share in (0, 0.25, 0.5, 0.75, 1)]
            points = tuple((at, value * (at - start) / (end - start)) for at in times)
            found.append(Series(host.metrics_address, name, labels, points))
    return found


def summary(
    of: JobHosts, busy_seconds: float = 1.0, pushed_seconds: Mapping[str, float] | None = None
) -> job_pb2.RoundSummary:
    """A round in which every host computed for `busy_seconds`, and some devices pushed 24 kB each."""
    result = job_pb2.RoundSummary(training_seconds=4.0, gather_seconds=0.5, configure_seconds=0.2)
    for host in (of.clusters[0].control_unit, *of.clusters[0].devices, of.edge_server):
        report = result.stages.add(host_id=host.host_id)
        report.times.forward_seconds = busy_seconds / 3
        report.times.backward_seconds = 2 * busy_seconds / 3
    for host_id, seconds in (pushed_seconds or {}).items():
        result.pushed.add(host_id=host_id, bytes=24000, seconds=seconds)
    return result


class Rounds:
    """A planner, and rounds with its plans. A round lasts 10 s unless a test says otherwise."""

    def __init__(
        self,
        of: JobHosts | None = None,
        known: Knowledge | None = None,
        config: JobConfig | None = None,
        **options: Any,
    ) -> None:
        self.hosts = of or hosts()
        self.clock = Clock()
        self.source = Source(now=self.clock)
        telemetry = Telemetry(self.source, 1.0)
        known = known or knowledge(self.hosts)
        self.planner = Planner(config or job(), SIZES, self.hosts, known, telemetry, **options)

    @property
    def known(self) -> Knowledge:
        return self.planner.state().knowledge

    def decide(
        self, round_index: int = 0, earlier: Sequence[plan_pb2.Plan] = ()
    ) -> tuple[list[plan_pb2.Plan], RoundDecision]:
        return self.planner.decide(round_index, earlier)

    def run(
        self, round_index: int = 0, result: job_pb2.RoundSummary | None = None, **options: Any
    ) -> RoundDecision:
        _, decision = self.decide(round_index)
        self.commit(decision, result, **options)
        return decision

    def commit(
        self,
        decision: RoundDecision,
        result: job_pb2.RoundSummary | None = None,
        seconds: float = 10.0,
        is_typical: bool = True,
    ) -> None:
        self.planner.round_started(decision)
        self.clock.now += seconds
        results = [summary(self.hosts) if result is None else result]
        self.planner.round_committed(decision, results, seconds, is_typical=is_typical)

    def measure(self, *seconds: float, on_control_unit: float = 0.0) -> list[Series]:
        """Lets the telemetry of the last 10 s have these times of a block, by device. Returns the telemetry."""
        now = self.clock.now
        series = measured(self.hosts, seconds, now - 10, now, on_control_unit=on_control_unit)
        self.source.series = series
        return series


def published(log: EventLog) -> list[Event]:
    """Closes a log of events, and returns them."""
    log.close()
    return [event for event in log.watch(20.0) if event is not None]


@contextmanager
def serving(servicer: Any, add: Callable[[Any, Any], None]) -> Iterator[str]:
    """Serves one gRPC service in plain text, and yields its address."""
    server = serve("127.0.0.1:0", Security.insecure(), lambda server, _: add(servicer, server))
    try:
        yield server.address
    finally:
        server.drain(0)
