"""Tests that memory and disk use do not grow with the number of rounds: invariant I4."""

from pathlib import Path

import pytest

from collapipe.job import JobConfig
from collapipe_client import LocalTestbed

pytestmark = pytest.mark.heavy

ROUNDS = 200
WARM_UP_ROUNDS = 60
"""After this number of rounds, every buffer has reached its largest size."""
ALLOWED_BYTES = 8 << 20
"""Tolerance for the allocator. A leak of one model (100 kB) in each round would add 14 MB in 140 rounds."""


def resident_bytes(pid: int) -> int:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) * 1024
    raise AssertionError(f"process {pid} has no VmRSS")


def directory_bytes(directory: Path) -> int:
    return sum(path.stat().st_size for path in directory.rglob("blobs/*") if path.is_file())


@pytest.mark.timeout(600)
def test_nothing_grows_over_200_rounds(tmp_path: Path) -> None:
    rows, held_out = tmp_path / "rows.jsonl", tmp_path / "held_out.jsonl"
    lines = [f'{{"text": "row number {i} of the file", "label": "{i % 3}"}}' for i in range(64)]
    rows.write_text("\n".join(lines[:60]) + "\n", encoding="utf-8")
    held_out.write_text("\n".join(lines[60:]) + "\n", encoding="utf-8")
    job = JobConfig.model_validate(
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
                },
            },
            "training": {
                "rounds": ROUNDS,
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
    with LocalTestbed([2, 2], tmp_path / "testbed") as testbed, testbed.client() as client:
        pids = {process.name: process.pid for process in testbed.processes}
        early: dict[str, int] = {}
        early_disk = 0
        for event in client.watch(client.submit(job)):
            if (
                event.HasField("round_committed")
                and event.round_committed.num_rounds == WARM_UP_ROUNDS
            ):
                early = {name: resident_bytes(pid) for name, pid in pids.items()}
                early_disk = directory_bytes(testbed.workspace.state)
        assert event.status.num_rounds_committed == ROUNDS, event.status.message
        grown = {name: resident_bytes(pid) - early[name] for name, pid in pids.items()}
        assert max(grown.values()) < ALLOWED_BYTES, grown
        assert directory_bytes(testbed.workspace.state) <= 1.5 * early_disk
