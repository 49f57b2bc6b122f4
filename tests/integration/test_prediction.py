"""Tests of uses of a trained model: its answers and metrics equal those of the exported model."""

from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import AutoPeftModelForCausalLM
from reference.tiny_jobs import make_job
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    pipeline,
)

from collapipe.errors import InvalidInputError
from collapipe_client import CollaPipeClient, LocalTestbed
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


@pytest.mark.parametrize("lora", [None, LORA], ids=["full", "LoRA"])
@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_tokens_over_three_devices_equal_those_of_generate(
    testbed: LocalTestbed, tmp_path: Path, family: str, lora: Any
) -> None:
    shape = {"devices_per_cluster": 3, "training": {"learning_rate": 0.05}}
    job = make_job(tmp_path, family, "causal_lm", num_rows=(41,), **shape)
    with testbed.client() as client:
        if lora is not None:
            client.export(run_job(testbed, job).job_id, tmp_path / "base")
            job = make_job(tmp_path, family, "causal_lm", num_rows=(41,), lora=lora, **shape)
            model = {"pretrained": str(tmp_path / "base"), "config": {}}
            job = job.model_copy(update={"model": job.model.model_copy(update=model)})
        finished = run_job(testbed, job)
        assert len(finished.plans(0)[-1].stages) == 5
        client.export(finished.job_id, tmp_path / "model", merged=True)
        tokenizer: Any = AutoTokenizer.from_pretrained(tmp_path / "model")
        models: list[Any] = [AutoModelForCausalLM.from_pretrained(tmp_path / "model")]
        if lora is not None:
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
        with pytest.raises(InvalidInputError, match=r"^text 2 .* more than the 40 positions"):
            answers(client, finished.job_id, [TEXTS[0], "road " * 38], max_new_tokens=12)
