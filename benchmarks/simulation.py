"""Measures the simulator: one mini-batch, and 100 rounds of 10 clusters with 8 devices each.

    python -m benchmarks.simulation

The rounds include their decisions. The benchmark uses one core. The aim is at most a minute for each strategy.
"""

import statistics
import time
from typing import Any

from collapipe.simulation import read_scenario, run_strategy
from collapipe.simulation.pipeline_events import (
    SimulatedLink,
    SimulatedPipeline,
    SimulatedStage,
    simulate,
)

ROUNDS = 100
_REPETITIONS = 20


def main() -> None:
    """Measures single mini-batches, and then whole runs."""
    for num_micro_batches in (4, 16, 64):
        print(
            f"10 stages x {num_micro_batches} micro-batches: {_mini_batch(num_micro_batches):.2f} ms"
        )
    for strategy in ("pipeline", "dssra"):
        started = time.perf_counter()
        run = run_strategy(read_scenario(_scenario(), "benchmark"), strategy, seed=0)
        seconds = time.perf_counter() - started
        decisions = [record.decision_seconds for record in run.rounds]
        print(
            f"{strategy}: 10 clusters x 8 devices x {ROUNDS} rounds in {seconds:.1f} s, of which "
            f"{sum(decisions):.1f} s decide (median {1e3 * statistics.median(decisions):.0f} ms a round, "
            f"at most {1e3 * max(decisions):.0f} ms)",
            flush=True,
        )


def _mini_batch(num_micro_batches: int) -> float:
    stages = [SimulatedStage(1.0 + k % 3, 2.0 + k % 2, 10 - k, f"host-{k}") for k in range(10)]
    links = [SimulatedLink(0.5 + 0.1 * k, 0.6, 0.01, half_duplex=True) for k in range(9)]
    pipeline = SimulatedPipeline(stages, links, num_micro_batches)
    seconds = []
    for _ in range(_REPETITIONS):
        started = time.perf_counter()
        simulate([pipeline])
        seconds.append(time.perf_counter() - started)
    return 1e3 * statistics.median(seconds)


def _scenario() -> dict[str, Any]:
    return {
        "name": "benchmark",
        "rounds": ROUNDS,
        "model": {"name": "bert-base"},
        "training": {"micro_batches": [4, 8, 16, 32]},
        "channel": {"kind": "radio", "bandwidth_hz": 80e6, "fading_branches": 4},
        "clusters": [
            {
                "count": 10,
                "devices": [
                    {"profile": "raspberry-pi-4", "count": 3},
                    {"profile": "raspberry-pi-5", "count": 3},
                    {"profile": "laptop", "count": 2},
                ],
            }
        ],
    }


if __name__ == "__main__":
    main()
