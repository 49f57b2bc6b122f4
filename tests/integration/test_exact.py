"""Tests that training through real services equals a plain loop in one process bit for bit: invariant I1."""

import itertools
from pathlib import Path
from typing import Any

import pytest
from reference.comparison import first_difference
from reference.federated_job import train_job
from reference.tiny_jobs import make_job

from collapipe.job import JobConfig
from collapipe_client import Device, LocalTestbed
from integration.running import FinishedJob, run_job

CASES: dict[str, dict[str, Any]] = {
    "1 device": {"devices_per_cluster": 1},
    "2 devices": {"devices_per_cluster": 2},
    "3 devices": {"devices_per_cluster": 3},
    "6 devices": {"devices_per_cluster": 6, "num_blocks": 6},
    "unequal segments": {
        "num_blocks": 6,
        "devices_per_cluster": 3,
        "schedule": {"strategy": "manual", "segments": [[1, 3, 2]]},
    },
    "blocks on every host": {
        "num_blocks": 6,
        "devices_per_cluster": 2,
        "schedule": {"strategy": "manual", "segments": [[2, 1, 1, 2], [1, 2, 3, 0], [0, 1, 2, 3]]},
        "training": {"rounds": 3},
    },
    "3 clusters, blocks on every host": {
        "num_rows": (12, 21, 33),
        "devices_per_cluster": [1, 1, 1],
        "schedule": {"strategy": "manual", "segments": [[1, 1, 1], [0, 2, 1]]},
        "num_blocks": 3,
        "training": {"rounds": 3},
    },
    "one micro-batch": {"devices_per_cluster": 2, "schedule": {"num_micro_batches": 1}},
    "one in flight": {"devices_per_cluster": 2, "schedule": {"in_flight": 1}},
    "no dropout": {
        "devices_per_cluster": 2,
        "model_config": {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0},
    },
    "bert ner": {"devices_per_cluster": 2, "kind": "ner"},
    "distilbert classification": {"devices_per_cluster": 2, "family": "distilbert"},
    "distilbert ner": {"devices_per_cluster": 2, "family": "distilbert", "kind": "ner"},
    "roberta classification": {"devices_per_cluster": 2, "family": "roberta"},
    "roberta ner": {"devices_per_cluster": 2, "family": "roberta", "kind": "ner"},
    "marian translation": {
        "devices_per_cluster": 2,
        "family": "marian",
        "kind": "translation",
        "training": {"label_smoothing": 0.1},
    },
    "bart translation": {
        "devices_per_cluster": 2,
        "family": "bart",
        "kind": "translation",
        "training": {"label_smoothing": 0.1},
    },
    "gpt2": {"devices_per_cluster": 2, "family": "gpt2", "kind": "causal_lm"},
    "llama": {"devices_per_cluster": 3, "family": "llama", "kind": "causal_lm"},
    "llama answers, 3 clusters": {
        "num_rows": (12, 21, 33),
        "devices_per_cluster": [3, 1, 1],
        "family": "llama",
        "kind": "instruction",
    },
    "lora, llama answers": {
        "devices_per_cluster": 2,
        "family": "llama",
        "kind": "instruction",
        "lora": {"r": 4, "lora_dropout": 0.1, "target_modules": "all-linear"},
    },
    "qwen2 with windows, 3 clusters, blocks on every host": {
        "num_rows": (30, 41, 55),
        "devices_per_cluster": [1, 1, 1],
        "family": "qwen2",
        "kind": "causal_lm",
        "model_config": {
            "use_sliding_window": True,
            "sliding_window": 4,
            "max_window_layers": 1,
        },
        "schedule": {"strategy": "manual", "segments": [[1, 1, 1], [0, 2, 1]]},
    },
    "llama, half blocks, recompute, split backward": {
        "devices_per_cluster": 3,
        "half_blocks": True,
        "family": "llama",
        "kind": "causal_lm",
        "training": {"recompute": True, "split_backward": True},
        "schedule": {"strategy": "manual", "segments": [[1, 4, 1]]},
    },
    "gpt2, frozen embeddings, 2 clusters": {
        "num_rows": (30, 41),
        "devices_per_cluster": [2, 1],
        "family": "gpt2",
        "kind": "causal_lm",
        "freeze_embeddings": True,
    },
    "llama, frozen embeddings, blocks move": {
        "devices_per_cluster": 2,
        "family": "llama",
        "kind": "causal_lm",
        "freeze_embeddings": True,
        "schedule": {"strategy": "manual", "segments": [[1, 2], [2, 1]]},
    },
    "lora, gpt2, 1 device": {
        "devices_per_cluster": 1,
        "family": "gpt2",
        "kind": "causal_lm",
        "lora": {"r": 4, "lora_alpha": 8, "lora_dropout": 0.1, "modules_to_save": ["ln_f"]},
    },
    "lora, llama, 6 devices": {
        "devices_per_cluster": 6,
        "num_blocks": 6,
        "family": "llama",
        "kind": "causal_lm",
        "lora": {"r": 2, "lora_dropout": 0.1, "target_modules": "all-linear", "use_rslora": True},
    },
    "lora, llama, first trained block in the middle, half blocks": {
        "devices_per_cluster": 3,
        "half_blocks": True,
        "family": "llama",
        "kind": "causal_lm",
        "lora": {"target_modules": r".*layers\.[12]\.(self_attn\.q_proj|mlp\.up_proj)"},
        "training": {"split_backward": True},
        "schedule": {"strategy": "manual", "segments": [[1, 2, 3], [1, 1, 2, 1, 1]]},
    },
    "lora, llama, 3 clusters, blocks move, recompute": {
        "num_rows": (30, 41, 55),
        "devices_per_cluster": [1, 1, 1],
        "family": "llama",
        "kind": "causal_lm",
        "lora": {"lora_dropout": 0.1, "target_modules": ["q_proj", "v_proj", "embed_tokens"]},
        "training": {"rounds": 3, "recompute": True},
        "schedule": {"strategy": "manual", "segments": [[1, 1, 1], [0, 2, 1]]},
    },
    "lora, gpt2, 3 clusters, average of the product": {
        "num_rows": (30, 41, 55),
        "devices_per_cluster": [2, 1, 1],
        "family": "gpt2",
        "kind": "causal_lm",
        "lora": {"averaging": "product"},
    },
    "lora on bfloat16, gpt2, 1 device": {
        "devices_per_cluster": 1,
        "family": "gpt2",
        "kind": "causal_lm",
        "base_dtype": "bfloat16",
        "lora": {"r": 4, "lora_alpha": 8, "lora_dropout": 0.1},
    },
    "lora on bfloat16, llama, 6 devices": {
        "devices_per_cluster": 6,
        "num_blocks": 6,
        "family": "llama",
        "kind": "causal_lm",
        "base_dtype": "bfloat16",
        "lora": {"lora_dropout": 0.1, "target_modules": "all-linear"},
    },
    "lora on bfloat16, llama, half blocks, recompute, split backward": {
        "devices_per_cluster": 3,
        "half_blocks": True,
        "family": "llama",
        "kind": "causal_lm",
        "base_dtype": "bfloat16",
        "lora": {"lora_dropout": 0.1, "target_modules": "all-linear"},
        "training": {"recompute": True, "split_backward": True},
        "schedule": {"strategy": "manual", "segments": [[1, 4, 1]]},
    },
    "lora on float16, gpt2, half blocks, 3 clusters, average of the product, blocks move": {
        "num_rows": (30, 41, 55),
        "devices_per_cluster": [1, 1, 1],
        "half_blocks": True,
        "family": "gpt2",
        "kind": "causal_lm",
        "base_dtype": "float16",
        "lora": {"averaging": "product"},
        "training": {"rounds": 3},
        "schedule": {"strategy": "manual", "segments": [[1, 4, 1], [0, 4, 2]]},
    },
    "lora on float16, llama, embedding": {
        "devices_per_cluster": 2,
        "family": "llama",
        "kind": "causal_lm",
        "base_dtype": "float16",
        "lora": {"target_modules": ["q_proj", "v_proj", "embed_tokens"]},
    },
    "lora on bfloat16, marian translation": {
        "devices_per_cluster": 2,
        "family": "marian",
        "kind": "translation",
        "base_dtype": "bfloat16",
        "lora": {"target_modules": ["q_proj", "v_proj"], "lora_dropout": 0.1},
    },
    "lora on 4 bits, llama, blocks move": {
        "devices_per_cluster": 2,
        "family": "llama",
        "kind": "causal_lm",
        "base_quantisation": "nf4",
        "lora": {"lora_dropout": 0.1, "target_modules": "all-linear"},
        "schedule": {"strategy": "manual", "segments": [[1, 2], [2, 1]]},
    },
    "lora on 4 bits, gpt2, half blocks, recompute": {
        "devices_per_cluster": 3,
        "half_blocks": True,
        "family": "gpt2",
        "kind": "causal_lm",
        "base_quantisation": "nf4",
        "lora": {"r": 4},
        "training": {"recompute": True},
        "schedule": {"strategy": "manual", "segments": [[1, 4, 1]]},
    },
    "lora on 4 bits, llama, 3 clusters, average of the product, split backward": {
        "num_rows": (30, 41, 55),
        "devices_per_cluster": [2, 1, 1],
        "family": "llama",
        "kind": "causal_lm",
        "base_quantisation": "nf4",
        "lora": {"averaging": "product"},
        "training": {"split_backward": True},
    },
    "lora on 4 bits, bert classification": {
        "devices_per_cluster": 2,
        "base_quantisation": "nf4",
        "lora": {},
    },
    "lora, bert classification": {"devices_per_cluster": 2, "lora": {}},
    "lora, distilbert ner": {
        "devices_per_cluster": 2,
        "family": "distilbert",
        "kind": "ner",
        "lora": {"lora_dropout": 0.1, "target_modules": ["q_lin", "v_lin"]},
    },
    "lora, marian translation": {
        "devices_per_cluster": 2,
        "family": "marian",
        "kind": "translation",
        "lora": {"target_modules": ["q_proj", "v_proj"], "lora_dropout": 0.1},
    },
    "half blocks, 1 device": {"devices_per_cluster": 1, "half_blocks": True},
    "half blocks, 2 devices": {"devices_per_cluster": 2, "half_blocks": True},
    "half blocks, 6 devices": {"devices_per_cluster": 6, "half_blocks": True},
    "half blocks, distilbert": {
        "devices_per_cluster": 2,
        "half_blocks": True,
        "family": "distilbert",
        "schedule": {"strategy": "manual", "segments": [[1, 5]]},
    },
    "half blocks, marian, recompute": {
        "devices_per_cluster": 3,
        "half_blocks": True,
        "family": "marian",
        "kind": "translation",
        "training": {"recompute": True},
        "schedule": {"strategy": "manual", "segments": [[1, 4, 1]]},
    },
    "split backward": {
        "num_blocks": 6,
        "devices_per_cluster": 3,
        "training": {"split_backward": True},
        "schedule": {"strategy": "manual", "segments": [[1, 3, 2]]},
    },
    "split backward, translation, recompute, update per micro-batch": {
        "devices_per_cluster": 2,
        "family": "marian",
        "kind": "translation",
        "training": {
            "split_backward": True,
            "recompute": True,
            "update_per": "micro_batch",
            "warm_up_steps": 3,
            "label_smoothing": 0.1,
        },
    },
    "recompute": {"devices_per_cluster": 2, "training": {"recompute": True}},
    "update per micro-batch": {
        "devices_per_cluster": 2,
        "training": {"update_per": "micro_batch", "warm_up_steps": 3},
    },
    "sgd with momentum": {
        "devices_per_cluster": 2,
        "training": {"optimizer": "sgd", "momentum": 0.9, "learning_rate": 0.1},
    },
    "no clipping": {"devices_per_cluster": 2, "training": {"clip_norm": 0.0}},
    "warm-up, constant": {
        "devices_per_cluster": 2,
        "training": {"warm_up_steps": 2, "decay": "constant"},
    },
    "warm-up, linear": {
        "devices_per_cluster": 2,
        "training": {"warm_up_steps": 1, "decay": "linear", "rounds": 3},
    },
    "warm-up, inverse square root": {
        "devices_per_cluster": 2,
        "training": {"warm_up_steps": 2, "decay": "inverse_sqrt", "rounds": 3},
    },
    "3 clusters": {"num_rows": (12, 21, 33), "devices_per_cluster": [3, 1, 1]},
    "3 clusters, translation": {
        "num_rows": (10, 25, 17),
        "devices_per_cluster": [2, 1, 1],
        "family": "marian",
        "kind": "translation",
        "training": {"label_smoothing": 0.1},
    },
}


