"""Runs many rounds, or many jobs, on a local testbed, and measures what each of its processes holds."""

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from collapipe.job import JobConfig
from collapipe_client import LocalTestbed


@dataclass(frozen=True)
class Held:
    """What one process holds.

    Args:
        memory_bytes: Resident memory.
        descriptors: Open file descriptors, sockets included.
        disk_bytes: Size of all files in its state directory.
        blob_bytes: The part of them that is weights and optimizer states.
    """

    memory_bytes: int
    descriptors: int
    threads: int
    disk_bytes: int
    blob_bytes: int


def measure(testbed: LocalTestbed) -> dict[str, Held]:
    """Returns what each process holds, by its name."""
    return {
        process.name: _measure(testbed, process.name, process.pid) for process in testbed.processes
    }


def _measure(testbed: LocalTestbed, name: str, pid: int) -> Held:
    process = psutil.Process(pid)
    directory = testbed.workspace.state_dir(name)
    return Held(
        memory_bytes=process.memory_info().rss,
        descriptors=process.num_fds(),
        threads=process.num_threads(),
        disk_bytes=_directory_bytes(directory, "*"),
        blob_bytes=_directory_bytes(directory, "blobs/*"),
    )


def _directory_bytes(directory: Path, pattern: str) -> int:
    total = 0
    for path in directory.rglob(pattern):
        with suppress(FileNotFoundError):  # A file may disappear meanwhile.
            total += path.stat().st_size if path.is_file() else 0
    return total


def make_job(folder: Path, rounds: int, **model_config: int) -> JobConfig:
    """Makes a job of two clusters with two devices each, whose blocks move every round."""
    rows, held_out = folder / "rows.jsonl", folder / "held_out.jsonl"
    lines = [f'{{"text": "row number {i} of the file", "label": "{i % 3}"}}' for i in range(64)]
    rows.write_text("\n".join(lines[:60]) + "\n", encoding="utf-8")
    held_out.write_text("\n".join(lines[60:]) + "\n", encoding="utf-8")
    return JobConfig.model_validate(
        {
            "clusters": 2,
            "task": {"kind": "classification", "max_length": 16},
            "data": {"train": str(rows), "held_out": str(held_out)},
            "model": {
                "vocabulary_size": 300,
                "config": {
                    "hidden_size": 32,
                    "num_hidden_layers": 4,
                    "num_attention_heads": 2,
                    "intermediate_size": 64,
                    **model_config,
                },
            },
            "training": {
                "rounds": rounds,
                "local_steps": 1,
                "mini_batch": 8,
                "evaluate_every": 0,
            },
            "schedule": {
                "num_micro_batches": 2,
                "strategy": "manual",
                "segments": [[1, 3], [3, 1]],
            },
        }
    )


def run_rounds(testbed: LocalTestbed, folder: Path, rounds: int) -> Iterator[int]:
    """Runs one job. Yields the number of committed rounds after each of them."""
    job = make_job(folder, rounds, hidden_size=64, intermediate_size=128)
    with testbed.client() as client:
        for event in client.watch(client.submit(job)):
            if event.HasField("round_committed"):
                yield event.round_committed.num_rounds
    assert event.status.num_rounds_committed == rounds, event.status.message


def run_jobs(testbed: LocalTestbed, folder: Path, jobs: int) -> Iterator[int]:
    """Runs jobs of two rounds, one after the other. Yields the number of jobs after each of them."""
    # One embedding with its moments has 3 MB, so that 15 kept ones would have 45 MB.
    job = make_job(folder, 2, hidden_size=256, intermediate_size=512)
    with testbed.client() as client:
        for number in range(1, jobs + 1):
            *_, last = client.watch(client.submit(job))
            assert last.status.num_rounds_committed == 2, last.status.message
            yield number


def check_flat(
    early: dict[str, Held], late: dict[str, Held], allowed_bytes: int, allowed_handles: int
) -> None:
    """Checks that no process holds much more than before.

    Args:
        allowed_bytes: What the memory of a process may grow by.
        allowed_handles: By how many descriptors, and by how many threads, a process may grow.
    """
    for name, held in late.items():
        before = early[name]
        assert held.memory_bytes - before.memory_bytes < allowed_bytes, (name, before, held)
        assert held.descriptors - before.descriptors <= allowed_handles, (name, before, held)
        assert held.threads - before.threads <= allowed_handles, (name, before, held)
