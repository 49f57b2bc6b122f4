"""The oracle of exports: the library alone, given an export, answers as `predict` and `evaluate` do.

Every family, task, origin of the weights and type of the frozen ones is tried, with LoRA and without. The models are trained and
answer in the process of the test. For three of the cases, services train and answer, and a fresh process loads the export.
"""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from sacrebleu import corpus_bleu
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    AutoTokenizer,
)

from collapipe.data.sources import open_file
from collapipe.job import LABELLING_TASKS, LANGUAGE_TASKS
from collapipe.tasks import Task
from collapipe_client import LocalTestbed
from collapipe_client.training import how_to_load

from .exports import MAX_NEW_TOKENS, Case, Trained, cases, make_job_of
from .running import run_job

AUTO: dict[str, Any] = {
    "classification": AutoModelForSequenceClassification,
    "ner": AutoModelForTokenClassification,
    "translation": AutoModelForSeq2SeqLM,
    **dict.fromkeys(LANGUAGE_TASKS, AutoModelForCausalLM),
}
TEXTS = ["road river", "seven green lamp:", "the winter song is quiet"]


@pytest.mark.parametrize("case", cases(), ids=str)
def test_library_computes_generates_and_measures_what_the_services_do(
    case: Case, tmp_path: Path
) -> None:
    trained = Trained(case, tmp_path)
    exports = [trained.export(tmp_path / "export")]
    if case.lora:
        exports.append(trained.export(tmp_path / "merged", merged=True))
    for directory in exports:
        model = load(case, directory)
        check_logits(trained, model)
        if case.kind not in LABELLING_TASKS:
            check_end(trained, directory, model)
        if (
            case.dtype == "float32"
        ):  # Merging rounds to a shorter type, and changes tokens that are almost as probable.
            check_metrics(trained, model)
            check_answers(trained, directory, model)


def load(case: Case, directory: Path) -> Any:
    """Loads an export as the printed code does. Nothing may be missing or left over."""
    if (directory / "adapter_config.json").exists():
        scope: dict[str, Any] = {}
        exec(how_to_load(case.kind, directory, is_adapter=True, base_dtype=case.dtype), scope)
        return scope["model"].eval()
    model, info = AUTO[case.kind].from_pretrained(directory, output_loading_info=True)
    assert {name: set(keys) for name, keys in info.items() if keys} == {}
    return model.eval()


@torch.no_grad()
def check_logits(trained: Trained, model: Any) -> None:
    [batch] = trained.task.held_out_micro_batches(99)
    found, expected = (
        model(**library_inputs(trained.case, batch.tensors)).logits,
        trained.logits(batch),
    )
    assert found.dtype == expected.dtype
    error = (found - expected).abs().max() / expected.abs().max()
    limit = {"float32": 1e-5 if trained.case.lora else 0.0, "float16": 0.05, "bfloat16": 0.2}
    assert error <= limit[trained.case.dtype]


