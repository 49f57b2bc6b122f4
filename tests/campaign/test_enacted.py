"""Tests that the scheduler decides from a real Prometheus, and that hosts run what it decides."""

import itertools
import json
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import pytest
from prometheus_server import INTERVAL_SECONDS, running_prometheus

from collapipe.allocation.round_model.problem import RadioLink, WiredLink
from collapipe.documents import read_document
from collapipe.emulation.emulation_file import EmulatedDevice, EmulatedRadio, Emulation
from collapipe.emulation.links import LinkDescription
from collapipe.job import JobConfig
from collapipe.planning.decisions import RoundDecision
from collapipe.v1.plan_pb2 import Plan
from collapipe_client import LocalTestbed
from collapipe_client.testbed_certificates import PROMETHEUS
from collapipe_client.testbed_processes import Device
from collapipe_client.workspace import Workspace

pytestmark = pytest.mark.timeout(600)

ROUNDS = 9
TIME_SCALE = 8.0
SMALL = 7_000_000
"""Memory in bytes that holds most of the model, but not all of it."""
CLOSE = 0.1
"""Largest relative difference between a goodput and the assigned rate."""


@dataclass(frozen=True)
class Decided:
    """The plan of one round and the decision behind it."""

    plan: Plan
    decision: RoundDecision


def changed(emulation: Emulation) -> Emulation:
    """Returns an emulation in which the faster device and the links to the edge server are slower."""
    device = emulation.devices["device-0-0"].model_copy(update={"slowdown": 6.0})
    links = dict(emulation.links)
    if links:
        links["*>edge-server"] = LinkDescription(rate_bps=4e6, delay_seconds=0.002)
    devices = {**emulation.devices, "device-0-0": device}
    return emulation.model_copy(update={"devices": devices, "links": links})


def make_emulation(*, radio: bool) -> Emulation:
    devices = {
        "control-unit-0": EmulatedDevice(profile="laptop"),
        "device-0-0": EmulatedDevice(profile="raspberry-pi-5"),
        "device-0-1": EmulatedDevice(profile="raspberry-pi-4"),
        "edge-server": EmulatedDevice(profile="laptop"),
    }
    if not radio:
        wires = {"*": LinkDescription(rate_bps=50e6, delay_seconds=0.002)}
        return Emulation(devices=devices, links=wires, time_scale=TIME_SCALE)
    # The signal-to-noise ratio in 1 MHz at 0.1 W is 20 dB. The Raspberry Pi 4 is farther away.
    air = {
        "*": EmulatedRadio(gain=1e-8, noise_watts_per_hertz=1e-17, delay_seconds=0.002),
        "device-0-1>*": EmulatedRadio(gain=4e-9, noise_watts_per_hertz=1e-17, delay_seconds=0.002),
    }
    return Emulation(devices=devices, radios=air, time_scale=TIME_SCALE)


def make_job(**schedule: object) -> JobConfig:
    return JobConfig.model_validate(
        {
            "name": "enacted",
            "task": {"kind": "classification", "max_length": 32},
            "data": {"source": "stdlib_docstrings", "max_rows": 300, "max_held_out_rows": 16},
            "model": {
                "vocabulary_size": 1000,
                "config": {
                    "hidden_size": 64,
                    "intermediate_size": 256,
                    "num_hidden_layers": 8,
                    "num_attention_heads": 4,
                },
            },
            "training": {
                "rounds": ROUNDS,
                "local_steps": 2,
                "mini_batch": 16,
                "evaluate_every": 0,
            },
            "schedule": {
                "strategy": "dssra",
                "num_micro_batches": 2,
                "hysteresis": 0.02,
                "silence_seconds": 60,
                "paper_placement": True,
                **schedule,
            },
        }
    )


def run_from_prometheus(
    directory: Path, emulation: Emulation, devices: Sequence[Device], job: JobConfig
) -> list[Decided]:
    """Runs a job whose scheduler gets telemetry only from Prometheus. Half-way, the emulation changes."""
    # Prometheus needs the certificate when it starts.
    certificates = Workspace(directory / "testbed").certificates
    certificates.issue({PROMETHEUS: ()}, timedelta(days=1))
    folder = certificates.folder(PROMETHEUS.name)
    with running_prometheus(directory, certificate=folder) as prometheus:
        options = ("--telemetry", "prometheus", "--prometheus-url", prometheus.url)
        with (
            LocalTestbed(
                [devices], directory / "testbed", emulation=emulation, scheduler_options=options
            ) as testbed,
            testbed.client() as client,
        ):
            testbed.wait_until_registered()
            ready = [testbed.workspace.ready_file(p.name) for p in testbed.processes]
            prometheus.scrape(str((read_document(file) or {})["metrics_address"]) for file in ready)
            job_id, num_rounds = client.submit(job), 0
            for event in client.watch(job_id):
                if event.HasField("round_committed"):
                    num_rounds += 1
                    if num_rounds == ROUNDS // 2:
                        testbed.emulate(changed(emulation))
                    time.sleep(INTERVAL_SECONDS)
            assert event.status.num_rounds_committed == ROUNDS, event.status.message
            return [
                Decided(
                    client.plans(job_id, index)[0],
                    RoundDecision.from_json(
                        json.loads(client.explain(job_id, index).decision_json)
                    ),
                )
                for index in range(ROUNDS)
            ]


