"""What poisoned clusters do to the model under each rule of averaging: real jobs of seven clusters, of which none, one or two lie.

    python -m benchmarks.poisoned

A text has the class of one of its words. A poisoned cluster has the labels of other classes, and claims so many rows that the poisoned
clusters together weigh as much as the honest ones. All processes run on this machine.

Prints the accuracy of the final model on held-out rows with right labels, as a table in Markdown. Guessing gives 0.25.
"""

import argparse
import random
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests"))

from reference.tiny_jobs import WORDS  # noqa: E402

from collapipe.job import JobConfig  # noqa: E402
from collapipe_client import CollaPipeClient, LocalTestbed  # noqa: E402

NUM_CLUSTERS = 7
NUM_CLASSES = 4
ROWS = 64
"""Training rows of an honest cluster."""
RULES: dict[str, Mapping[str, Any]] = {
    "mean": {},
    "mean, max_share 1/7": {"max_share": 1 / NUM_CLUSTERS},
    "clipped_mean": {"rule": "clipped_mean"},
    "trimmed_mean": {"rule": "trimmed_mean", "trimmed_clusters": 2},
    "median": {"rule": "median"},
}


def main() -> None:
    """Runs a job for each rule and number of poisoned clusters, and prints a table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rules", nargs="+", choices=RULES, default=list(RULES))
    parser.add_argument("--poisoned", nargs="+", type=int, default=[0, 1, 2])
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with (
            LocalTestbed([1] * NUM_CLUSTERS, folder / "testbed") as testbed,
            testbed.client() as client,
        ):
            testbed.wait_until_registered()
            columns = " | ".join(f"{number} poisoned" for number in options.poisoned)
            print(f"| rule | {columns} |\n|---{'|---' * len(options.poisoned)}|", flush=True)
            for rule in options.rules:
                values = [
                    accuracy(client, make_poisoned_job(folder, number, RULES[rule]))
                    for number in options.poisoned
                ]
                print(f"| {rule} | {' | '.join(f'{v:.3f}' for v in values)} |", flush=True)


def make_poisoned_job(folder: Path, num_poisoned: int, averaging: Mapping[str, Any]) -> JobConfig:
    """Writes the rows of all clusters, and returns the job."""
    honest = NUM_CLUSTERS - num_poisoned
    lies = ROWS * honest // num_poisoned if num_poisoned else 0
    train = [
        _write(folder / f"poisoned-{index}-of-{num_poisoned}.jsonl", lies, shift=1)
        if index < num_poisoned
        else _write(folder / f"honest-{index}.jsonl", ROWS, shift=0)
        for index in range(NUM_CLUSTERS)
    ]
    return JobConfig.from_dict(
        {
            "seed": 7,
            "clusters": NUM_CLUSTERS,
            "task": {"kind": "classification", "max_length": 16},
            "data": {"train": train, "held_out": _write(folder / "held-out.jsonl", 210, shift=0)},
            "model": {
                "vocabulary_size": 300,
                "config": {
                    "hidden_size": 64,
                    "num_hidden_layers": 2,
                    "num_attention_heads": 2,
                    "intermediate_size": 128,
                    "max_position_embeddings": 40,
                },
            },
            "training": {
                "rounds": 10,
                "local_steps": 8,
                "mini_batch": 16,
                "learning_rate": 3e-3,
                "evaluate_every": 0,
            },
            "averaging": averaging,
        },
        "a job with poisoned clusters",
    )


def accuracy(client: CollaPipeClient, job: JobConfig) -> float:
    """Runs a job, and returns the accuracy of its model."""
    job_id = client.submit(job)
    for _ in client.watch(job_id):
        pass
    return client.find_job(job_id).evaluation.value


def _write(path: Path, count: int, shift: int) -> str:
    draw = random.Random(path.name)
    with open(path, "w", encoding="utf-8") as file:
        for _ in range(count):
            words = draw.sample(WORDS, 5)
            # The first 16 words tell the class, the others tell nothing.
            tells = next((w for w in words if WORDS.index(w) < 16), WORDS[0])
            label = (WORDS.index(tells) + shift) % NUM_CLASSES
            text = " ".join([tells, *(w for w in words if WORDS.index(w) >= 16)])
            file.write(f'{{"text": "{text}", "label": "class {label}"}}\n')
    return str(path)


if __name__ == "__main__":
    main()
