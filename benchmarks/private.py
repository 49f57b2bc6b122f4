"""What differential privacy of clusters costs: accuracy against epsilon on banking77, and processor time.

    python -m benchmarks.private accuracy --data DIR    trains a linear layer on pretrained token embeddings, in one process
    python -m benchmarks.private cost                   makes an update of 22.7 million values private, in one thread

`accuracy` divides the rows evenly among 7 and 50 clusters. It clips, adds noise and averages with the code of the services.
The embeddings are those of MiniLM and stay frozen, so 29,645 values are trained. Prints a table in Markdown. Guessing gives 0.013.

DIR is the folder with `banking77/train.jsonl` and `banking77/test.jsonl`.
"""

import argparse
import hashlib
import itertools
import random
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor, nn

from collapipe.aggregation import federated_average
from collapipe.job import JobConfig
from collapipe.scheduler.privacy_account import PrivacyAccount
from collapipe.stage_runtime.private_updates import UpdatePrivacy, make_private
from collapipe.weights.tensor_blob import TensorBlob

ROOT = Path(__file__).parents[1]
# The reference is part of the tests, because it must share no code with the services.
sys.path.insert(0, str(ROOT / "tests"))

from reference.federated_job import make_clients  # noqa: E402

ROUNDS = 20
CLIP_NORM = 4.0
LEARNING_RATE = 8.0
MINI_BATCH = 16
LOCAL_STEPS = 10
NOISE_MULTIPLIERS = {7: (0, 0.01, 0.1, 0.5), 50: (0, 0.1, 0.5, 1, 2, 4)}
"""By the number of clusters."""
NUM_COST_VALUES = 22_700_000


def main() -> None:
    """Measures one of the two costs."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("what", choices=("accuracy", "cost"))
    parser.add_argument("--data", type=Path, default=Path("."), help="folder with the data sets")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.what == "accuracy":
        measure_accuracy(options.data)
    else:
        measure_cost()


def make_job(data: Path, clusters: int, noise_multiplier: float) -> JobConfig:
    return JobConfig.from_dict(
        {
            "clusters": clusters,
            "task": {"kind": "classification", "max_length": 64},
            "data": {
                "train": str(data / "banking77/train.jsonl"),
                "held_out": str(data / "banking77/test.jsonl"),
            },
            "model": {"pretrained": "minilm"},
            "privacy": {"noise_multiplier": noise_multiplier, "clip_norm": CLIP_NORM},
        },
        "a private job",
    )


def measure_accuracy(data: Path) -> None:
    """Prints a line for each number of clusters and noise multiplier."""
    (rows, labels), held_out = encode(make_job(data, 1, 0))
    print("| clusters | noise multiplier | epsilon of averages | epsilon of updates | accuracy |")
    print("|---|---|---|---|---|", flush=True)
    for clusters, multipliers in NOISE_MULTIPLIERS.items():
        order = random.Random(0).sample(range(len(rows)), len(rows))
        shards = [(rows[order[i::clusters]], labels[order[i::clusters]]) for i in range(clusters)]
        for noise_multiplier in multipliers:
            job = make_job(data, clusters, noise_multiplier)
            head = train(job, shards)
            with torch.no_grad():
                right = (head(held_out[0]).argmax(1) == held_out[1]).double().mean()
            epsilons = "none | none"
            if job.privacy.is_on:
                loss = PrivacyAccount().after_rounds(job, ROUNDS).loss(job)
                epsilons = f"{loss.epsilon:,.1f} | {loss.update_epsilon:,.1f}"
            print(f"| {clusters:,} | {noise_multiplier} | {epsilons} | {right:.3f} |", flush=True)


def encode(job: JobConfig) -> Iterator[tuple[Tensor, Tensor]]:
    """Yields the features of the training rows and of the held-out rows, each with the labels.

    The features of a row are the mean of its token embeddings less the mean of all embeddings, with norm 1.
    """
    (client,) = make_clients(job)
    table = client.model.get_input_embeddings().weight.detach()
    table = table - table.mean(0)
    indices = range(client.task.num_rows)
    parts = (indices[start : start + 32] for start in indices[::32])
    train_rows = itertools.chain.from_iterable(client.task.micro_batches(p, 1) for p in parts)
    for batches in (train_rows, client.task.held_out_micro_batches(32)):
        features, labels = [], []
        for batch in batches:
            mask = batch.tensors["attention_mask"].unsqueeze(-1)
            sums = (table[batch.tensors["input_ids"]] * mask).sum(1)
            features.append(nn.functional.normalize(sums, dim=1))
            labels.append(batch.tensors["labels"])
        yield torch.cat(features), torch.cat(labels)


def train(job: JobConfig, shards: list[tuple[Tensor, Tensor]]) -> nn.Linear:
    """Trains some mini-batches with each cluster in a round, and averages what the clusters make of them."""
    torch.manual_seed(0)
    num_classes = 1 + max(int(labels.max()) for _, labels in shards)
    head = nn.Linear(shards[0][0].shape[1], num_classes)
    nn.init.zeros_(head.weight)
    nn.init.zeros_(head.bias)
    for round_index in range(ROUNDS):
        base = {name: tensor.clone() for name, tensor in head.state_dict().items()}
        updates = []
        for cluster, (rows, labels) in enumerate(shards):
            head.load_state_dict(base)
            optimizer = torch.optim.SGD(head.parameters(), lr=LEARNING_RATE)
            for _ in range(LOCAL_STEPS):
                drawn = torch.randint(len(rows), (MINI_BATCH,))
                optimizer.zero_grad()
                nn.functional.cross_entropy(head(rows[drawn]), labels[drawn]).backward()
                optimizer.step()
            if job.privacy.is_on:
                secret = hashlib.sha256(f"{round_index}/{cluster}".encode()).digest()
                privacy = UpdatePrivacy(CLIP_NORM, job.noise_stddev, secret)
                make_private(dict(head.named_parameters()), base, privacy, ("", ""))
            updates.append({name: tensor.clone() for name, tensor in head.state_dict().items()})
        equal = [1] * len(updates)
        head.load_state_dict(
            {name: federated_average((update[name] for update in updates), equal) for name in base}
        )
    return head


def measure_cost() -> None:
    """Prints the processor time of a private update, without training."""
    parameter = nn.Parameter(torch.randn(NUM_COST_VALUES))
    base = {"weight": torch.zeros(NUM_COST_VALUES)}
    privacy = UpdatePrivacy(1.0, 0.1, b"secret")
    started = time.process_time()
    TensorBlob({"weight": parameter.detach()}).digest  # noqa: B018  # The noise depends on it.
    hashed = time.process_time()
    make_private({"weight": parameter}, base, privacy, ("", ""))
    ended = time.process_time()
    print(
        f"{NUM_COST_VALUES:,} values: {hashed - started:.2f} s for the digest, {ended - hashed:.2f} s for clipping and noise"
    )


if __name__ == "__main__":
    main()
