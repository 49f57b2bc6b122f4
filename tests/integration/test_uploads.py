"""Tests uploads as encoded deltas. Exact runs with `fp32` are in `test_exact.py`."""

from collections.abc import Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from reference.fedavg import average
from reference.federated_job import Trained, copy_weights, make_clients, saved_weights
from reference.tiny_jobs import make_job
from torch import Tensor

from collapipe.emulation.emulation_file import Emulation
from collapipe.emulation.links import LinkDescription
from collapipe.job import JobConfig
from collapipe.weights.delta_codecs import encode_delta
from collapipe_client import LocalTestbed
from integration.exactness import check_equal
from integration.running import FinishedJob, run_job

CASES: dict[str, dict[str, Any]] = {
    "bf16": {"codec": "bf16", "devices_per_cluster": 2},
    "int8, blocks move": {
        "codec": "int8",
        "devices_per_cluster": 3,
        "schedule": {"strategy": "manual", "segments": [[1, 3, 2], [3, 2, 1], [1, 1, 4]]},
    },
    "top_k, one device": {
        "codec": "top_k",
        "devices_per_cluster": 1,
        "schedule": {"strategy": "vanilla_fl"},
    },
    "top_k, 2 clusters": {
        "codec": "top_k",
        "num_rows": (12, 21),
        "devices_per_cluster": [2, 1],
        "training": {"optimizer": "sgd", "learning_rate": 0.1},
    },
    "int8, tied weights": {
        "codec": "int8",
        "devices_per_cluster": 2,
        "family": "marian",
        "kind": "translation",
    },
}


def job_with(
    folder: Path, codec: str, training: dict[str, Any] | None = None, **options: Any
) -> JobConfig:
    settings = {"rounds": 3, "upload_codecs": [codec], **(training or {})}
    return make_job(folder, training=settings, **{"num_blocks": 6, **options})


def train_in_one_process(
    job: JobConfig,
    late_clusters: Mapping[int, Collection[int]] = {},
    ended_early: Mapping[tuple[int, int], int] = {},
) -> Trained:
    """Trains each cluster in a plain loop, and averages what the codec leaves of their changes. Takes what `train_job` takes."""
    clients = make_clients(job)
    residuals: list[dict[str, Tensor]] = [{} for _ in clients]
    for round_index in range(job.training.rounds):
        base, arrived = copy_weights(clients[0].model), []
        for index, client in enumerate(clients):
            if index in late_clusters.get(round_index, ()):
                continue
            trained = client.train_round(round_index, ended_early)
            encoded = encode_delta(
                job.training.upload_codecs[0], trained.weights, base, residuals[index]
            )
            residuals[index] = encoded.residual
            arrived.append(replace(trained, weights=encoded.weights))
        averaged = average(arrived)
        for client in clients:
            client.model.load_state_dict(averaged)
    states = []
    for client, residual in zip(clients, residuals, strict=True):
        first_names = dict(client.model.named_parameters())
        kept = {f"{n}//upload_residual": t for n, t in residual.items() if n in first_names}
        states.append(client.optimizer_state() | kept)
    return Trained(saved_weights(clients[0].model), states, [client.losses for client in clients])


@pytest.mark.parametrize("case", CASES)
def test_services_equal_one_process(testbed: LocalTestbed, tmp_path: Path, case: str) -> None:
    job = job_with(tmp_path, **CASES[case])
    finished = run_job(testbed, job)
    check_equals_one_process(job, finished)
    if job.clusters == 1 and job.schedule.strategy != "manual":
        # The hosts continue from what the edge server decodes, so they need not fetch it.
        assert [summary.fetched_bytes for (summary,) in finished.summaries[1:]] == [0, 0]


def check_equals_one_process(job: JobConfig, finished: FinishedJob) -> None:
    """Checks that weights, optimizer states with their residuals, and losses equal those of a plain loop."""
    expected = train_in_one_process(job, finished.late_clusters, finished.ended_early)
    check_equal(expected, finished)
    assert any(name.endswith("//upload_residual") for name in finished.optimizer_state(0))


def test_pushes_are_smaller(testbed: LocalTestbed, tmp_path: Path) -> None:
    # Small tensors do not shrink much, so the model is wider than other tiny ones.
    wide = {"hidden_size": 64, "intermediate_size": 256}
    pushed = {
        codec: pushed_bytes(
            run_job(
                testbed,
                job_with(tmp_path, codec, {"rounds": 1}, devices_per_cluster=1, model_config=wide),
            )
        )
        for codec in ("fp32", "int8", "top_k")
    }
    assert pushed["int8"] < 0.3 * pushed["fp32"]
    assert pushed["top_k"] < 0.06 * pushed["fp32"]


def test_dssra_uploads_with_the_codec_that_suits_a_slow_uplink(
    emulated_testbed: LocalTestbed, tmp_path: Path
) -> None:
    # The error of int8 costs a quarter of a nominal round. Its pushes save more than half of one.
    constants = [0.0, 0.0, 0.0, 30.0, 0.0]
    chooses = {
        "strategy": "dssra",
        "convergence_weight": 1.0,
        "convergence_constants": constants,
    }
    slow = Emulation(links={"*>edge-server": LinkDescription(rate_bps=5e5)})
    wide = {"hidden_size": 64, "intermediate_size": 256}
    both = {"rounds": 1, "upload_codecs": ["fp32", "int8"]}
    emulated_testbed.emulate(slow)
    try:
        job = job_with(
            tmp_path, "fp32", both, devices_per_cluster=1, model_config=wide, schedule=chooses
        )
        chosen = run_job(emulated_testbed, job)
    finally:
        emulated_testbed.emulate(Emulation())
    job = job_with(tmp_path, "fp32", {"rounds": 1}, devices_per_cluster=1, model_config=wide)
    lossless = run_job(emulated_testbed, job)
    assert chosen.plans(0)[0].upload_codec == "int8"
    assert pushed_bytes(chosen) < 0.3 * pushed_bytes(lossless)


def pushed_bytes(finished: FinishedJob) -> int:
    return sum(push.bytes for (summary,) in finished.summaries for push in summary.pushed)


def test_lossy_uploads_learn_as_lossless_ones_do(tmp_path: Path) -> None:
    last = {}
    for codec in ("fp32", "int8", "top_k"):
        training = {"rounds": 6, "local_steps": 4, "clip_norm": 1.0, "decay": "constant"}
        job = job_with(tmp_path, codec, training, kind="ner", num_rows=(40,), num_blocks=1)
        losses = train_in_one_process(job).losses[0]
        first_loss, last[codec] = losses[0], sum(losses[-5:]) / 5
    assert last["fp32"] < 0.1 * first_loss
    assert last["int8"] == pytest.approx(last["fp32"], rel=0.05)
    assert last["top_k"] < 0.1 * first_loss
