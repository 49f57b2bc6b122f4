"""Runs jobs on a testbed with emulated devices and shaped links. The benchmarks of scheduling use it."""

import json
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from collapipe.allocation import RoundPlan
from collapipe.emulation.emulation_file import EmulatedDevice, EmulatedRadio, Emulation
from collapipe.emulation.links import LinkDescription
from collapipe.errors import InfeasibleError
from collapipe.job import JobConfig
from collapipe.planning.decisions import RoundDecision
from collapipe_client import CollaPipeClient, LocalTestbed
from collapipe_client.emulation_check import EmulationReading
from collapipe_client.testbed_processes import Device

DEVICES = ("raspberry-pi-4", "laptop", "raspberry-pi-5", "raspberry-pi-4")
"""Profiles of the devices, in the order of their names. A core could not emulate a Jetson, which is faster."""

TIME_SCALE = 20.0
"""Factor on all emulated times. It makes the real work of all hosts together fit into this machine."""


@dataclass(frozen=True)
class Round:
    """One committed round.

    Args:
        number: Counted from 1.
    """

    number: int
    seconds: float
    training_seconds: float
    """Of the slowest cluster."""
    predicted_seconds: float
    decision: RoundDecision

    @property
    def blocks(self) -> dict[str, int]:
        """Number of blocks of each device."""
        return {host: s.num_blocks for host, s in self.decision.plans[0].segments.items()}


@dataclass(frozen=True)
class World:
    """The network between the hosts, which carries everything: activations, weights and control.

    Args:
        schedule: Settings of the section `schedule` that belong to it.
    """

    links: Mapping[str, LinkDescription] = field(default_factory=dict)
    radios: Mapping[str, EmulatedRadio] = field(default_factory=dict)
    schedule: Mapping[str, Any] = field(default_factory=dict)


def _wire(rate_bps: float) -> LinkDescription:
    return LinkDescription(rate_bps=rate_bps, delay_seconds=0.004)


def _radio(gain: float) -> EmulatedRadio:
    return EmulatedRadio(gain=gain, noise_watts_per_hertz=1e-17, delay_seconds=0.002)


WORLDS = {
    "wires": World({"*": _wire(13e6)}),
    # The fastest device is behind a slow line.
    "unlike-wires": World(
        {"*": _wire(40e6), "device-0-1>*": _wire(8e6), "*>device-0-1": _wire(8e6)}
    ),
    # 20 dB in 1 MHz at 0.1 W. The first and the last device are farther away.
    "radio": World(
        radios={"*": _radio(1e-8), "device-0-0>*": _radio(3e-9), "device-0-3>*": _radio(3e-9)},
        schedule={"channel_bandwidth_hz": 10e6},
    ),
}


def emulation(
    slow: Mapping[str, float] | None = None,
    links: Mapping[str, LinkDescription] | None = None,
    world: World = WORLDS["wires"],
) -> Emulation:
    """Returns a cluster of different devices in a world.

    Args:
        slow: Slowdown of some devices, by host id.
        links: Links that differ from those of the world, by "sender>receiver".
    """
    slow = slow or {}
    devices = {
        f"device-0-{k}": EmulatedDevice(profile=profile, slowdown=slow.get(f"device-0-{k}", 1.0))
        for k, profile in enumerate(DEVICES)
    }
    for host_id in ("edge-server", "control-unit-0"):
        devices[host_id] = EmulatedDevice(profile="laptop")
    return Emulation(
        devices=devices,
        links={**world.links, **(links or {})},
        radios=dict(world.radios),
        time_scale=TIME_SCALE,
    )


def make_job(
    name: str, *, rounds: int, local_steps: int = 2, num_micro_batches: int = 8, **schedule: Any
) -> JobConfig:
    """Returns a job for a small BERT of 12 blocks on real text, with short rounds and no evaluation.

    Args:
        schedule: Further settings of the section `schedule`.
    """
    return JobConfig.model_validate(
        {
            "name": name,
            "task": {"kind": "classification", "max_length": 32},
            "data": {"source": "stdlib_docstrings", "max_rows": 600, "max_held_out_rows": 16},
            "model": {
                "family": "bert",
                "vocabulary_size": 2000,
                "config": {
                    "hidden_size": 128,
                    "intermediate_size": 512,
                    "num_hidden_layers": 12,
                    "num_attention_heads": 4,
                },
            },
            "training": {
                "rounds": rounds,
                "local_steps": local_steps,
                "mini_batch": 32,
                "evaluate_every": 0,
            },
            "schedule": {
                "num_micro_batches": num_micro_batches,
                "silence_seconds": 60,
                "paper_placement": True,
                **schedule,
            },
        }
    )


@contextmanager
def testbed(
    directory: Path, devices: Sequence[Device], world: World = WORLDS["wires"]
) -> Iterator[LocalTestbed]:
    """Starts a testbed with one cluster of `emulation`.

    Args:
        devices: One for each profile in `DEVICES`.
    """
    with LocalTestbed([devices], directory, emulation=emulation(world=world)) as started:
        started.wait_until_registered()
        yield started


def run(
    bed: LocalTestbed, job: JobConfig, after_round: Callable[[int], None] = lambda number: None
) -> list[Round]:
    """Runs a job. It fails if this machine was too slow for the emulation.

    Args:
        after_round: Called after every committed round with its number, from 1.

    Raises:
        InfeasibleError: The devices have too little memory.
    """
    seconds: list[float] = []
    training: list[float] = []
    before = EmulationReading.of(bed)
    with bed.client() as client:
        job_id = client.submit(job)
        for event in client.watch(job_id):
            if event.HasField("round_committed"):
                committed = event.round_committed
                seconds.append(committed.round_seconds)
                training.append(max(each.training_seconds for each in committed.summaries))
                after_round(len(seconds))
            if event.HasField("status") and event.status.message:
                last = event.status
        status = client.find_job(job_id)
        if status.num_rounds_committed < job.training.rounds:
            # Memory is the only limit that these jobs can exceed, and its message gives bytes.
            if " bytes" in last.message:
                raise InfeasibleError(last.message)
            raise RuntimeError(f"job {job_id} did not run to its end: {last.message}")
        decisions = [_decision(client, job_id, index) for index in range(len(seconds))]
    (EmulationReading.of(bed) - before).check()
    return [
        Round(
            index + 1,
            seconds[index],
            training[index],
            decision.prediction.full_round_seconds,
            decision,
        )
        for index, decision in enumerate(decisions)
    ]


def settled(rounds: Sequence[Round]) -> float:
    """Returns the median time of the later half of the rounds. In the first rounds the hosts are still measured."""
    return statistics.median(one.seconds for one in rounds[len(rounds) // 2 :])


def settled_training(rounds: Sequence[Round]) -> float:
    """Returns the median time of training in the rounds of `settled`."""
    return statistics.median(one.training_seconds for one in rounds[len(rounds) // 2 :])


def describe(plans: RoundPlan) -> str:
    """Returns the blocks of each device and the number of micro-batches as short text."""
    return "; ".join(
        " ".join(f"{host.removeprefix('device-')}:{s.num_blocks}" for host, s in p.segments.items())
        + f" M={p.num_micro_batches}"
        for p in plans
    )


def _decision(client: CollaPipeClient, job_id: str, round_index: int) -> RoundDecision:
    answer = client.explain(job_id, round_index)
    return RoundDecision.from_json(json.loads(answer.decision_json))
