"""Tests of jobs with LoRA: what travels, what stays on disk, and what is exported."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import AutoPeftModelForCausalLM, PeftModel
from reference.tiny_jobs import make_job
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from collapipe.emulation.boxes import Box
from collapipe.planning.decisions import RoundDecision
from collapipe.planning.estimate import Estimator, count_in_process
from collapipe.planning.estimate_documents import Request
from collapipe_client import LocalTestbed
from collapipe_client.training import how_to_load
from integration.running import run_job

LORA = {"r": 4, "lora_alpha": 32, "target_modules": "all-linear"}


@pytest.fixture(scope="module")
def pretrained(testbed: LocalTestbed, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small Llama that was trained here."""
    folder = tmp_path_factory.mktemp("pretrained")
    job = make_job(folder, "llama", "causal_lm", devices_per_cluster=1, name="base")
    with testbed.client() as client:
        client.export(run_job(testbed, job).job_id, folder / "model")
    return folder / "model"


def lora_job(folder: Path, pretrained: Path, *, base_dtype: str = "float32", **changes: Any) -> Any:
    job = make_job(
        folder, "llama", "causal_lm", num_rows=(30, 41), devices_per_cluster=1, lora=LORA, **changes
    )
    settings = {"pretrained": str(pretrained), "config": {}, "base_dtype": base_dtype}
    model = job.model.model_copy(update=settings)
    return job.model_copy(update={"model": model})


def test_adapter_and_merged_model_generate_the_same_tokens(
    testbed: LocalTestbed, pretrained: Path, tmp_path: Path
) -> None:
    job = lora_job(tmp_path, pretrained, training={"learning_rate": 0.1})
    with testbed.client() as client:
        job_id = run_job(testbed, job).job_id
        files = client.export(job_id, tmp_path / "adapter")
        client.export(job_id, tmp_path / "merged")
        client.export(job_id, tmp_path / "merged", merged=True)
    assert not (tmp_path / "merged" / "adapter_config.json").exists()
    names = {path.name for path in files}
    assert names >= {"adapter_config.json", "adapter_model.safetensors", "tokenizer.json"}
    assert "model.safetensors" not in names

    base: Any = AutoModelForCausalLM.from_pretrained(pretrained)
    adapted: Any = AutoPeftModelForCausalLM.from_pretrained(tmp_path / "adapter")
    merged: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    scope: dict[str, Any] = {}
    exec(how_to_load("causal_lm", tmp_path / "adapter", is_adapter=True), scope)
    tokenizer: Any = AutoTokenizer.from_pretrained(tmp_path / "adapter")
    prompt = tokenizer("road river", return_tensors="pt")
    answers = [
        model.eval().generate(**prompt, max_new_tokens=12, do_sample=False).tolist()
        for model in (base, adapted, merged, scope["model"])
    ]
    assert answers[1] == answers[2] == answers[3] != answers[0]


def test_frozen_weights_travel_once_and_only_adapters_are_pushed(
    testbed: LocalTestbed, pretrained: Path, tmp_path: Path
) -> None:
    seed = torch.seed() % 2**32  # so that no earlier test has trained the same adapters
    first = run_job(testbed, lora_job(tmp_path, pretrained, seed=seed))
    again = run_job(testbed, lora_job(tmp_path, pretrained, seed=(seed + 1) % 2**32))

    trained = first.commit.global_units
    states = load_file(pretrained / "model.safetensors")
    frozen_bytes = sum(tensor.nbytes for tensor in states.values())
    adapter_bytes = sum(
        (first.state / "edge-server/jobs" / first.job_id / "blobs" / unit.weights_digest)
        .stat()
        .st_size
        for unit in trained
    )
    assert adapter_bytes < frozen_bytes / 2
    assert [unit.frozen_digest for unit in again.commit.global_units] == [
        unit.frozen_digest for unit in trained
    ], "jobs with one pretrained model share its frozen weights"
    for summaries in (*first.summaries[1:], *again.summaries):
        for summary in summaries:
            assert sum(transfer.bytes for transfer in summary.pushed) < adapter_bytes
            assert summary.fetched_bytes < frozen_bytes / 2
    with testbed.client() as client:
        answer = client.explain(again.job_id, 1)
    model = RoundDecision.from_json(json.loads(answer.decision_json)).question.problem.model
    for cluster_index, summary in enumerate(again.summaries[1]):
        *stages, _ = again.plans(cluster_index)[1].stages  # The edge server pushes nothing.
        planned = sum(model.weights_bytes(stage.start_unit, stage.stop_unit) for stage in stages)
        pushed = sum(transfer.bytes for transfer in summary.pushed)
        assert pushed == pytest.approx(planned, rel=0.02)
    digests = {unit.unit_index: unit.frozen_digest for unit in trained}
    for plan in (first.plans(0)[0], first.plans(1)[0]):
        for stage in plan.stages:
            kept = {path.name for path in (first.state / stage.host_id / "frozen").iterdir()}
            assert kept >= {digests[unit] for unit in range(stage.start_unit, stage.stop_unit)}