def library_inputs(case: Case, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Returns what the library takes. Only a translator needs the labels, from which it makes the decoder's inputs."""
    names = ["input_ids", "attention_mask", *["labels"] * (case.kind == "translation")]
    return {name: tensors[name] for name in names}


def check_end(trained: Trained, directory: Path, model: Any) -> None:
    """Checks that the export names the token that was trained as the end, and keeps the other settings of generation."""
    tokenizer: Any = AutoTokenizer.from_pretrained(directory)
    end = trained.task.end_id
    assert tokenizer.eos_token_id == end
    settings = json.loads((directory / "generation_config.json").read_text())
    ends = settings["eos_token_id"]
    assert end == (ends[0] if isinstance(ends, list) else ends)
    assert model.generation_config.eos_token_id == ends
    if (directory / "config.json").exists():
        assert json.loads((directory / "config.json").read_text())["eos_token_id"] == end
    if trained.case.origin != "random":
        given = json.loads((directory.parent / "pretrained" / "generation_config.json").read_text())
        for name in ("bad_words_ids", "forced_bos_token_id"):
            assert settings.get(name) == given.get(name)


@torch.no_grad()
def check_metrics(trained: Trained, model: Any) -> None:
    evaluation = trained.evaluate()
    task: Task = trained.task
    predictions = []
    for batch in task.held_out_micro_batches(3):
        inputs = library_inputs(trained.case, batch.tensors)
        if trained.case.kind == "translation":
            del inputs["labels"]
            predictions.append(model.generate(**inputs)[:, 1:])
            continue
        logits = model(**inputs).logits
        if trained.case.kind in LANGUAGE_TASKS:
            labels = batch.tensors["labels"]
            losses = torch.nn.functional.cross_entropy(
                logits.transpose(1, 2), labels, reduction="none"
            )
            right = (logits.argmax(dim=-1) == labels).sum(dim=1)
            predictions.append(torch.stack([losses.sum(dim=1), right], dim=1))
        else:
            predictions.append(logits.argmax(dim=-1))
    expected = task.score(predictions)
    found = {evaluation.metric: evaluation.value, **evaluation.other_metrics}
    assert found == pytest.approx(expected, rel=1e-5)
    assert evaluation.num_rows == task.num_held_out_rows


@torch.no_grad()
def check_answers(trained: Trained, directory: Path, model: Any) -> None:
    tokenizer: Any = AutoTokenizer.from_pretrained(directory)
    kind = trained.case.kind
    for text, (tokens, answer) in zip(TEXTS, trained.predict(TEXTS), strict=True):
        inputs = tokenizer(text, return_tensors="pt")
        if kind in LABELLING_TASKS:
            labels = model(**inputs).logits[0].argmax(dim=-1)
            if kind == "classification":
                assert answer == model.config.id2label[int(labels)]
            continue
        generated = model.generate(**inputs, max_new_tokens=MAX_NEW_TOKENS, do_sample=False)[0]
        num_before = 1 if kind == "translation" else inputs["input_ids"].shape[1]
        assert tokens == generated[num_before:].tolist()
        before = tokenizer.decode(generated[:num_before], skip_special_tokens=True)
        whole = tokenizer.decode(generated, skip_special_tokens=True)
        # `predict` does not print the bytes of a character that the last token leaves incomplete.
        assert answer == whole[len(before) :].rstrip("\N{REPLACEMENT CHARACTER}")


READER = """
import json, sys
import transformers

directory, auto_class, texts, options = json.loads(sys.stdin.read())
tokenizer = transformers.AutoTokenizer.from_pretrained(directory)
load = getattr(transformers, auto_class).from_pretrained
model, info = load(directory, output_loading_info=True)
assert not any(info.values()), info
answers = []
for text in texts:
    inputs = tokenizer(text, return_tensors="pt")
    if model.can_generate():
        start = 1 if model.config.is_encoder_decoder else inputs["input_ids"].shape[1]
        answers.append(model.generate(**inputs, **options)[0, start:].tolist())
    else:
        answers.append(model.config.id2label[int(model(**inputs).logits.argmax())])
print(json.dumps(answers))
"""
"""What a person would write. It imports nothing of CollaPipe."""


@pytest.mark.parametrize(
    ("family", "kind", "origin", "lora"),
    [
        ("bert", "classification", "labels", False),
        ("marian", "translation", "tied", True),
        ("llama", "instruction", "apart", False),
    ],
)
def test_fresh_process_with_the_library_alone_answers_as_the_services(
    testbed: LocalTestbed, family: str, kind: str, origin: str, lora: bool, tmp_path: Path
) -> None:
    case = Case(family, kind, origin, lora, "float32")
    job = make_job_of(
        case, tmp_path, devices_per_cluster=1, training={"rounds": 3, "local_steps": 8}
    )
    assert job.data.held_out is not None
    rows = open_file(job.data.held_out, kind, job.data).read()
    texts = [row.texts[0] for row in rows]
    options: dict[str, Any] = {}  # The export of a translator has its own.
    if kind in LANGUAGE_TASKS:
        options = {"max_new_tokens": 12, "do_sample": False}
    notes: list[str] = []

    def take_note(event: Any) -> None:
        if event.HasField("data_note"):
            notes.append(event.data_note.message)

    with testbed.client() as client:
        job_id = run_job(testbed, job, on_event=take_note).job_id
        client.export(job_id, tmp_path / "export", merged=True)
        evaluation = client.find_job(job_id).evaluation
        tokens: list[list[int]] = [[] for _ in texts]
        answers = ["" for _ in texts]
        for piece in client.predict(job_id, texts, max_new_tokens=options.get("max_new_tokens")):
            tokens[piece.text_index] += piece.tokens
            answers[piece.text_index] += piece.text
    told = [note for note in notes if "labelling layer" in note]
    assert len(told) == (origin == "labels")
    asked = [str(tmp_path / "export"), AUTO[kind].__name__, texts, options]
    read = subprocess.run(
        [sys.executable, "-c", READER],
        input=json.dumps(asked),
        capture_output=True,
        text=True,
        check=False,
        timeout=240,
    )
    assert read.returncode == 0, read.stderr
    assert json.loads(read.stdout) == (tokens if kind not in LABELLING_TASKS else answers)
    wanted = [row.labels[0] if kind in LABELLING_TASKS else row.texts[1] for row in rows]
    if kind == "translation":
        # The evaluation cuts blanks off, as its metric does.
        expected = corpus_bleu([each.strip() for each in answers], [wanted]).score
    else:
        expected = sum(map(str.__eq__, answers, wanted)) / len(rows)
    assert evaluation.value == pytest.approx(expected)
