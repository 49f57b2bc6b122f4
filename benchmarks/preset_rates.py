"""Compares the learning rates that a preset could have, each with the plain loop of tests/reference in one process.

    python -m benchmarks.preset_rates classification --data DIR
    python -m benchmarks.preset_rates translation --data DIR --rates 5e-4 1e-3 --set training.rounds=6
    python -m benchmarks.preset_rates causal_lm

DIR has the folders `banking77`, `wnut17` and `multi30k_en_de`. One cluster trains on the training file, and the validation
file measures. `causal_lm` takes the docstrings of Python's library, as the preset does. Each seed shuffles the rows anew. Prints a row of a table for each rate.
"""

import argparse
import statistics
from pathlib import Path

from benchmarks.learning import run_reference
from collapipe_client.job_files import load_preset

FILES = {
    "classification": ("banking77/train.jsonl", "banking77/validation.jsonl"),
    "ner": ("wnut17/train.conll", "wnut17/validation.conll"),
    "translation": ("multi30k_en_de/train.jsonl", "multi30k_en_de/validation.jsonl"),
}


def main() -> None:
    """Trains one job for each rate and seed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("preset", choices=[*FILES, "causal_lm"])
    parser.add_argument(
        "--data", type=Path, default="../shared/data", help="folder of the data sets"
    )
    parser.add_argument("--rates", type=float, nargs="+", default=[3e-4, 5e-4, 1e-3, 2e-3])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument(
        "--set", action="append", default=[], help="override a setting, as in `collapipe train`"
    )
    arguments = parser.parse_args()
    files = [arguments.data / name for name in FILES.get(arguments.preset, ())]
    named = [f"data.{key}={file}" for key, file in zip(("train", "held_out"), files, strict=False)]
    shared = [*named, "clusters=1", *arguments.set]
    print("| learning rate | last loss | metric of each seed | mean |\n|---|---|---|---|")
    for rate in arguments.rates:
        settings = [*shared, f"training.learning_rate={rate}"]
        runs = [
            run_reference(load_preset(arguments.preset, [*settings, f"seed={seed}"]))
            for seed in arguments.seeds
        ]
        metrics = [run["metric"] for run in runs]
        loss = statistics.fmean(run["losses"][-1] for run in runs)
        each = ", ".join(f"{metric:.3f}" for metric in metrics)
        print(
            f"| {rate:g} | {loss:.3f} | {each} | {statistics.fmean(metrics):.3f} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
