"""Tests of uses of a trained model: its answers and metrics equal those of the exported model."""

import json
import shutil
import subprocess
import sys
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import AutoPeftModelForCausalLM
from reference.comparison import first_difference
from reference.tiny_jobs import CLASSES, make_job
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    AutoTokenizer,
    pipeline,
)

from collapipe.errors import InvalidInputError
from collapipe.v1.model_use_pb2 import ModelUse, Prediction
from collapipe.v1.scheduler_pb2 import JOB_STATE_CANCELLED, JOB_STATE_SUCCEEDED
from collapipe_client import CollaPipeClient, LocalTestbed
from collapipe_client.view_state import definition_lines, say_evaluation
from integration.running import run_job

TEXTS = ["road river", "quiet seven paper window", "lamp", "green stone under glass", "song"]
LORA = {"r": 4, "lora_alpha": 32, "target_modules": "all-linear"}


def answers(
    client: CollaPipeClient, job: str, texts: Sequence[str], **options: Any
) -> tuple[list[list[int]], list[str]]:
    """Returns the tokens and the text of each answer."""
    tokens: dict[int, list[int]] = defaultdict(list)
    words: dict[int, str] = defaultdict(str)
    ended: set[int] = set()
    for piece in client.predict(job, texts, **options):
        assert piece.text_index not in ended
        tokens[piece.text_index] += piece.tokens
        words[piece.text_index] += piece.text
        if piece.is_last:
            ended.add(piece.text_index)
    numbers = range(len(texts))
    assert ended == set(numbers)
    return [tokens[number] for number in numbers], [words[number] for number in numbers]


def generated(
    model: Any, tokenizer: Any, texts: Sequence[str], num_before: int | None = None, **options: Any
) -> tuple[list[list[int]], list[str]]:
    """Generates for each text alone with `transformers`. Returns the new tokens and their texts.

    Args:
        num_before: Tokens of the answer before the first new one. `None` stands for the length of the text.
    """
    tokens, words = [], []
    for text in texts:
        prompt = tokenizer(text, return_tensors="pt")
        options.setdefault("do_sample", False)
        row = model.eval().generate(**prompt, **options)[0].tolist()
        start = prompt["input_ids"].shape[1] if num_before is None else num_before
        tokens.append(row[start:])
        whole, before = (
            tokenizer.decode(ids, skip_special_tokens=True) for ids in (row, row[:start])
        )
        words.append(whole.removeprefix(before))
    return tokens, words


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("gpt2", {}),
        ("llama", {}),
        ("gpt2", {"lora": LORA}),
        ("llama", {"lora": LORA}),
        ("llama", {"lora": LORA, "base_quantisation": "nf4"}),
    ],
    ids=["gpt2", "llama", "gpt2-LoRA", "llama-LoRA", "llama-LoRA-nf4"],
)
def test_tokens_over_three_devices_equal_those_of_generate(
    testbed: LocalTestbed, tmp_path: Path, family: str, changes: dict[str, Any]
) -> None:
    shape = {"devices_per_cluster": 3, "training": {"learning_rate": 0.05}}
    job = make_job(tmp_path, family, "causal_lm", num_rows=(41,), **shape)
    with testbed.client() as client:
        if changes:
            client.export(run_job(testbed, job).job_id, tmp_path / "base")
            job = make_job(tmp_path, family, "causal_lm", num_rows=(41,), **changes, **shape)
            model = {"pretrained": str(tmp_path / "base"), "config": {}}
            job = job.model_copy(update={"model": job.model.model_copy(update=model)})
        finished = run_job(testbed, job)
        assert len(finished.plans(0)[-1].stages) == 5
        client.export(finished.job_id, tmp_path / "model", merged=True)
        tokenizer: Any = AutoTokenizer.from_pretrained(tmp_path / "model")
        models: list[Any] = [AutoModelForCausalLM.from_pretrained(tmp_path / "model")]
        if "base_quantisation" in changes:
            # An adapter would change weights that are not quantised, so the result is the whole model.
            client.export(finished.job_id, tmp_path / "again")
            assert not (tmp_path / "again" / "adapter_config.json").exists()
        elif changes:
            client.export(finished.job_id, tmp_path / "adapter")
            models.append(AutoPeftModelForCausalLM.from_pretrained(tmp_path / "adapter"))
        found = answers(client, finished.job_id, TEXTS, max_new_tokens=12)
        for model in models:
            assert found == generated(model, tokenizer, TEXTS, max_new_tokens=12)
        drawn = {"temperature": 0.9, "top_k": 20}
        sampled = answers(client, finished.job_id, TEXTS[:2], max_new_tokens=12, seed=3, **drawn)
        expected: list[list[int]] = []
        for text in TEXTS[:2]:
            torch.manual_seed(3)
            tokens, _ = generated(
                models[0], tokenizer, [text], max_new_tokens=12, do_sample=True, **drawn
            )
            expected += tokens
        assert sampled[0] == expected != found[0][:2]
        with pytest.raises(InvalidInputError, match=r"^text 2 .* positions, more than the 40 of"):
            answers(client, finished.job_id, [TEXTS[0], "road " * 38], max_new_tokens=12)