def check_telemetry_was_used(rounds: Sequence[Decided]) -> None:
    """Checks that every decision except the first used complete telemetry."""
    for one in rounds[1:]:
        assert one.decision.estimates is not None
        assert one.decision.estimates.missing == ()
        assert one.decision.kept_because in ("", "hysteresis")


def has_changed(values: Sequence[object]) -> bool:
    return any(value != values[0] for value in values)


def goodput_ratios(rounds: Sequence[Decided]) -> list[float]:
    """Returns the goodput of each link divided by its assigned rate, for each round.

    The goodput of a round is in the estimates of the next decision.
    """
    ratios = []
    for one, after in itertools.pairwise(rounds[1:]):
        cluster, estimates = one.decision.question.problem.clusters[0], after.decision.estimates
        assert estimates is not None
        for position, link in enumerate(one.plan.links):
            sender, receiver = (one.plan.stages[position + i].host_id for i in (0, 1))
            seen = estimates.links[f"{sender}>{receiver}"].goodput_bps
            there = cluster.links[sender, receiver]
            if isinstance(there, RadioLink):
                assigned = RadioLink(there.gain, there.noise_watts_per_hertz).rate_bps(
                    link.bandwidth_hz, link.transmit_power_watts
                )
            else:  # the assigned share can exceed the capacity of the link
                assigned = min(link.rate_limit_bps, capacity(after, sender, receiver))
            assert seen is not None
            ratios.append(seen / assigned)
    return ratios


def capacity(one: Decided, sender: str, receiver: str) -> float:
    """Returns the scheduler's estimate of a wired link's capacity in that round."""
    link = one.decision.question.problem.clusters[0].links[sender, receiver]
    assert isinstance(link, WiredLink)
    return link.capacity_bps


def segments(rounds: Sequence[Decided]) -> list[object]:
    return [[(s.host_id, s.start_unit, s.stop_unit) for s in one.plan.stages] for one in rounds]


def test_segments_micro_batches_and_shares_follow_prometheus(tmp_path: Path) -> None:
    job = make_job(channel_rate_bps=24e6)
    devices = [Device(memory_bytes=SMALL), Device(memory_bytes=SMALL)]
    rounds = run_from_prometheus(tmp_path, make_emulation(radio=False), devices, job)
    check_telemetry_was_used(rounds)
    assert has_changed(segments(rounds))
    assert has_changed([one.plan.num_micro_batches for one in rounds] + [2])
    shares = [[link.rate_limit_bps for link in one.plan.links] for one in rounds]
    assert has_changed(shares)
    ratios = goodput_ratios(rounds)
    assert abs(statistics.median(ratios) - 1) < CLOSE, ratios
    assert max(abs(ratio - 1) for ratio in ratios) < 2 * CLOSE, ratios


def test_bandwidth_and_power_follow_prometheus(tmp_path: Path) -> None:
    job = make_job(channel_bandwidth_hz=4e6, penalty_weight=3.0)
    # These devices use almost no energy for computing, so they must save energy by sending with less power.
    sparing = Device(
        memory_bytes=SMALL, max_transmit_watts=0.2, busy_watts=0.001, energy_budget_joules=0.05
    )
    rounds = run_from_prometheus(tmp_path, make_emulation(radio=True), [sparing, sparing], job)
    check_telemetry_was_used(rounds)
    assert has_changed([[link.bandwidth_hz for link in one.plan.links] for one in rounds])
    powers = [
        [(link.transmit_power_watts, link.return_transmit_power_watts) for link in one.plan.links]
        for one in rounds
    ]
    assert has_changed(powers)
    assert any(0 < watts < 0.19 for one in powers for watts in one[1])
    ratios = goodput_ratios(rounds)
    assert abs(statistics.median(ratios) - 1) < CLOSE, ratios
