"""Tiny models, and fixtures that several tests of stages need."""

from collections.abc import Callable
from typing import Any

import pytest
from tokenizers import Tokenizer

from collapipe.job import ModelConfig, TaskConfig
from collapipe.models import ModelAdapter, adapter_for, create_config_json

from .chains import MakeBatch, TinyModel, states_of

_LLAMA = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 24,
}
_SIZES: dict[str, dict[str, Any]] = {
    "gpt2": {"n_embd": 16, "n_layer": 3, "n_head": 2, "n_inner": 24, "n_positions": 24},
    "llama": _LLAMA,
    # Windows shorter than a slice or a row, in all layers and in two of three.
    "mistral": _LLAMA | {"sliding_window": 4},
    "qwen2": _LLAMA | {"sliding_window": 4, "use_sliding_window": True, "max_window_layers": 1},
    "qwen3": _LLAMA | {"head_dim": 8},
    "marian": {
        "d_model": 16,
        "encoder_layers": 1,
        "decoder_layers": 1,
        "encoder_attention_heads": 2,
        "decoder_attention_heads": 2,
        "encoder_ffn_dim": 24,
        "decoder_ffn_dim": 24,
        "max_position_embeddings": 24,
    },
}

MakeAdapter = Callable[..., ModelAdapter]


@pytest.fixture(scope="session")
def make_adapter(make_tokenizer: Callable[[str], Tokenizer]) -> MakeAdapter:
    """Makes the adapter of a tiny language model, or of a tiny translator."""

    def make(
        family: str,
        *,
        max_length: int = 12,
        dropout: float = 0.0,
        lora: str = "",
        half_blocks: bool = False,
        dtype: str = "float32",
        **more: object,
    ) -> ModelAdapter:
        kind = "translation" if family == "marian" else "causal_lm"
        drops = dict.fromkeys(["attn_pdrop", "embd_pdrop", "resid_pdrop"], dropout)
        if family != "gpt2":
            drops = {"attention_dropout": dropout}
        config = _SIZES[family] | drops | more
        model = ModelConfig.model_validate(
            {
                "family": family,
                "config": config,
                "half_blocks": half_blocks,
                "base_dtype": dtype,
                "lora": {"r": 2, "lora_alpha": 8, "target_modules": lora} if lora else None,
            }
        )
        task = TaskConfig(kind=kind, max_length=max_length, max_new_tokens=8)  # type: ignore[arg-type]
        return adapter_for(
            family, kind, create_config_json(model, task, [], make_tokenizer(family))
        )

    return make


@pytest.fixture(scope="session")
def tiny(bert: ModelAdapter, make_batch: MakeBatch) -> TinyModel:
    """The tiny BERT with initial weights."""
    return TinyModel(bert, states_of(bert), make_batch)
