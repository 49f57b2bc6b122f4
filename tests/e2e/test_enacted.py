"""What the scheduler decides from a real Prometheus is what the running system does."""

import itertools
import json
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
from prometheus_server import INTERVAL_SECONDS, running_prometheus

from collapipe.allocation.round_model.problem import RadioLink, WiredLink
from collapipe.documents import read_document
from collapipe.emulation.emulation_file import EmulatedDevice, EmulatedRadio, Emulation
from collapipe.emulation.links import LinkDescription
from collapipe.job import JobConfig
from collapipe.scheduler.decisions import RoundDecision
from collapipe.v1.plan_pb2 import Plan
from collapipe_client import LocalTestbed
from collapipe_client.testbed_processes import Device

pytestmark = [pytest.mark.heavy, pytest.mark.timeout(600)]

ROUNDS = 9
TIME_SCALE = 8.0
SMALL = 7_000_000
"""Memory that holds most of the model, but not all of it."""
CLOSE = 0.1
"""How far the goodput may be from what was assigned."""


@dataclass(frozen=True)
class Decided:
    """One round: who ran what, and why."""

    plan: Plan
    decision: RoundDecision


def changed(world: Emulation) -> Emulation:
    """The faster device becomes the slower one, and the way to the edge server narrow."""
    device = world.devices["device-0-0"].model_copy(update={"slowdown": 6.0})
    links = dict(world.links)
    if links:
        links["*>edge-server"] = LinkDescription(rate_bps=4e6, delay_seconds=0.002)
    devices = {**world.devices, "device-0-0": device}
    return world.model_copy(update={"devices": devices, "links": links})


def make_world(*, radio: bool) -> Emulation:
    devices = {
        "control-unit-0": EmulatedDevice(profile="laptop"),
        "device-0-0": EmulatedDevice(profile="raspberry-pi-5"),
        "device-0-1": EmulatedDevice(profile="raspberry-pi-4"),
        "edge-server": EmulatedDevice(profile="laptop"),
    }
    if not radio:
        wires = {"*": LinkDescription(rate_bps=50e6, delay_seconds=0.002)}
        return Emulation(devices=devices, links=wires, time_scale=TIME_SCALE)
    # 20 dB in 1 MHz at 0.1 W; the Raspberry Pi 4 is farther away
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
                "local_steps": 3,
                "mini_batch": 16,
                "evaluate_every": 0,
            },
            "schedule": {
                "strategy": "dssra",
                "num_micro_batches": 2,
                "hysteresis": 0.02,
                "silence_seconds": 60,
                **schedule,
            },
        }
    )


def run_from_prometheus(
    directory: Path, world: Emulation, devices: Sequence[Device], job: JobConfig
) -> list[Decided]:
    """Runs a job whose scheduler has Prometheus and nothing else; the world changes in its middle."""
    with running_prometheus(directory) as prometheus:
        options = ("--telemetry", "prometheus", "--prometheus-url", prometheus.url)
        with (
            LocalTestbed(
                [devices], directory / "testbed", emulation=world, scheduler_options=options
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
                        testbed.emulate(changed(world))
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


def rests_on_telemetry(rounds: Sequence[Decided]) -> None:
    """Every round but the first, which nothing was measured before."""
    for one in rounds[1:]:
        assert one.decision.estimates is not None
        assert one.decision.estimates.missing == ()
        assert one.decision.kept_because in ("", "hysteresis")


def has_changed(values: Sequence[object]) -> bool:
    return any(value != values[0] for value in values)


def goodput_ratios(rounds: Sequence[Decided]) -> list[float]:
    """What receivers saw during a round, as the next decision was told it, over what its links were assigned."""
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
            else:  # a share of what a link cannot carry is left over
                assigned = min(link.rate_limit_bps, capacity(after, sender, receiver))
            assert seen is not None
            ratios.append(seen / assigned)
    return ratios


def capacity(one: Decided, sender: str, receiver: str) -> float:
    """What the scheduler had found a wire to carry by that round."""
    link = one.decision.question.problem.clusters[0].links[sender, receiver]
    assert isinstance(link, WiredLink)
    return link.capacity_bps


def segments(rounds: Sequence[Decided]) -> list[object]:
    return [[(s.host_id, s.start_unit, s.stop_unit) for s in one.plan.stages] for one in rounds]


def test_segments_micro_batches_and_shares_follow_prometheus(tmp_path: Path) -> None:
    job = make_job(channel_rate_bps=24e6)
    devices = [Device(memory_bytes=SMALL), Device(memory_bytes=SMALL)]
    rounds = run_from_prometheus(tmp_path, make_world(radio=False), devices, job)
    rests_on_telemetry(rounds)
    assert has_changed(segments(rounds))
    assert has_changed([one.plan.num_micro_batches for one in rounds] + [2])
    shares = [[link.rate_limit_bps for link in one.plan.links] for one in rounds]
    assert has_changed(shares)
    ratios = goodput_ratios(rounds)
    assert abs(statistics.median(ratios) - 1) < CLOSE, ratios
    assert max(abs(ratio - 1) for ratio in ratios) < 2 * CLOSE, ratios


def test_bandwidth_and_power_follow_prometheus(tmp_path: Path) -> None:
    job = make_job(channel_bandwidth_hz=4e6, penalty_weight=3.0)
    # devices that draw next to nothing while they compute: what they send is what they have to save
    sparing = Device(
        memory_bytes=SMALL, max_transmit_watts=0.2, busy_watts=0.001, energy_budget_joules=0.05
    )
    rounds = run_from_prometheus(tmp_path, make_world(radio=True), [sparing, sparing], job)
    rests_on_telemetry(rounds)
    assert has_changed([[link.bandwidth_hz for link in one.plan.links] for one in rounds])
    powers = [
        [(link.transmit_power_watts, link.return_transmit_power_watts) for link in one.plan.links]
        for one in rounds
    ]
    assert has_changed(powers)
    assert any(0 < watts < 0.19 for one in powers for watts in one[1])
    ratios = goodput_ratios(rounds)
    assert abs(statistics.median(ratios) - 1) < CLOSE, ratios
