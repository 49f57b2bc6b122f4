"""Tiny models of every family, and micro-batches for them."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM

from collapipe.job import ModelConfig, TaskConfig
from collapipe.models import ModelAdapter, adapter_for, create_config_json

LABELS = ["O", "B-person", "I-person"]

CASES = [
    ("bert", "classification"),
    ("bert", "ner"),
    ("distilbert", "classification"),
    ("distilbert", "ner"),
    ("roberta", "classification"),
    ("roberta", "ner"),
    ("marian", "translation"),
    ("bart", "translation"),
    ("gpt2", "causal_lm"),
    ("llama", "causal_lm"),
    ("mistral", "causal_lm"),
    ("qwen2", "causal_lm"),
    ("qwen3", "causal_lm"),
]

_LABELLER = {
    "hidden_size": 16,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "max_position_embeddings": 20,
}
_TRANSLATOR = {
    "d_model": 16,
    "encoder_layers": 3,
    "decoder_layers": 2,
    "encoder_ffn_dim": 24,
    "decoder_ffn_dim": 24,
    "max_position_embeddings": 20,
}
_LLAMA_CLASS = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 20,
    "attention_dropout": 0.1,
}
_SIZES: dict[str, dict[str, Any]] = {
    "bert": _LABELLER | {"intermediate_size": 24},
    "distilbert": _LABELLER | {"hidden_dim": 24},
    "roberta": _LABELLER | {"intermediate_size": 24},
    "marian": _TRANSLATOR,
    "bart": _TRANSLATOR,
    "gpt2": {"n_embd": 16, "n_layer": 3, "n_head": 2, "n_inner": 24, "n_positions": 20},
    "llama": _LLAMA_CLASS,
    # Windows shorter than a row, in all layers and in two of three.
    "mistral": _LLAMA_CLASS | {"sliding_window": 4},
    "qwen2": _LLAMA_CLASS
    | {"sliding_window": 4, "use_sliding_window": True, "max_window_layers": 1},
    "qwen3": _LLAMA_CLASS | {"head_dim": 8},
}

MakeAdapter = Callable[..., ModelAdapter]
MakeBatch = Callable[..., dict[str, Tensor]]


@pytest.fixture(scope="session")
def make_config_json(make_tokenizer: Callable[[str], Tokenizer]) -> Callable[..., str]:
    """Makes the configuration of a tiny model: (family, kind, pretrained directory, half blocks, overrides)."""

    def make(
        family: str,
        kind: str,
        pretrained: str | None = None,
        half_blocks: bool = False,
        **overrides: object,
    ) -> str:
        sizes = {} if pretrained else _SIZES[family]
        model = ModelConfig(
            family=family,
            pretrained=pretrained,
            config=sizes | overrides,
            half_blocks=half_blocks,
        )
        task = TaskConfig.model_validate({"kind": kind, "max_length": 12, "max_new_tokens": 6})
        return create_config_json(model, task, LABELS, make_tokenizer(family))

    return make


@pytest.fixture(scope="session")
def make_adapter(make_config_json: Callable[..., str]) -> MakeAdapter:
    """Makes the adapter of a tiny model, from the arguments of `make_config_json`."""

    def make(family: str, kind: str, *args: str, **overrides: Any) -> ModelAdapter:
        return adapter_for(family, kind, make_config_json(family, kind, *args, **overrides))

    return make


@pytest.fixture(scope="session")
def with_lora() -> MakeAdapter:
    """Adds LoRA to the configuration of an adapter: (adapter, base type, quantisation, settings of LoRA)."""

    def make(
        adapter: ModelAdapter,
        *,
        dtype: str = "float32",
        base_quantisation: str | None = None,
        **lora: Any,
    ) -> ModelAdapter:
        values = {**adapter.config.to_dict(), "max_new_tokens": 4, "lora": lora, "dtype": dtype}
        if adapter.period == 2:
            values["half_blocks"] = True
        if base_quantisation is not None:
            values["base_quantisation"] = base_quantisation
        return adapter_for(adapter.family, adapter.task, json.dumps(values))

    return make


@pytest.fixture
def save(tokenizer: Tokenizer, tmp_path: Path) -> Callable[..., str]:
    """Writes a model to a pretrained directory and returns its path. It takes the options of `save_pretrained`."""

    def write(model: Any, **options: Any) -> str:
        directory = tmp_path / "pretrained"
        model.save_pretrained(directory, **options)
        tokenizer.save(str(directory / "tokenizer.json"))
        return str(directory)

    return write


@pytest.fixture(scope="session")
def make_foreign() -> Callable[..., Any]:
    """Makes a tiny translator or language model with `transformers` alone: (family, overrides)."""

    def make(family: str, **overrides: Any) -> Any:
        values = {**_SIZES[family], "vocab_size": 40, **overrides}
        if family not in ("marian", "bart"):
            return AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **values))
        values |= {"pad_token_id": 0, "eos_token_id": 2}
        values |= {"decoder_start_token_id": 0, "forced_eos_token_id": 2}
        return AutoModelForSeq2SeqLM.from_config(AutoConfig.for_model(family, **values))

    return make


@pytest.fixture
def half_blocks() -> bool:
    """Whether a layer is cut into two units. A test that tries both overrides it."""
    return False


@pytest.fixture(params=CASES, ids="-".join)
def adapter(
    request: pytest.FixtureRequest, make_adapter: MakeAdapter, half_blocks: bool
) -> ModelAdapter:
    """The adapter of a tiny model, for each family and each of its tasks."""
    return make_adapter(*request.param, half_blocks=half_blocks)


@pytest.fixture(scope="session")
def make_batch() -> MakeBatch:
    """Makes a micro-batch of three rows."""

    def make(kind: str, *, padded: bool, seed: int = 0) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(seed)
        input_ids = torch.randint(4, 40, (3, 9), generator=generator)
        attention_mask = torch.ones_like(input_ids)
        labels = torch.randint(0, len(LABELS), (3, 9), generator=generator)
        if kind in ("translation", "causal_lm"):
            length = 7 if kind == "translation" else 9
            labels = torch.randint(4, 40, (3, length), generator=generator)
        if padded:
            for row, length in ((1, 5), (2, 2)):
                attention_mask[row, length:] = 0
                input_ids[row, length:] = 0
                labels[row, length:] = -100
        if kind == "classification":
            labels = labels[:, 0].contiguous()
        return {"input_ids": input_ids, "attention_mask": attention_mask, "labels": labels}

    return make