@pytest.mark.parametrize("family", ["marian", "bart"])
def test_translations_equal_those_of_generate(
    testbed: LocalTestbed, tmp_path: Path, family: str
) -> None:
    training = {"learning_rate": 0.05}
    job = make_job(tmp_path, family, "translation", devices_per_cluster=3, training=training)
    finished = run_job(testbed, job)
    with testbed.client() as client:
        client.export(finished.job_id, tmp_path / "model")
        found = answers(client, finished.job_id, TEXTS, max_new_tokens=9)
        drawn = {"temperature": 0.9, "top_k": 20}
        sampled, _ = answers(client, finished.job_id, TEXTS, max_new_tokens=9, seed=3, **drawn)
        by_default, _ = answers(client, finished.job_id, TEXTS[:1])
        with pytest.raises(InvalidInputError, match=r"^text 1 .* more than task.max_length = 32"):
            answers(client, finished.job_id, ["road " * 40])
        refused = (
            r"^2 of 3 texts cannot be answered \(number 2, 4\); text 2 .* more than task.max_length"
        )
        with pytest.raises(InvalidInputError, match=refused):
            answers(client, finished.job_id, ["", "road " * 40, TEXTS[0], "road " * 41])
        given = ["road " * 40, TEXTS[0], "", TEXTS[1], "road " * 41]
        pieces = list(client.predict(finished.job_id, given, max_new_tokens=9, skip_refused=True))
        assert {piece.text_index for piece in pieces if piece.refusal} == {0, 4}
        skipped = [[t for p in pieces if p.text_index == i for t in p.tokens] for i in (1, 3)]
        assert skipped == found[0][:2]
        [piece] = client.predict(finished.job_id, given[:1], skip_refused=True)
        assert piece.refusal and piece.is_last
        use = ModelUse(prediction=Prediction(texts=TEXTS[:2], numbers=[1]))
        with pytest.raises(InvalidInputError, match="1 numbers were given for 2 texts"):
            list(client._use_model(finished.job_id, use, iter(()), lambda reason: None))
    tokenizer: Any = AutoTokenizer.from_pretrained(tmp_path / "model")
    model: Any = AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "model")
    tokens, texts = generated(model, tokenizer, TEXTS, num_before=1, max_new_tokens=9)
    assert found[0] == tokens
    options = {"num_before": 1, "max_new_tokens": 9, "do_sample": True, **drawn}
    expected: list[list[int]] = []
    for text in TEXTS:
        torch.manual_seed(3)
        expected += generated(model, tokenizer, [text], **options)[0]
    assert sampled == expected != tokens
    assert [text.strip() for text in found[1]] == [text.strip() for text in texts]
    assert by_default == generated(model, tokenizer, TEXTS[:1], num_before=1)[0]


