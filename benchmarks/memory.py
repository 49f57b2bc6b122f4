"""Measures the memory of devices that share a model, and of one process that holds the whole model.

    python -m benchmarks.memory

Trains the BERT of the demo (6 blocks, hidden size 384) with three devices and in one process, on the same
micro-batches: 8 of 4 rows of 64 tokens. The result is the peak of resident memory above its value before the
job. A small job runs first, so that all code is loaded.
"""

import json
import subprocess
import sys
import tempfile
from pathlib import Path

from collapipe.job import JobConfig
from collapipe_client import LocalTestbed

STEPS = 6
SENTENCE = "measure the memory of every device while it trains its segment of the encoder " * 8


def make_job(directory: Path, *, small: bool) -> JobConfig:
    """Makes a job whose rows are longer than 64 tokens. A small model loads the same code."""
    lines = [json.dumps({"text": f"{SENTENCE} {i}", "label": f"label {i % 4}"}) for i in range(72)]
    (directory / "rows.jsonl").write_text("\n".join(lines[:64]) + "\n", encoding="utf-8")
    (directory / "held_out.jsonl").write_text("\n".join(lines[64:]) + "\n", encoding="utf-8")
    shape = {"hidden_size": 32, "num_attention_heads": 4, "intermediate_size": 64} if small else {}
    return JobConfig.model_validate(
        {
            "name": "small" if small else "memory",
            "devices_per_cluster": 3,
            "task": {"kind": "classification", "max_length": 64},
            "data": {
                "train": str(directory / "rows.jsonl"),
                "held_out": str(directory / "held_out.jsonl"),
            },
            "model": {
                "family": "bert",
                "pretrained": None if small else "minilm",
                "vocabulary_size": 300,
                "config": {"num_hidden_layers": 6} | shape,
            },
            "training": {"rounds": 1, "local_steps": STEPS, "evaluate_every": 0},
            "schedule": {"num_micro_batches": 8},
        }
    )


def resident_bytes(pid: int | str, field: str) -> int:
    """Returns `VmRSS` (current value) or `VmHWM` (peak) of a process."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    raise ValueError(f"/proc/{pid}/status has no {field}")


def reset_peak(pid: int | str) -> None:
    """Resets the memory peak of a process to its current value."""
    Path(f"/proc/{pid}/clear_refs").write_text("5")


def measure_services(
    directory: Path, num_devices: int, small: JobConfig, job: JobConfig
) -> tuple[dict[str, int], dict[str, int]]:
    """Returns the memory of each process before a job, and the peak above it, in bytes.

    Args:
        small: A job that runs before, so that all code is loaded.
    """
    with LocalTestbed([num_devices], directory / "testbed") as testbed, testbed.client() as client:
        pids = {process.name: process.pid for process in testbed.processes}
        for each in (small, job):
            base = {name: resident_bytes(pid, "VmRSS") for name, pid in pids.items()}
            for pid in pids.values():
                reset_peak(pid)
            events = list(client.watch(client.submit(each)))
            if events[-1].status.message:
                raise SystemExit(events[-1].status.message)
        return base, {name: resident_bytes(pid, "VmHWM") - base[name] for name, pid in pids.items()}


def measure_whole(directory: Path) -> int:
    """Runs `train_whole` in a separate process and returns its result in bytes."""
    code = "from benchmarks import memory; memory.train_whole(__import__('pathlib').Path(r'%s'))"
    output = subprocess.run(
        [sys.executable, "-c", code % directory], check=True, capture_output=True, text=True
    )
    return int(output.stdout.splitlines()[-1])


def train_whole(directory: Path) -> None:
    """Trains both jobs with the plain loop of tests/reference, and prints the memory of the second."""
    import torch

    from benchmarks.learning import make_clients
    from collapipe.service_process import tune_allocator

    tune_allocator()
    torch.set_num_threads(1)
    for small in (True, False):
        base = resident_bytes("self", "VmRSS")
        reset_peak("self")
        (client,) = make_clients(make_job(directory, small=small))
        client.train_round(0)
    print(resident_bytes("self", "VmHWM") - base)


def main() -> None:
    """Measures the services and the plain loop, and prints the ratios."""
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        jobs = (make_job(directory, small=small) for small in (True, False))
        _, services = measure_services(directory, 3, *jobs)
        whole = measure_whole(directory)
    # The embedding of the demo's BERT has word, position and token-type vectors and a layer norm. A parameter
    # needs 16 bytes: weight, gradient and two moments.
    embedding = (30522 + 512 + 2 + 2) * 384 * 16
    print(
        f"one process with the whole model: {whole / 1e6:.0f} MB "
        f"({(whole - embedding) / 1e6:.0f} without its embedding)"
    )
    for process, peak in services.items():
        print(
            f"{process}: {peak / 1e6:.0f} MB, {peak / whole:.2f} of the whole, "
            f"{peak / (whole - embedding):.2f} of it without the embedding"
        )
    print(f"all services together: {sum(services.values()) / whole:.2f} of the whole")


if __name__ == "__main__":
    main()
