"""The oracle of exports: the library alone, given an export, answers and scores as `predict` and `evaluate` do."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    AutoTokenizer,
)

from collapipe.job import LABELLING_TASKS, LANGUAGE_TASKS
from collapipe.tasks import Task
from collapipe_client.training import how_to_load

from .exports import MAX_NEW_TOKENS, Case, Trained

AUTO: dict[str, Any] = {
    "classification": AutoModelForSequenceClassification,
    "ner": AutoModelForTokenClassification,
    "translation": AutoModelForSeq2SeqLM,
    **dict.fromkeys(LANGUAGE_TASKS, AutoModelForCausalLM),
}
TEXTS = ["road river", "seven green lamp:", "the winter song is quiet"]


def check_exports(case: Case, folder: Path) -> None:
    """Trains a case in this process, and compares each of its exports with the units, `predict` and `evaluate`."""
    trained = Trained(case, folder)
    exports = [trained.export(folder / "export")]
    if case.lora:
        exports.append(trained.export(folder / "merged", merged=True))
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