def test_labels_equal_those_of_the_exported_model(testbed: LocalTestbed, tmp_path: Path) -> None:
    training = {"learning_rate": 0.02, "rounds": 3, "local_steps": 8}
    job = make_job(tmp_path, devices_per_cluster=3, training=training)
    # The labels can be learned, so that the answers differ.
    rows = [{"text": text, "label": CLASSES[i % 3]} for i, text in enumerate(TEXTS)] * 8
    assert isinstance(job.data.train, list)
    Path(job.data.train[0]).write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    finished = run_job(testbed, job)
    with testbed.client() as client:
        client.export(finished.job_id, tmp_path / "model")
        _, labels = answers(client, finished.job_id, TEXTS)
    model: Any = AutoModelForSequenceClassification.from_pretrained(tmp_path / "model")
    classify: Any = pipeline(
        "text-classification",
        model=model,
        tokenizer=AutoTokenizer.from_pretrained(tmp_path / "model"),
    )
    assert labels == [classify(text)[0]["label"] for text in TEXTS]
    assert len(set(labels)) > 1


def test_tags_equal_those_of_the_exported_model(testbed: LocalTestbed, tmp_path: Path) -> None:
    training = {"learning_rate": 0.02, "rounds": 3, "local_steps": 6}
    job = make_job(tmp_path, "bert", "ner", devices_per_cluster=3, training=training)
    finished = run_job(testbed, job)
    with testbed.client() as client:
        client.export(finished.job_id, tmp_path / "model")
        _, found = answers(client, finished.job_id, TEXTS)
    model: Any = AutoModelForTokenClassification.from_pretrained(tmp_path / "model").eval()
    tokenizer: Any = AutoTokenizer.from_pretrained(tmp_path / "model")
    seen = set()
    for text, lines in zip(TEXTS, found, strict=True):
        encoded = tokenizer(text, return_tensors="pt", return_offsets_mapping=True)
        offsets = encoded.pop("offset_mapping")[0].tolist()
        labels = model(**encoded).logits[0].argmax(dim=-1).tolist()
        expected, start = [], 0
        for word in text.split():
            stop = start + len(word)
            token = next(i for i, (a, b) in enumerate(offsets) if a < b and start < b <= stop)
            expected.append(f"{word}\t{model.config.id2label[labels[token]]}\n")
            start = stop + 1
        assert lines == "".join(expected)
        seen |= {line.split("\t")[1] for line in expected}
    assert len(seen) > 1


@pytest.mark.parametrize(
    ("family", "kind"),
    [
        ("bert", "classification"),
        ("bert", "ner"),
        ("marian", "translation"),
        ("gpt2", "causal_lm"),
        ("llama", "instruction"),
    ],
)
def test_metrics_on_the_held_out_file_equal_those_of_the_last_evaluation(
    testbed: LocalTestbed, tmp_path: Path, family: str, kind: str
) -> None:
    job = make_job(tmp_path, family, kind, num_rows=(41,), devices_per_cluster=3)
    assert job.data.held_out is not None
    files = [Path(name) for name in job.data.held_out.split(",")]
    copies = [path.rename(tmp_path / f"only-at-the-client{path.suffix}") for path in files]
    for path, copy in zip(files, copies, strict=True):
        path.write_bytes(copy.read_bytes())
    job_id = run_job(testbed, job).job_id
    for path in files:
        path.unlink()
    with testbed.client() as client:
        expected = client.find_job(job_id).evaluation
        found = client.evaluate(job_id, *copies)
        assert any("only 4 rows" in each.what for each in found.findings) or kind == "causal_lm"
        del found.findings[:]
        assert found == expected
        with copies[-1].open("ab") as file:
            file.write(b"\xff\n")
        with pytest.raises(InvalidInputError, match=rf"^{copies[-1]}:\d+: .*is not UTF-8"):
            client.evaluate(job_id, *copies)


