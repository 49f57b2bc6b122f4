"""Trains models that are large for one host, and measures the memory of every process.

    python -m benchmarks.size llama           # 1.1 B parameters, LoRA of rank 8, rows of 256 tokens
    python -m benchmarks.size llama-bfloat16  # the same, with frozen weights in bfloat16
    python -m benchmarks.size llama-nf4       # the same, with blocks in 4 bits
    python -m benchmarks.size bert            # about 100 M parameters, all of them trained

docs/measured.md says what runs, and what the whole is.
"""

import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.memory import measure_services
from collapipe.edge_server.commit_store import CommitStore
from collapipe.job import JobConfig

LLAMA: dict[str, Any] = {
    "task": {"kind": "causal_lm", "max_length": 256},
    "model": {
        "family": "llama",
        "vocabulary_size": 32000,
        "config": {
            "hidden_size": 2048,
            "intermediate_size": 5632,
            "num_hidden_layers": 24,
            "num_attention_heads": 32,
            "num_key_value_heads": 4,
        },
        "lora": {"r": 8},
    },
    "schedule": {"segments": [[2, 5, 5, 5, 5, 2]]},
}
JOBS: dict[str, dict[str, Any]] = {
    "llama": LLAMA,
    "llama-bfloat16": LLAMA | {"model": LLAMA["model"] | {"base_dtype": "bfloat16"}},
    "llama-nf4": LLAMA | {"model": LLAMA["model"] | {"base_quantisation": "nf4"}},
    "bert": {
        "task": {"kind": "classification", "max_length": 128},
        "model": {
            "family": "bert",
            "vocabulary_size": 30522,
            "config": {
                "hidden_size": 768,
                "intermediate_size": 3072,
                "num_hidden_layers": 12,
                "num_attention_heads": 12,
            },
        },
        "schedule": {"segments": [[0, 3, 3, 3, 3, 0]]},
    },
}
SMALL = {"hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 4}


def make_job(name: str, *, small: bool) -> JobConfig:
    """Makes a job on the docstrings of Python's library. A small model loads the same code."""
    job = JOBS[name]
    config = {**job["model"]["config"], **(SMALL if small else {})}
    size = 4000 if small else job["model"]["vocabulary_size"]
    return JobConfig.from_dict(
        {
            "name": name,
            "task": job["task"],
            "data": {"source": "stdlib_docstrings", "max_held_out_rows": 8},
            "model": {**job["model"], "config": config, "vocabulary_size": size},
            "training": {
                "rounds": 2,
                "local_steps": 1,
                "mini_batch": 4,
                "evaluate_every": 0,
                "recompute": True,
            },
            "schedule": {**job["schedule"], "strategy": "manual", "num_micro_batches": 4},
        },
        name,
    )


def main(names: Sequence[str]) -> None:
    """Measures the named jobs, by default all of them."""
    for name in names or JOBS:
        with tempfile.TemporaryDirectory() as folder:
            directory, started = Path(folder), time.monotonic()
            jobs = (make_job(name, small=small) for small in (True, False))
            before, peaks = measure_services(directory, 4, *jobs)
            seconds = time.monotonic() - started
            trained, frozen = stored_bytes(directory / "testbed/state/edge-server")
        whole = 4 * trained + frozen
        parameters = trained / 4 + frozen / make_job(name, small=False).model.activation_value_bytes
        print(
            f"{name}: {parameters / 1e6:.0f} M parameters, of which {trained / 4e6:.1f} M are trained; the "
            f"whole is {whole / 1e6:.0f} MB; all of this took {seconds:.0f} s"
        )
        for process, peak in peaks.items():
            total = before[process] + peak
            print(
                f"  {process}: {peak / 1e6:.0f} MB above {before[process] / 1e6:.0f} MB of code, {peak / whole:.2f} of "
                f"the whole, with the code {total / whole:.2f}"
            )


def stored_bytes(edge_server: Path) -> tuple[int, int]:
    """Returns the bytes of the trained and of the frozen weights of the newest job."""
    job = max((edge_server / "jobs").iterdir(), key=lambda path: path.stat().st_mtime)
    units = CommitStore(edge_server).commit(job.name).global_units
    trained = sum((job / "blobs" / unit.weights_digest).stat().st_size for unit in units)
    digests = [unit.frozen_digest for unit in units if unit.frozen_digest]
    return trained, sum((edge_server / "frozen" / digest).stat().st_size for digest in digests)


if __name__ == "__main__":
    main(sys.argv[1:])
