"""Marian: the Transformer of Vaswani et al. 2017, with sinusoidal positions."""

from typing import TYPE_CHECKING, Any

from torch import nn
from transformers.models.marian.configuration_marian import MarianConfig
from transformers.models.marian.modeling_marian import (
    MarianMTModel,
    MarianSinusoidalPositionalEmbedding,
)

from collapipe.models.encoder_decoder import EncoderDecoderAdapter
from collapipe.models.special_tokens import SpecialTokens

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class MarianAdapter(EncoderDecoderAdapter):
    """Cuts Marian. Its configuration has a separate key that unties the encoder's embedding."""

    family = "marian"
    config_class = MarianConfig
    model_classes = {"translation": MarianMTModel}
    special_tokens = SpecialTokens(
        {"pad_token": "<pad>", "eos_token": "</s>", "unk_token": "<unk>"}, "$A </s>"
    )
    decoder_start_role = "pad_token"
    fixed = {
        "share_encoder_decoder_embeddings": False,
        "tie_word_embeddings": True,
        "encoder_layerdrop": 0.0,
    }
    tie_keys = ("share_encoder_decoder_embeddings", "tie_word_embeddings")

    def fill_constants(self, model: "PreTrainedModel", module: nn.Module) -> None:
        if isinstance(module, MarianSinusoidalPositionalEmbedding):
            # `_init_weights` would draw random numbers first, and then overwrite them with this table.
            table: Any = module
            table.weight.copy_(table.create_weight())
        else:
            super().fill_constants(model, module)
