"""Trains a job on real data, with the services or in one process, to compare what they learn.

    python -m benchmarks.learning banking77 --data DIR              with the services
    python -m benchmarks.learning banking77 --data DIR --reference  with the plain loop of tests/reference

Prints one JSON object with the losses of the first and last steps, the metric, the time, and a digest of all
weights. Equal digests mean that the models are equal bit for bit.
"""

import argparse
import hashlib
import json
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import (
    AutoModelForSeq2SeqLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
)

from collapipe.job import JobConfig
from collapipe_client import LocalTestbed
from collapipe_client.job_files import load_job

ROOT = Path(__file__).parents[1]
# The reference is part of the tests, because it must share no code with the services.
sys.path.insert(0, str(ROOT / "tests"))

from reference.federated_job import make_clients  # noqa: E402

EXPERIMENTS = ROOT / "clients" / "experiments"
EVALUATION_ROWS = 32
AUTO_CLASSES = {
    "classification": AutoModelForSequenceClassification,
    "ner": AutoModelForTokenClassification,
    "translation": AutoModelForSeq2SeqLM,
}


def main() -> None:
    """Runs one experiment."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("experiment", choices=sorted(p.stem for p in EXPERIMENTS.glob("*.toml")))
    parser.add_argument("--data", type=Path, required=True, help="folder with the data sets")
    parser.add_argument(
        "--reference", action="store_true", help="use the plain loop in one process"
    )
    parser.add_argument(
        "--set", action="append", default=[], help="override a setting, as in `collapipe train`"
    )
    arguments = parser.parse_args()
    job = load_job(EXPERIMENTS / f"{arguments.experiment}.toml", arguments.set)
    data = {
        key: str(arguments.data / Path(value).relative_to(EXPERIMENTS))
        for key in ("train", "held_out")
        if isinstance(value := getattr(job.data, key), str)
    }
    job = job.model_copy(update={"data": job.data.model_copy(update=data)})
    started = time.perf_counter()
    result = run_reference(job) if arguments.reference else run_services(job)
    result["seconds"] = round(time.perf_counter() - started, 1)
    print(
        json.dumps({"experiment": arguments.experiment, "reference": arguments.reference} | result)
    )


def run_reference(job: JobConfig) -> dict[str, Any]:
    """Trains the job with plain torch in one process and one thread."""
    torch.set_num_threads(1)
    if job.clusters != 1:
        raise SystemExit(
            f"the job has {job.clusters} clusters, but --reference trains only one: add --set clusters=1"
        )
    (client,) = make_clients(job)
    started = time.perf_counter()
    for round_index in range(job.training.rounds):
        client.train_round(round_index)
    training_seconds = time.perf_counter() - started
    model = client.model.eval()
    predictions = []
    with torch.no_grad():
        for batch in client.task.held_out_micro_batches(EVALUATION_ROWS):
            inputs = {name: batch.tensors[name] for name in ("input_ids", "attention_mask")}
            if job.task.kind == "translation":
                predictions.append(
                    model.generate(
                        **inputs,
                        max_new_tokens=job.task.max_new_tokens,
                        num_beams=1,
                        do_sample=False,
                    )
                )
            else:
                predictions.append(model(**inputs).logits.argmax(-1))
    return {
        "losses": [client.losses[0], client.losses[-1]],
        "metric": client.task.score(predictions)[client.task.metric],
        "training_seconds": round(training_seconds, 1),
        "weights": digest(dict(model.named_parameters())),
    }


def run_services(job: JobConfig) -> dict[str, Any]:
    """Trains the job with services in separate processes."""
    devices = job.devices_per_cluster
    counts = devices if isinstance(devices, list) else [devices or 3] * job.clusters
    with tempfile.TemporaryDirectory() as directory:
        workspace = Path(directory)
        with LocalTestbed(counts, workspace) as testbed, testbed.client() as client:
            job_id = client.submit(job)
            losses, seconds, evaluations = [], 0.0, []
            for event in client.watch(job_id):
                if event.HasField("round_committed"):
                    summaries = event.round_committed.summaries
                    losses += summaries[0].losses
                    seconds += max(summary.training_seconds for summary in summaries)
                    print(f"round {event.round_committed.num_rounds}", file=sys.stderr)
                elif event.HasField("evaluation"):
                    evaluations.append(event.evaluation.value)
                elif event.HasField("status") and event.status.message:
                    print(event.status.message, file=sys.stderr)
            client.export(job_id, workspace / "model")
        model = AUTO_CLASSES[job.task.kind].from_pretrained(workspace / "model")
    return {
        "losses": [losses[0], losses[-1]],
        "metric": evaluations[-1],
        "metrics": evaluations,
        "training_seconds": round(seconds, 1),
        "weights": digest(dict(model.named_parameters())),
    }


def digest(weights: Mapping[str, Tensor]) -> str:
    """Returns a digest of the names and values of all tensors, independent of their order."""
    checksum = hashlib.sha256()
    for name in sorted(weights):
        checksum.update(name.encode())
        checksum.update(weights[name].detach().contiguous().numpy().tobytes())
    return checksum.hexdigest()[:16]


if __name__ == "__main__":
    main()
