"""Runs jobs on a testbed with emulated devices and shaped links. The benchmarks of scheduling use it."""

import json
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from collapipe.allocation import RoundPlan
from collapipe.emulation.emulation_file import EmulatedDevice, Emulation
from collapipe.emulation.links import LinkDescription
from collapipe.errors import InfeasibleError
from collapipe.job import JobConfig
from collapipe.scheduler.decisions import RoundDecision, full_round_seconds
from collapipe_client import CollaPipeClient, LocalTestbed
from collapipe_client.emulation_check import EmulationReading
from collapipe_client.testbed_processes import Device

DEVICES = ("raspberry-pi-4", "laptop", "raspberry-pi-5", "raspberry-pi-4")
"""Profiles of the devices, in the order of their names. A core could not emulate a Jetson, which is faster."""

TIME_SCALE = 9.0
"""Factor on all emulated times. It makes the real work of all hosts together fit into this machine."""


@dataclass(frozen=True)
class Round:
    """One committed round.

    Args:
        number: Counted from 1.
    """

    number: int
    seconds: float
    predicted_seconds: float
    decision: RoundDecision

    @property
    def blocks(self) -> dict[str, int]:
        """Number of blocks of each device."""
        return {host: s.num_blocks for host, s in self.decision.plans[0].segments.items()}


def emulation(
    slow: Mapping[str, float] | None = None, links: Mapping[str, LinkDescription] | None = None
) -> Emulation:
    """Returns a cluster of different devices, with links of 13 Mbit/s and a one-way delay of 4 ms.

    Args:
        slow: Slowdown of some devices, by host id.
        links: Links that differ from the others, by "sender>receiver".
    """
    slow = slow or {}
    devices = {
        f"device-0-{k}": EmulatedDevice(profile=profile, slowdown=slow.get(f"device-0-{k}", 1.0))
        for k, profile in enumerate(DEVICES)
    }
    for host_id in ("edge-server", "control-unit-0"):
        devices[host_id] = EmulatedDevice(profile="laptop")
    usual = LinkDescription(rate_bps=13e6, delay_seconds=0.004)
    return Emulation(devices=devices, links={"*": usual, **(links or {})}, time_scale=TIME_SCALE)


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
                **schedule,
            },
        }
    )


@contextmanager
def testbed(directory: Path, devices: Sequence[Device]) -> Iterator[LocalTestbed]:
    """Starts a testbed with one cluster of the usual `emulation`.

    Args:
        devices: One for each profile in `DEVICES`.
    """
    with LocalTestbed([devices], directory, emulation=emulation()) as started:
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
    before = EmulationReading.of(bed)
    with bed.client() as client:
        job_id = client.submit(job)
        for event in client.watch(job_id):
            if event.HasField("round_committed"):
                seconds.append(event.round_committed.round_seconds)
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
        Round(index + 1, seconds[index], full_round_seconds(decision), decision)
        for index, decision in enumerate(decisions)
    ]


def settled(rounds: Sequence[Round]) -> float:
    """Returns the median time of the later half of the rounds. In the first rounds the hosts are still measured."""
    return statistics.median(one.seconds for one in rounds[len(rounds) // 2 :])


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
