"""Marian: the vanilla Transformer, with sinusoidal positions."""

from typing import TYPE_CHECKING, Any

from torch import nn
from transformers.models.marian.configuration_marian import MarianConfig
from transformers.models.marian.modeling_marian import (
    MarianMTModel,
    MarianSinusoidalPositionalEmbedding,
)

from collapipe.models.encoder_decoder import EncoderDecoderAdapter

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class MarianAdapter(EncoderDecoderAdapter):
    """Cuts Marian, which has a switch of its own for the encoder's embedding."""

    family = "marian"
    config_class = MarianConfig
    model_classes = {"translation": MarianMTModel}
    fixed = {
        "share_encoder_decoder_embeddings": False,
        "tie_word_embeddings": True,
        "encoder_layerdrop": 0.0,
    }
    tie_keys = ("share_encoder_decoder_embeddings", "tie_word_embeddings")

    def fill_constants(self, model: "PreTrainedModel", module: nn.Module) -> None:
        if isinstance(module, MarianSinusoidalPositionalEmbedding):
            # the model's own way draws random numbers first, only to overwrite them
            table: Any = module
            table.weight.copy_(table.create_weight())
        else:
            super().fill_constants(model, module)