def test_merged_model_of_a_bfloat16_base_is_what_peft_merges(
    testbed: LocalTestbed, pretrained: Path, tmp_path: Path
) -> None:
    job = lora_job(tmp_path, pretrained, base_dtype="bfloat16", training={"learning_rate": 0.1})
    with testbed.client() as client:
        finished = run_job(testbed, job)
        client.export(finished.job_id, tmp_path / "adapter")
        client.export(finished.job_id, tmp_path / "merged", merged=True)
        answer = client.explain(finished.job_id, 0)
    adapter = load_file(tmp_path / "adapter/adapter_model.safetensors")
    assert {tensor.dtype for tensor in adapter.values()} == {torch.float32}

    base: Any = AutoModelForCausalLM.from_pretrained(pretrained, dtype=torch.bfloat16)
    adapted: Any = PeftModel.from_pretrained(base, tmp_path / "adapter")
    expected = adapted.merge_and_unload().state_dict()
    merged = load_file(tmp_path / "merged/model.safetensors")
    assert {tensor.dtype for tensor in merged.values()} == {torch.bfloat16}
    assert merged.keys() == expected.keys()
    assert all(torch.equal(merged[name], expected[name]) for name in expected)

    model = RoundDecision.from_json(json.loads(answer.decision_json)).question.problem.model
    tokens, hidden = job.task.max_length, base.config.hidden_size
    assert model.activation_bytes == 2 * tokens * hidden
    stored = sum(tensor.nbytes for tensor in load_file(pretrained / "model.safetensors").values())
    frozen = model.embedding_frozen_bytes + model.head_frozen_bytes
    frozen += model.num_blocks * model.block_frozen_bytes
    assert frozen == pytest.approx(stored / 2, rel=0.3)


@pytest.mark.parametrize("lora", [None, LORA], ids=["full", "lora"])
def test_estimate_says_what_a_round_moves(
    testbed: LocalTestbed, tmp_path: Path, lora: dict[str, Any] | None
) -> None:
    job = make_job(
        tmp_path, "llama", "causal_lm", num_rows=(30, 41), devices_per_cluster=1, lora=lora
    )
    request = Request(job=job, devices=(Box(profile="laptop"),))
    estimated = Estimator(request, count_in_process).estimate().clusters
    finished = run_job(testbed, job)
    for cluster, summary in zip(estimated, finished.summaries[1], strict=True):
        pushed = sum(transfer.bytes for transfer in summary.pushed)
        assert pushed == pytest.approx(sum(host.pushed_bytes for host in cluster.hosts), rel=0.02)
        fetched = sum(host.fetched_bytes for host in cluster.hosts)
        assert summary.fetched_bytes == pytest.approx(fetched, rel=0.02)
    for cluster, plan in zip(estimated, (finished.plans(0)[0], finished.plans(1)[0]), strict=True):
        assert [(host.start_unit, host.stop_unit) for host in cluster.hosts] == [
            (stage.start_unit, stage.stop_unit) for stage in plan.stages
        ]