@pytest.mark.parametrize("case", CASES)
def test_services_equal_reference(testbed: LocalTestbed, tmp_path: Path, case: str) -> None:
    job = make_job(tmp_path, **CASES[case])
    finished = run_job(testbed, job)
    check_placement(job, finished)
    check_equals_reference(job, finished)


@pytest.mark.parametrize("half_blocks", [False, True])
def test_blocks_move_between_rounds_with_their_optimizer_state(
    testbed: LocalTestbed, tmp_path: Path, half_blocks: bool
) -> None:
    job = make_job(
        tmp_path,
        num_blocks=3 if half_blocks else 6,
        half_blocks=half_blocks,
        devices_per_cluster=3,
        training={"rounds": 3},
        schedule={"strategy": "manual", "segments": [[1, 3, 2], [3, 2, 1], [1, 1, 4]]},
    )
    before = identities(testbed)
    finished = run_job(testbed, job)
    check_placement(job, finished)
    check_equals_reference(job, finished)

    assert identities(testbed) == before, "a process was restarted"
    assert {started.attempt for started in finished.started} == {0}
    owners = [owner_of_units(plan) for plan in finished.plans(0)]
    for index, (earlier, now) in enumerate(itertools.pairwise(owners), start=1):
        moved = [unit for unit in now if now[unit] != earlier[unit]]
        assert moved
        # With one cluster, averaging changes nothing. So a host that keeps a unit need not fetch it.
        fetched = finished.summaries[index][0].fetched_bytes
        assert fetched == sum(finished.unit_bytes(unit) for unit in moved)


