"""Time of one long row over three emulated devices, cut into 1, 2, 4 and 8 slices.

    python -m benchmarks slices

Real processes on a local testbed train a small Llama with one row of 2,048 tokens in a mini-batch. Processors are
emulated: three equal devices, and the hosts of the embedding and the head. Links are those of this machine. The
predictions are those of docs/scheduling.md (5): one from the measurements of the same number of slices, and one from
those of the whole row. In the last job, `dssra` chooses the number of slices.
"""

import statistics
import tempfile
from dataclasses import replace
from pathlib import Path

from benchmarks.emulated import Round, run
from collapipe.allocation.round_model.prediction import predict
from collapipe.emulation.emulation_file import EmulatedDevice, Emulation
from collapipe.job import JobConfig
from collapipe_client import LocalTestbed
from collapipe_client.testbed_processes import Device

NUM_TOKENS = 2048
SLICES = (1, 2, 4, 8)
NUM_DEVICES, NUM_LAYERS, LOCAL_STEPS = 3, 6, 2
TIME_SCALE = 30.0
"""Factor on all emulated times. It makes the real work of all hosts together fit into this machine."""


def make_job(strategy: str, slices: list[int]) -> JobConfig:
    """Returns a job of two rounds: one to measure, and one whose plan knows what the first has measured."""
    return JobConfig.model_validate(
        {
            "name": "slices",
            "task": {"kind": "causal_lm", "max_length": NUM_TOKENS},
            "data": {"source": "stdlib_docstrings", "max_rows": 800, "max_held_out_rows": 40},
            "model": {
                "family": "llama",
                "vocabulary_size": 500,
                "config": {
                    "hidden_size": 128,
                    "intermediate_size": 512,
                    "num_hidden_layers": NUM_LAYERS,
                    "max_position_embeddings": NUM_TOKENS,
                },
            },
            "training": {
                "rounds": 2,
                "local_steps": LOCAL_STEPS,
                "mini_batch": 1,
                "evaluate_every": 0,
            },
            "schedule": {
                "strategy": strategy,
                "segments": [[NUM_LAYERS // NUM_DEVICES] * NUM_DEVICES],
                "num_micro_batches": 1,
                "sequence_slices": slices,
                "paper_placement": True,
                "silence_seconds": 120,
            },
        }
    )


def step_seconds(ran: Round) -> float:
    """Returns the measured time of a mini-batch."""
    return ran.training_seconds / LOCAL_STEPS


def main() -> None:
    """Prints a table: slices, seconds of a mini-batch, and both predictions."""
    hosts = [*(f"device-0-{k}" for k in range(NUM_DEVICES)), "control-unit-0", "edge-server"]
    emulation = Emulation(
        devices={host: EmulatedDevice(profile="laptop") for host in hosts}, time_scale=TIME_SCALE
    )
    whole: Round | None = None
    with (
        tempfile.TemporaryDirectory() as directory,
        LocalTestbed([[Device()] * NUM_DEVICES], Path(directory), emulation=emulation) as bed,
    ):
        bed.wait_until_registered()
        for number in SLICES:
            ran = run(bed, make_job("manual", [number]))
            last = ran[-1]
            whole = whole or last
            decision = whole.decision
            plans = tuple(replace(plan, num_slices=number) for plan in decision.plans)
            from_whole = predict(decision.question.problem, plans).clusters[0].mini_batch_seconds
            own = last.decision.prediction.clusters[0].mini_batch_seconds
            print(
                f"{number} slices: {statistics.mean(map(step_seconds, ran)):.2f} s (rounds "
                f"{', '.join(f'{step_seconds(one):.2f}' for one in ran)}), predicted {own:.2f} s, from the whole row "
                f"{from_whole:.2f} s; blocks {last.blocks}",
                flush=True,
            )
        chosen = run(bed, make_job("dssra", list(SLICES)))
        for one in chosen:
            print(
                f"dssra, round {one.number}: {one.decision.plans[0].num_slices} slices, {step_seconds(one):.2f} s, predicted "
                f"{one.decision.prediction.clusters[0].mini_batch_seconds:.2f} s; blocks {one.blocks}",
                flush=True,
            )


if __name__ == "__main__":
    main()
