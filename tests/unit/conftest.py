"""Fixtures that several packages need: no waiting for the disk, vocabularies and a tiny BERT."""

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from emulated_links import ChangingEmulation
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from torch import Tensor

from collapipe.job import ModelConfig, TaskConfig
from collapipe.models import (
    ModelAdapter,
    adapter_for,
    create_config_json,
    initial_model,
    split_state,
)

TINY = {
    "hidden_size": 16,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "intermediate_size": 24,
    "max_position_embeddings": 20,
}

MakeBatch = Callable[[int], dict[str, Tensor]]
MakeTokenizer = Callable[[str], Tokenizer]


@pytest.fixture(scope="session", autouse=True)
def _no_fsync() -> Iterator[None]:
    """Saves the time of the disk. No test here takes the power away."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda descriptor: None)
        yield


@pytest.fixture
def emulation(tmp_path: Path) -> ChangingEmulation:
    return ChangingEmulation(tmp_path / "emulation.json")


@pytest.fixture(scope="session")
def make_tokenizer() -> MakeTokenizer:
    """Makes a vocabulary of 36 words and the special tokens of a family."""

    def make(family: str) -> Tokenizer:
        special = ["<pad>", "<s>", "</s>", "<unk>"]
        if family in ("bert", "distilbert"):
            special = ["[PAD]", "[CLS]", "[SEP]", "[UNK]"]
        elif family in ("gpt2", "qwen2", "qwen3"):
            special = ["<|pad|>", "<s>", "<|endoftext|>", "<unk>"]
        words = special + [f"w{number}" for number in range(36)]
        vocabulary = {word: number for number, word in enumerate(words)}
        made = Tokenizer(models.WordLevel(vocabulary, unk_token=special[3]))
        made.pre_tokenizer = pre_tokenizers.Whitespace()
        made.post_processor = processors.TemplateProcessing(
            single=f"{special[1]} $A {special[2]}",
            special_tokens=[(special[1], 1), (special[2], 2)],
        )
        return made

    return make


@pytest.fixture(scope="session")
def tokenizer(make_tokenizer: MakeTokenizer) -> Tokenizer:
    """The vocabulary for BERT."""
    return make_tokenizer("bert")


@pytest.fixture(scope="session")
def bert_config_json(tokenizer: Tokenizer) -> str:
    """The configuration of a BERT with 3 blocks and dropout 0.1, for classification."""
    task = TaskConfig(kind="classification", max_length=12)
    return create_config_json(ModelConfig(config=TINY), task, ["a", "b", "c"], tokenizer)


@pytest.fixture(scope="session")
def bert(bert_config_json: str) -> ModelAdapter:
    """The adapter of the tiny BERT, which has units 0 to 4."""
    return adapter_for("bert", "classification", bert_config_json)


@pytest.fixture(scope="session")
def half_bert(bert_config_json: str) -> ModelAdapter:
    """The same BERT, cut into half blocks. It has units 0 to 7."""
    values = json.loads(bert_config_json) | {"half_blocks": True}
    return adapter_for("bert", "classification", json.dumps(values))


@pytest.fixture
def bert_states(bert: ModelAdapter) -> list[dict[str, Tensor]]:
    """The initial weights of each unit."""
    states = split_state(bert, initial_model(bert, None, seed=3))
    return [{name: tensor.clone() for name, tensor in state.items()} for state in states]


@pytest.fixture(scope="session")
def make_batch() -> MakeBatch:
    """Makes the tensors of a micro-batch of 3 rows. Its number decides its length."""

    def make(number: int) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(number)
        length = 4 + number % 5
        input_ids = torch.randint(4, 40, (3, length), generator=generator)
        attention_mask = torch.ones_like(input_ids)
        attention_mask[1, length - 2 :] = 0
        labels = torch.randint(0, 3, (3,), generator=generator)
        return {"input_ids": input_ids, "attention_mask": attention_mask, "labels": labels}

    return make