def test_half_blocks_change_no_bit_without_dropout(testbed: LocalTestbed, tmp_path: Path) -> None:
    dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    job = make_job(tmp_path, half_blocks=True, devices_per_cluster=3, model_config=dropout)
    finished = run_job(testbed, job)
    whole = job.model_copy(update={"model": job.model.model_copy(update={"half_blocks": False})})
    check_equals_reference(whole, finished)


def test_half_blocks_placed_by_their_profile_equal_reference(
    testbed: LocalTestbed, tmp_path: Path
) -> None:
    schedule = {"strategy": "proportional"}
    job = make_job(tmp_path, half_blocks=True, devices_per_cluster=3, schedule=schedule)
    check_equals_reference(job, run_job(testbed, job))


def check_placement(job: JobConfig, finished: FinishedJob) -> None:
    """Checks that each round ran on the control unit, the edge server and the job's number of devices."""
    for cluster_index in range(job.clusters):
        devices = job.num_devices(cluster_index)
        assert devices is not None
        plans = finished.plans(cluster_index)
        assert [len(plan.stages) for plan in plans] == [devices + 2] * job.training.rounds
        if job.schedule.strategy == "manual":
            for plan, segments in zip(plans, job.schedule.segments * len(plans), strict=False):
                blocks = segments if len(segments) > devices else [0, *segments, 0]
                expected = [blocks[0] + 1, *blocks[1:-1], blocks[-1] + 1]
                assert [s.stop_unit - s.start_unit for s in plan.stages] == expected


