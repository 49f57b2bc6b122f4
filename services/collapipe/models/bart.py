"""BART."""

from typing import TYPE_CHECKING

from torch import nn
from transformers.models.bart.configuration_bart import BartConfig
from transformers.models.bart.modeling_bart import BartForConditionalGeneration

from collapipe.models.encoder_decoder import EncoderDecoderAdapter
from collapipe.models.special_tokens import ROBERTA_TOKENS

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_SHARED = "model.shared.weight"


class BartAdapter(EncoderDecoderAdapter):
    """Cuts BART.

    A configuration of BART ties either all embeddings or none. Here it ties none, because the encoder's
    embedding is on another host. In training, this adapter ties the decoder's embedding to the output layer.
    An export has a copy of the weights for each, so that `transformers` loads it as it was trained.
    """

    family = "bart"
    config_class = BartConfig
    model_classes = {"translation": BartForConditionalGeneration}
    special_tokens = ROBERTA_TOKENS
    decoder_start_role = "eos_token"
    fixed = {"tie_word_embeddings": False, "encoder_layerdrop": 0.0}

    def _construct(self) -> "PreTrainedModel":
        model = super()._construct()
        for module in _modules_to_tie(model):
            module.weight = model.get_parameter(_SHARED)
        return model

    def for_export(self, model: "PreTrainedModel") -> "PreTrainedModel":
        for module in _modules_to_tie(model):
            module.weight = nn.Parameter(model.get_parameter(_SHARED).detach().clone())
        return model


def _modules_to_tie(model: "PreTrainedModel") -> tuple[nn.Module, nn.Module]:
    return model.get_submodule("model.decoder.embed_tokens"), model.get_submodule("lm_head")
