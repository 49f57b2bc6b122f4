"""Trains a job on real data, with the services or in one process, to compare what they learn.

    python -m benchmarks.learning banking77 --data DIR              with the services
    python -m benchmarks.learning banking77 --data DIR --reference  with the plain loop of tests/reference
    python -m benchmarks.learning docstrings --export DIR           keeps the model, for `--set model.pretrained=DIR`
    python -m benchmarks.learning docstrings --rate 20              paces every link at 20 Mbit/s

Prints one JSON object with the losses of the first and last steps, the metric, the seconds and pushed bytes of rounds,
and a digest of all weights. Equal digests mean that the models are equal bit for bit.
"""

import argparse
import hashlib
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
)

from collapipe.emulation.emulation_file import Emulation
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
    "causal_lm": AutoModelForCausalLM,
    "instruction": AutoModelForCausalLM,
}


def main() -> None:
    """Runs one experiment."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("experiment", choices=sorted(p.stem for p in EXPERIMENTS.glob("*.toml")))
    parser.add_argument("--data", type=Path, default=Path("."), help="folder with the data sets")
    parser.add_argument("--export", type=Path, help="where the model stays after training")
    parser.add_argument("--rate", type=float, help="rate of every link, in Mbit/s")
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
    if arguments.reference:
        result = run_reference(job)
    else:
        result = run_services(job, arguments.export, arguments.rate)
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
            elif job.task.kind in ("causal_lm", "instruction"):
                logits = model(**inputs, use_cache=False).logits
                predictions.append(measure_tokens(logits, batch.tensors["labels"]))
            else:
                predictions.append(model(**inputs).logits.argmax(-1))
    return {
        "losses": [client.losses[0], client.losses[-1]],
        "metric": client.task.score(predictions)[client.task.metric],
        "training_seconds": round(training_seconds, 1),
        "weights": digest(dict(model.named_parameters())),
    }


def measure_tokens(logits: Tensor, labels: Tensor) -> Tensor:
    """Returns the sum of the losses of each row and its number of right tokens, [rows, 2]."""
    losses = nn.functional.cross_entropy(logits.transpose(1, 2), labels, reduction="none")
    right = (logits.argmax(-1) == labels).sum(1)
    return torch.stack([losses.sum(1), right.to(losses.dtype)], dim=1)


def run_services(
    job: JobConfig, export: Path | None = None, rate: float | None = None
) -> dict[str, Any]:
    """Trains the job with services in separate processes.

    Args:
        export: Where the model stays.
        rate: Rate of every link, in Mbit/s, by pauses in the processes. `None` for no limit.
    """
    devices = job.devices_per_cluster
    counts = devices if isinstance(devices, list) else [devices or 3] * job.clusters
    link = {"*": {"rate_bps": (rate or 0) * 1e6}}
    emulation = Emulation.model_validate({"links": link}) if rate else None
    with tempfile.TemporaryDirectory() as folder:
        workspace = Path(folder)
        directory = export or workspace / "model"
        with (
            LocalTestbed(counts, workspace, emulation=emulation) as testbed,
            testbed.client() as client,
        ):
            job_id = client.submit(job)
            losses, seconds, evaluations = [], 0.0, []
            round_seconds, pushed_bytes = [], []
            for event in client.watch(job_id):
                if event.HasField("round_committed"):
                    summaries = event.round_committed.summaries
                    losses += summaries[0].losses
                    seconds += max(summary.training_seconds for summary in summaries)
                    round_seconds.append(event.round_committed.round_seconds)
                    pushed_bytes.append(sum(push.bytes for s in summaries for push in s.pushed))
                    print(f"round {event.round_committed.num_rounds}", file=sys.stderr)
                elif event.HasField("evaluation"):
                    evaluation = event.evaluation
                    evaluations.append(evaluation.value)
                elif event.HasField("status") and event.status.message:
                    print(event.status.message, file=sys.stderr)
            client.export(job_id, directory, merged=True)
        model = AUTO_CLASSES[job.task.kind].from_pretrained(directory)
    return {
        "losses": [losses[0], losses[-1]],
        "metric": evaluations[-1],
        "metrics": evaluations,
        "other_metrics": dict(evaluation.other_metrics),
        "training_seconds": round(seconds, 1),
        "round_seconds": round(statistics.median(round_seconds), 1),
        "pushed_bytes": round(statistics.median(pushed_bytes)),
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