def test_use_waits_for_a_job_and_neither_disturbs_the_other(
    testbed: LocalTestbed, tmp_path: Path
) -> None:
    shape: dict[str, Any] = {"num_rows": (41,), "devices_per_cluster": 3}
    answering = run_job(testbed, make_job(tmp_path, "gpt2", "causal_lm", **shape))
    training = {"rounds": 18, "local_steps": 2}
    job = make_job(tmp_path, "gpt2", "causal_lm", seed=8, training=training, **shape)
    undisturbed = run_job(testbed, job)
    with testbed.client() as client:
        expected = answers(client, answering.job_id, TEXTS[:2])
        job_id = client.submit(job)
        with pytest.raises(ZeroDivisionError):  # A client that goes away while it waits.
            answers(client, answering.job_id, TEXTS[:1], waiting=lambda reason: 1 // 0)
        waits: list[str] = []
        found = answers(client, answering.job_id, TEXTS[:2], waiting=waits.append)
        assert found == expected
        assert any(f"job {job_id} of client:" in wait and " to end (" in wait for wait in waits)
        assert client.find_job(job_id).state == JOB_STATE_SUCCEEDED

        # A use between two runs of a job is newer than the first and older than the second.
        job_id = client.submit(job)
        for event in client.watch(job_id):
            if event.HasField("round_committed"):
                client.cancel(job_id)
        assert client.find_job(job_id).state == JOB_STATE_CANCELLED, "the job ended too early"
        pieces = client.predict(job_id, TEXTS, max_new_tokens=20)
        next(pieces)
        pieces.close()  # The client goes away.
        answers(client, job_id, TEXTS[:1])
    resumed = run_job(testbed, job, resume=True)
    assert resumed.job_id == job_id
    assert first_difference(undisturbed.weights(), resumed.weights()) is None


def test_command_starts_a_testbed_and_needs_no_data_of_the_job(tmp_path: Path) -> None:
    workspace = tmp_path / "workspace"
    job = make_job(tmp_path / "data", "gpt2", "causal_lm", num_rows=(41,), devices_per_cluster=2)
    held_out = tmp_path / "rows.txt"
    with LocalTestbed([2], workspace) as testbed:
        testbed.wait_until_registered()
        finished = run_job(testbed, job)
        with testbed.client() as client:
            tokens, texts = answers(client, finished.job_id, TEXTS[:2], max_new_tokens=5)
            evaluation = client.find_job(finished.job_id).evaluation
    assert job.data.held_out is not None
    held_out.write_bytes(Path(job.data.held_out).read_bytes())
    shutil.rmtree(tmp_path / "data")

    def run(*arguments: str, **options: Any) -> str:
        command = [sys.executable, "-m", "collapipe_client", *arguments]
        ended = subprocess.run(
            [*command, "--workspace", str(workspace)],
            capture_output=True,
            text=True,
            timeout=240,
            check=False,
            **options,
        )
        assert ended.returncode == 0, ended.stdout + ended.stderr
        return ended.stdout

    # Standard output has nothing but the answer, although the command waits for its testbed.
    printed = run("predict", job.name, "--max-new-tokens", "5", *TEXTS[:2])
    assert printed == "".join(f"{text}\n" for text in texts)
    with LocalTestbed([2], workspace) as testbed:
        testbed.wait_until_registered()
        printed = run("predict", job.name, "--max-new-tokens", "5", "--json", *TEXTS[:2])
        documents = [json.loads(line) for line in printed.splitlines() if '"answer"' in line]
        by_text = {document["text"]: document for document in documents}
        assert [by_text[text]["tokens"] for text in TEXTS[:2]] == tokens
        assert [by_text[text]["answer"] for text in TEXTS[:2]] == texts
        printed = run("evaluate", job.name, "--data", str(held_out))
        assert printed.splitlines() == [say_evaluation(evaluation), *definition_lines(evaluation)]
        shown = json.loads(run("jobs", "show", job.name, "--json"))
        assert shown["evaluation"]["definitions"] == dict(evaluation.definitions)
