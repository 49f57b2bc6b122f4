"""GPT-2."""

from typing import Any

from torch import Tensor, nn
from transformers.models.gpt2.configuration_gpt2 import GPT2Config
from transformers.models.gpt2.modeling_gpt2 import GPT2LMHeadModel

from collapipe.job import LANGUAGE_TASKS
from collapipe.models.decoder_only import DecoderOnlyAdapter, SharedInputs, positions_of_pass
from collapipe.models.special_tokens import SpecialTokens
from collapipe.models.unit import Side


class Gpt2Adapter(DecoderOnlyAdapter):
    """Cuts GPT-2, which learns an embedding of each position."""

    family = "gpt2"
    config_class = GPT2Config
    model_classes = dict.fromkeys(LANGUAGE_TASKS, GPT2LMHeadModel)
    embedding_path = "transformer"
    blocks_path = "transformer.h"
    head_parts = ("ln_f",)
    norm_path = "transformer.ln_f"
    attention_parts = frozenset({"ln_1", "attn"})
    special_tokens = SpecialTokens(
        {
            "pad_token": "<|endoftext|>",
            "bos_token": "<|endoftext|>",
            "eos_token": "<|endoftext|>",
            "unk_token": "<|endoftext|>",
        },
        "$A",
    )
    defaults = {"n_embd": 256, "n_layer": 4, "n_head": 4}
    fixed = {**DecoderOnlyAdapter.fixed, "add_cross_attention": False}

    def run_embedding(self, module: nn.Module, side: Side) -> Tensor:
        parts: Any = module
        token_ids = side["input_ids"]
        positions = positions_of_pass(token_ids, side["attention_mask"])
        embedded: Tensor = parts.drop(parts.wte(token_ids) + parts.wpe(positions))
        return embedded

    def run_layer(self, layer: Any, activation: Tensor, shared: SharedInputs) -> Tensor:
        output: Tensor = layer(
            activation, attention_mask=shared.mask, past_key_values=shared.earlier
        )
        return output

    def run_attention(self, layer: Any, activation: Tensor, shared: SharedInputs) -> Tensor:
        attended: Tensor = layer.attn(
            layer.ln_1(activation), attention_mask=shared.mask, past_key_values=shared.earlier
        )[0]
        return attended + activation

    def run_feed_forward(self, layer: Any, activation: Tensor) -> Tensor:
        output: Tensor = layer.mlp(layer.ln_2(activation))
        return activation + output
