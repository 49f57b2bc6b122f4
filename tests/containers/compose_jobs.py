"""Defines jobs on real text for the compose testbed, and runs the same jobs in one process for comparison."""

import functools
import json
from dataclasses import dataclass
from pathlib import Path

from reference.federated_job import Trained, train_job

from collapipe.data.stdlib_docstrings import load_docstrings
from collapipe_client.job_files import load_job

ROUNDS = 3
NUM_TRAIN, NUM_HELD_OUT = 400, 32

_JOB = """\
name = "{name}"
clusters = {clusters}
devices_per_cluster = {devices}

[task]
kind = "classification"
max_length = 32

[data]
train = "{data}/train.jsonl"
held_out = "{data}/held-out.jsonl"

[model]
vocabulary_size = 1000
config = {{ hidden_size = 64, intermediate_size = 128, num_hidden_layers = 6, num_attention_heads = 4 }}

[training]
rounds = {rounds}
local_steps = {local_steps}
mini_batch = {mini_batch}
evaluate_every = {evaluate_every}
replicate_every = {replicate_every}

[schedule]
strategy = "{strategy}"
num_micro_batches = 4
silence_seconds = 60
{more_schedule}
"""


@dataclass(frozen=True)
class Job:
    """A job file. A small BERT learns to which package a docstring of the standard library belongs."""

    name: str
    strategy: str = "pipeline"
    clusters: int = 2
    devices: int | tuple[int, ...] = (3, 4)
    rounds: int = ROUNDS
    local_steps: int = 3
    mini_batch: int = 16
    evaluate_every: int = 1
    replicate_every: int = 10
    more_schedule: str = ""

    def write(self, folder: Path, data: str) -> Path:
        """Writes the job file. `data` is the folder of the rows, as a path on the control units."""
        devices = self.devices if isinstance(self.devices, int) else list(self.devices)
        values = vars(self) | {"devices": devices, "data": data}
        path = folder / f"{self.name}.toml"
        path.write_text(_JOB.format_map(values), encoding="utf-8")
        return path


def write_rows(folder: Path) -> None:
    """Writes docstrings of this Python's standard library. Python in the containers may have others."""
    rows = [
        json.dumps({"text": row.key, "label": row.group})
        for row in load_docstrings()[: NUM_TRAIN + NUM_HELD_OUT]
    ]
    for name, part in (("train", rows[:NUM_TRAIN]), ("held-out", rows[NUM_TRAIN:])):
        (folder / f"{name}.jsonl").write_text("\n".join(part) + "\n", encoding="utf-8")


@functools.cache
def expected(job: Job, data: Path, scratch: Path) -> Trained:
    """Returns the result of the plain loop of tests/reference."""
    return train_job(load_job(job.write(scratch, str(data)), [], local=True))
