"""Compares the training time of the same steps with the services and in one process.

    python -m benchmarks.throughput

Runs both alternately and prints the ratio of the medians. On a machine with fewer cores than stages, not all
stages can run in parallel. Then the ratio shows the cost of distribution, and not its gain.
"""

import os
import statistics
import tempfile
import time
from pathlib import Path

import torch

from benchmarks.learning import make_clients
from benchmarks.memory import make_job
from collapipe.service_process import tune_allocator
from collapipe_client import LocalTestbed

REPETITIONS = 3


def main() -> None:
    """Measures both, and prints the times and their ratio."""
    tune_allocator()
    torch.set_num_threads(1)
    seconds: dict[str, list[float]] = {"services": [], "one process": []}
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        job = make_job(directory, small=False)
        with LocalTestbed([3], directory / "testbed") as testbed, testbed.client() as client:
            for _ in range(REPETITIONS):
                for event in client.watch(client.submit(job)):
                    if event.HasField("round_committed"):
                        seconds["services"].append(
                            event.round_committed.summaries[0].training_seconds
                        )
                (plain,) = make_clients(job)
                started = time.perf_counter()
                plain.train_round(0)
                seconds["one process"].append(time.perf_counter() - started)
    steps = job.training.local_steps
    medians = {name: statistics.median(times) / steps for name, times in seconds.items()}
    for name, median in medians.items():
        print(f"{name}: {median:.2f} s a step")
    ratio = medians["one process"] / medians["services"]
    print(f"services against one process: {ratio:.2f} times as fast, on {os.cpu_count()} cores")


if __name__ == "__main__":
    main()