def check_equals_reference(job: JobConfig, finished: FinishedJob) -> None:
    """Checks that weights, optimizer states and losses equal the reference."""
    expected = train_job(job, finished.late_clusters, finished.ended_early)
    weights = finished.weights()
    if job.model.base_quantisation is not None:
        # The hosts keep the files of the layers that they quantise, but the model in one process has no such weights.
        weights = {name: weights[name] for name in expected.weights}
    difference = first_difference(expected.weights, weights)
    assert difference is None, f"weights: {difference}"
    for cluster_index in range(job.clusters):
        difference = first_difference(
            expected.optimizer_states[cluster_index], finished.optimizer_state(cluster_index)
        )
        assert difference is None, f"optimizer of cluster {cluster_index}: {difference}"
        assert finished.losses(cluster_index) == expected.losses[cluster_index]


def identities(testbed: LocalTestbed) -> dict[str, str]:
    """Returns the incarnation of each host, which changes when its process is restarted."""
    assert testbed.lost() == []
    with testbed.client() as client:
        return {status.host.host_id: status.host.incarnation for status in client.hosts()}


def owner_of_units(plan: Any) -> dict[int, str]:
    """Returns the host that runs each unit."""
    return {
        unit: stage.host_id
        for stage in plan.stages
        for unit in range(stage.start_unit, stage.stop_unit)
    }


def test_device_with_little_memory_recomputes_where_another_one_does_not(tmp_path: Path) -> None:
    # Two blocks have room for one micro-batch of one row. So without recomputation, the first device would starve the
    # second.
    devices = [Device(speed=1000.0, memory_bytes=180_000) for _ in range(2)]
    job = make_job(
        tmp_path,
        num_blocks=4,
        training={"recompute": "auto"},
        schedule={"strategy": "dssra", "num_micro_batches": 8},
    )
    with LocalTestbed([devices], tmp_path / "testbed") as testbed:
        testbed.wait_until_registered()
        finished = run_job(testbed, job)
        for plan in finished.plans(0):
            assert [stage.recompute for stage in plan.stages] == [False, True, False, False]
        check_equals_reference(job, finished)
