"""A job on a testbed of emulated devices and shaped links, round by round: what the scheduling benchmarks run on."""

import json
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from collapipe.allocation import RoundPlan
from collapipe.emulation.emulation_file import EmulatedDevice, EmulatedRadio, Emulation
from collapipe.emulation.links import LinkDescription
from collapipe.errors import InfeasibleError
from collapipe.job import JobConfig
from collapipe.scheduler.decisions import RoundDecision, full_round_seconds
from collapipe_client import CollaPipeClient, LocalTestbed
from collapipe_client.emulation_check import EmulationCheck

DEVICES = ("raspberry-pi-4", "laptop", "raspberry-pi-5", "raspberry-pi-4")
"""In the order of their names. A Jetson is faster than the core that would have to emulate it."""

TIME_SCALE = 9.0
"""So slow are all of them that the real work of all fits into this machine."""


@dataclass(frozen=True)
class Round:
    """One committed round."""

    number: int
    seconds: float
    predicted_seconds: float
    decision: RoundDecision

    @property
    def blocks(self) -> dict[str, int]:
        """Blocks of each device of the first cluster."""
        return {host: s.num_blocks for host, s in self.decision.plans[0].segments.items()}


def world(
    clusters: int = 1,
    *,
    rate_bps: float = 13e6,
    delay_seconds: float = 0.004,
    radio: bool = False,
    slow: Mapping[str, float] | None = None,
    links: Mapping[str, LinkDescription] | None = None,
) -> Emulation:
    """Heterogeneous devices behind shaped links.

    Args:
        clusters: Each has the same devices.
        rate_bps: Of every link.
        delay_seconds: One way.
        radio: Links are radio links instead.
        slow: Slowdown of some hosts, by their names.
        links: Links that are unlike the others.
    """
    slow = slow or {}
    names = [f"device-{c}-{k}" for c in range(clusters) for k in range(len(DEVICES))]
    devices = {
        name: EmulatedDevice(
            profile=DEVICES[int(name.rpartition("-")[2])], slowdown=slow.get(name, 1.0)
        )
        for name in names
    }
    for host in ("edge-server", *(f"control-unit-{c}" for c in range(clusters))):
        devices[host] = EmulatedDevice(profile="laptop", slowdown=slow.get(host, 1.0))
    every = LinkDescription(rate_bps=rate_bps, delay_seconds=delay_seconds)
    radios = {}
    if radio:
        # a good link: 20 dB at 1 MHz and 0.1 W
        radios["*"] = EmulatedRadio(
            gain=1e-9, noise_watts_per_hertz=1e-18, delay_seconds=delay_seconds
        )
    return Emulation(
        devices=devices,
        links={} if radio else {"*": every, **(links or {})},
        radios=radios,
        time_scale=TIME_SCALE,
    )


def make_job(
    name: str,
    *,
    rounds: int = 6,
    clusters: int = 1,
    training: Mapping[str, Any] | None = None,
    **schedule: Any,
) -> JobConfig:
    """A small BERT of 12 blocks on real text; short rounds, not evaluated."""
    return JobConfig.model_validate(
        {
            "name": name,
            "clusters": clusters,
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
                "local_steps": 2,
                "mini_batch": 32,
                "evaluate_every": 0,
                **(training or {}),
            },
            "schedule": {"num_micro_batches": 8, "silence_seconds": 60, **schedule},
        }
    )


@contextmanager
def testbed(
    directory: Path,
    emulation: Emulation,
    clusters: int = 1,
    *,
    scheduler_options: Sequence[str] = (),
    devices: Sequence[Any] | None = None,
) -> Iterator[LocalTestbed]:
    """Starts a testbed of emulated devices."""
    shape = [devices if devices is not None else len(DEVICES)] * clusters
    with LocalTestbed(
        shape, directory, emulation=emulation, scheduler_options=scheduler_options
    ) as started:
        started.wait_until_registered()
        yield started


def run(
    bed: LocalTestbed,
    job: JobConfig,
    *,
    after_round: Callable[[int], None] = lambda number: None,
    check: bool = True,
) -> list[Round]:
    """Runs a job; refuses to report when the emulation did not hold.

    Args:
        bed: Of emulated devices.
        job: The job.
        after_round: Called after every committed round with its number, from 1.
        check: Whether the emulation is checked.
    """
    seconds: list[float] = []
    with bed.client() as client, EmulationCheck(bed) as watched:
        job_id = client.submit(job)
        for event in client.watch(job_id):
            if event.HasField("round_committed"):
                seconds.append(event.round_committed.round_seconds)
                after_round(len(seconds))
            if event.HasField("status") and event.status.message:
                last = event.status
        status = client.find_job(job_id)
        if status.num_rounds_committed < job.training.rounds:
            if " bytes" in last.message:  # of memory: the only limit that these jobs can meet
                raise InfeasibleError(last.message)
            raise RuntimeError(f"job {job_id} did not end well: {last.message}")
        decisions = [_decision(client, job_id, index) for index in range(len(seconds))]
    if check:
        watched.verdict()
    return [
        Round(index + 1, seconds[index], full_round_seconds(decision), decision)
        for index, decision in enumerate(decisions)
    ]


def settled(rounds: Sequence[Round]) -> float:
    """Median round time of the second half: the first rounds still measure the hosts."""
    return statistics.median(one.seconds for one in rounds[len(rounds) // 2 :])


def describe(plans: RoundPlan) -> str:
    """Blocks and micro-batches, in a few characters."""
    return "; ".join(
        " ".join(f"{host.removeprefix('device-')}:{s.num_blocks}" for host, s in p.segments.items())
        + f" M={p.num_micro_batches}"
        for p in plans
    )


def _decision(client: CollaPipeClient, job_id: str, round_index: int) -> RoundDecision:
    answer = client.explain(job_id, round_index)
    return RoundDecision.from_json(json.loads(answer.decision_json))
