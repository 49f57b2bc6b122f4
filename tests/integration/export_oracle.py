"""The oracle of exports: the library alone, given an export, answers and scores as `predict` and `evaluate` do."""

import json
import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from sacrebleu import corpus_bleu
from seqeval.metrics import f1_score as entity_f1  # type: ignore[import-untyped]
from seqeval.scheme import IOB2  # type: ignore[import-untyped]
from sklearn.metrics import accuracy_score, f1_score  # type: ignore[import-untyped]
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
            check_metrics(trained, directory, model)
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


def check_metrics(trained: Trained, directory: Path, model: Any) -> None:
    """Compares the metrics of `evaluate` with those that no code of CollaPipe computes."""
    evaluation, job, kind = trained.evaluate(), trained.job, trained.case.kind
    assert job.data.held_out is not None
    rows: Sequence[Any] = open_file(job.data.held_out, kind, job.data).read()
    if kind in LANGUAGE_TASKS:
        expected = language_metrics(trained, model)
    else:
        tokenizer: Any = AutoTokenizer.from_pretrained(directory)
        answers = [library_answer(kind, tokenizer, model, row.texts[0]) for row in rows]
        expected = METRICS[kind]([wanted_answer(kind, row) for row in rows], answers)
    found = {evaluation.metric: evaluation.value, **evaluation.other_metrics}
    assert found == pytest.approx(expected, rel=1e-5)
    # A text of a language model may be divided among several rows.
    num_rows = trained.task.num_held_out_rows if kind in LANGUAGE_TASKS else len(rows)
    assert evaluation.num_rows == num_rows


@torch.no_grad()
def language_metrics(trained: Trained, model: Any) -> dict[str, float]:
    """Sums over the target tokens of the held-out rows."""
    losses: list[float] = []
    right: list[bool] = []
    right_rows: list[bool] = []
    for batch in trained.task.held_out_micro_batches(1):
        [labels] = batch.tensors["labels"]
        [logits] = model(**library_inputs(trained.case, batch.tensors)).logits
        logits, labels = logits[labels != -100], labels[labels != -100]
        losses += torch.nn.functional.cross_entropy(logits, labels, reduction="none").tolist()
        row = (logits.argmax(dim=-1) == labels).tolist()
        right += row
        right_rows.append(all(row))
    metrics = {
        "perplexity": math.exp(math.fsum(losses) / len(losses)),
        "token_accuracy": sum(right) / len(right),
    }
    if trained.case.kind == "instruction":
        metrics["exact_match"] = sum(right_rows) / len(right_rows)
    return metrics


def wanted_answer(kind: str, row: Any) -> Any:
    """Returns the label, the tags of the words, or the translation of a row."""
    if kind == "translation":
        return row.texts[1]
    return row.labels[0] if kind == "classification" else list(row.labels)


@torch.no_grad()
def library_answer(kind: str, tokenizer: Any, model: Any, text: str) -> Any:
    """Returns the label, the tag of the first token of each word, or the translation of a text."""
    inputs = tokenizer(text, return_tensors="pt")
    if kind == "translation":
        generated = model.generate(**inputs)[0]
        return tokenizer.decode(generated, skip_special_tokens=True)
    labels = [
        model.config.id2label[int(label)]
        for label in model(**inputs).logits[0].argmax(dim=-1).flatten()
    ]
    if kind == "classification":
        return labels[0]
    # A token may begin with the space before its word.
    ends = [end for _, end in tokenizer(text, return_offsets_mapping=True)["offset_mapping"]]
    starts = [word.start() for word in re.finditer(r"\S+", text)]
    return [
        next(label for label, end in zip(labels, ends, strict=True) if end > start)
        for start in starts
    ]


def classification_metrics(wanted: Sequence[str], found: Sequence[str]) -> dict[str, float]:
    return {
        "accuracy": accuracy_score(wanted, found),
        "macro_f1": f1_score(wanted, found, average="macro"),
        "largest_class": max(map(wanted.count, wanted)) / len(wanted),
    }


def ner_metrics(wanted: Sequence[list[str]], found: Sequence[list[str]]) -> dict[str, float]:
    return {
        "entity_f1": entity_f1(wanted, found),
        "strict_entity_f1": entity_f1(wanted, found, mode="strict", scheme=IOB2),
    }


def translation_metrics(wanted: Sequence[str], found: Sequence[str]) -> dict[str, float]:
    return {"bleu": corpus_bleu([each.strip() for each in found], [wanted]).score}


METRICS: dict[str, Any] = {
    "classification": classification_metrics,
    "ner": ner_metrics,
    "translation": translation_metrics,
}


@torch.no_grad()
def check_answers(trained: Trained, directory: Path, model: Any) -> None:
    tokenizer: Any = AutoTokenizer.from_pretrained(directory)
    kind = trained.case.kind
    for text, (tokens, answer) in zip(TEXTS, trained.predict(TEXTS), strict=True):
        if kind == "classification":
            assert answer == library_answer(kind, tokenizer, model, text)
            continue
        if kind == "ner":
            tags = library_answer(kind, tokenizer, model, text)
            assert answer == "".join(
                f"{word}\t{tag}\n" for word, tag in zip(text.split(), tags, strict=True)
            )
            continue
        inputs = tokenizer(text, return_tensors="pt")
        generated = model.generate(**inputs, max_new_tokens=MAX_NEW_TOKENS, do_sample=False)[0]
        num_before = 1 if kind == "translation" else inputs["input_ids"].shape[1]
        assert tokens == generated[num_before:].tolist()
        before = tokenizer.decode(generated[:num_before], skip_special_tokens=True)
        whole = tokenizer.decode(generated, skip_special_tokens=True)
        # `predict` does not print the bytes of a character that the last token leaves incomplete.
        assert answer == whole[len(before) :].rstrip("\N{REPLACEMENT CHARACTER}")
