"""Trains the same job on a GPU and on the CPU, in turns, and compares the losses and the times of steps.

    python -m benchmarks.accelerator
    python -m benchmarks.accelerator --widths 384 768 --repeats 3    # takes minutes on the CPU
    python -m benchmarks.accelerator --device cpu --widths 64 --repeats 1    # tries this program without a GPU

Each of two testbeds has a scheduler, an edge server, a control unit and three devices. In one testbed, all hosts but the
scheduler compute on the GPU, which they share. In the other one, each of them computes with one thread of the CPU. The job
has no dropout, because a GPU draws other random numbers than a CPU. So only rounding makes the losses differ.

Prints a table in Markdown. The first round of a job is left out of the times, because it connects the hosts and loads the
kernels. Exits with status 75 if torch finds no CUDA device.
"""

import argparse
import os
import platform
import statistics
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import torch

from collapipe.job import JobConfig
from collapipe_client import CollaPipeClient, LocalTestbed
from collapipe_client.testbed_processes import SCHEDULER

ROUNDS = 3
STEPS = 8
ROWS = 32
"""Rows of a mini-batch."""
HEADER = (
    "| width | processor | step, s | samples/s | first loss | last loss | accuracy | losses between repeats "
    "| losses against the CPU | gradient norms against the CPU |\n|---|---|---|---|---|---|---|---|---|---|"
)


class DeviceTestbed(LocalTestbed):
    """A testbed of one cluster whose hosts all compute on one kind of processor."""

    def __init__(self, device: str, workspace: Path) -> None:
        super().__init__([3], workspace)
        self._device = device

    def _command_line(self, name: str, listen: str, line: list[str]) -> list[str]:
        options = [] if name == SCHEDULER else ["--device", self._device]
        return [*super()._command_line(name, listen, line), *options]


@dataclass
class Runs:
    """Results of the jobs of one testbed: losses and gradient norms of all steps of each job, and seconds of steps."""

    losses: list[list[float]] = field(default_factory=list)
    norms: list[list[float]] = field(default_factory=list)
    step_seconds: list[float] = field(default_factory=list)
    accuracy: float = 0.0

    def train(self, client: CollaPipeClient, job: JobConfig) -> None:
        """Runs a job and adds its results. Exits if the job fails."""
        losses: list[float] = []
        norms: list[float] = []
        for event in client.watch(client.submit(job)):
            if event.HasField("round_committed"):
                [summary] = event.round_committed.summaries
                losses += summary.losses
                norms += summary.gradient_norms
                if event.round_committed.num_rounds > 1:
                    self.step_seconds.append(summary.training_seconds / STEPS)
            elif event.HasField("evaluation"):
                self.accuracy = event.evaluation.value
        if len(losses) < ROUNDS * STEPS:
            raise SystemExit(f"the job {job.name} failed: {event.status.message}")
        self.losses.append(losses)
        self.norms.append(norms)


def main() -> None:
    """Runs the jobs, and prints a table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--widths", type=int, nargs="+", default=[384])
    parser.add_argument("--repeats", type=int, default=2)
    options = parser.parse_args()
    has_gpu = options.device == "cuda"
    if has_gpu and not torch.cuda.is_available():
        print(f"skipped: torch {torch.__version__} finds no CUDA device here", file=sys.stderr)
        sys.exit(os.EX_TEMPFAIL)
    names = {"cpu": "CPU", "gpu": torch.cuda.get_device_name() if has_gpu else "CPU again"}
    print(f"{names['gpu']}, torch {torch.__version__}, Python {platform.python_version()}")
    print(HEADER, flush=True)
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        clients = {}
        for key, device in {"cpu": "cpu", "gpu": options.device}.items():
            testbed = stack.enter_context(DeviceTestbed(device, Path(folder) / key))
            clients[key] = stack.enter_context(testbed.client())
        for width in options.widths:
            runs = {key: Runs() for key in clients}
            for _ in range(options.repeats):
                for key, client in clients.items():
                    runs[key].train(client, make_job(width))
            for key, one in runs.items():
                _print_row(width, names[key], one, runs["cpu"])


def make_job(width: int) -> JobConfig:
    """Makes a job that trains a BERT of six blocks from scratch, on docstrings of Python's library."""
    config = {
        "hidden_size": width,
        "num_hidden_layers": 6,
        "num_attention_heads": width // 32,
        "intermediate_size": 4 * width,
        "hidden_dropout_prob": 0.0,
        "attention_probs_dropout_prob": 0.0,
    }
    document = {
        "name": f"width-{width}",
        "devices_per_cluster": 3,
        "task": {"kind": "classification", "max_length": 64},
        "data": {"source": "stdlib_docstrings", "max_held_out_rows": 64},
        "model": {"family": "bert", "vocabulary_size": 2000, "config": config},
        "training": {"rounds": ROUNDS, "local_steps": STEPS, "mini_batch": ROWS},
        "schedule": {"strategy": "pipeline", "num_micro_batches": 8},
    }
    return JobConfig.model_validate(document)


def _print_row(width: int, processor: str, runs: Runs, reference: Runs) -> None:
    seconds, losses = statistics.median(runs.step_seconds), runs.losses[0]
    repeats = max(_difference(again, losses) for again in runs.losses)
    print(
        f"| {width} | {processor} | {seconds:.3f} | {ROWS / seconds:.1f} | {losses[0]:.6f} | {losses[-1]:.6f} "
        f"| {runs.accuracy:.3f} | {repeats:.1e} | {_difference(losses, reference.losses[0]):.1e} "
        f"| {_difference(runs.norms[0], reference.norms[0]):.1e} |",
        flush=True,
    )


def _difference(values: Sequence[float], expected: Sequence[float]) -> float:
    """Returns the largest relative difference."""
    return max(abs(one - other) / abs(other) for one, other in zip(values, expected, strict=True))


if __name__ == "__main__":
    main()
