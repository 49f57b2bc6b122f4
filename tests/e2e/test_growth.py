"""Tests that memory and disk use do not grow with the number of rounds: invariant I4."""

from contextlib import suppress
from pathlib import Path

import pytest

from collapipe.job import JobConfig
from collapipe_client import LocalTestbed

pytestmark = pytest.mark.heavy

ROUNDS = 80
WARM_UP_ROUNDS = 50
"""After this number of rounds, every buffer has reached its largest size."""
ALLOWED_BYTES = 8 << 20
"""Tolerance for the allocator. A leak of one model (600 kB) in each round would add 18 MB in 30 rounds."""

NUM_JOBS = 18
ALLOWED_GROWTH_OF_JOBS_BYTES = 24 << 20


def resident_bytes(pid: int) -> int:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) * 1024
    raise AssertionError(f"process {pid} has no VmRSS")


def directory_bytes(directory: Path) -> int:
    """Returns the size of all blobs. A blob may disappear meanwhile."""
    total = 0
    for path in directory.rglob("blobs/*"):
        with suppress(FileNotFoundError):
            total += path.stat().st_size
    return total


def make_job(folder: Path, rounds: int, **model_config: int) -> JobConfig:
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
                "segments": [[1, 3], [3, 1]],  # blocks move every round
            },
        }
    )


@pytest.mark.timeout(600)
def test_nothing_grows_with_the_number_of_rounds(tmp_path: Path) -> None:
    job = make_job(tmp_path, ROUNDS, hidden_size=64, intermediate_size=128)
    with LocalTestbed([2, 2], tmp_path / "testbed") as testbed, testbed.client() as client:
        pids = {process.name: process.pid for process in testbed.processes}
        early: dict[str, int] = {}
        early_disk = 0
        for event in client.watch(client.submit(job)):
            num_rounds = event.round_committed.num_rounds
            if 0 < num_rounds <= WARM_UP_ROUNDS:
                # The disks hold most while optimizer states are copied, which not every round does.
                early_disk = max(early_disk, directory_bytes(testbed.workspace.state))
            if num_rounds == WARM_UP_ROUNDS:
                early = {name: resident_bytes(pid) for name, pid in pids.items()}
        assert event.status.num_rounds_committed == ROUNDS, event.status.message
        grown = {name: resident_bytes(pid) - early[name] for name, pid in pids.items()}
        assert max(grown.values()) < ALLOWED_BYTES, grown
        assert directory_bytes(testbed.workspace.state) <= early_disk


@pytest.mark.timeout(900)
def test_memory_is_flat_after_the_third_of_18_jobs(tmp_path: Path) -> None:
    # One embedding with its moments has 3 MB, so that 15 kept ones would have 45 MB.
    job = make_job(tmp_path, 2, hidden_size=256, intermediate_size=512)
    with LocalTestbed([2, 2], tmp_path / "testbed") as testbed, testbed.client() as client:
        pids = {process.name: process.pid for process in testbed.processes}
        early: dict[str, int] = {}
        for number in range(1, NUM_JOBS + 1):
            *_, last = client.watch(client.submit(job))
            assert last.status.num_rounds_committed == 2, last.status.message
            if number == 3:
                early = {name: resident_bytes(pid) for name, pid in pids.items()}
        grown = {name: resident_bytes(pid) - early[name] for name, pid in pids.items()}
    assert max(grown.values()) < ALLOWED_GROWTH_OF_JOBS_BYTES, grown
