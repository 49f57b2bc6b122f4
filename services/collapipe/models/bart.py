"""BART."""

from typing import TYPE_CHECKING

from torch import nn
from transformers.models.bart.configuration_bart import BartConfig
from transformers.models.bart.modeling_bart import BartForConditionalGeneration

from collapipe.models.encoder_decoder import EncoderDecoderAdapter

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_SHARED = "model.shared.weight"


class BartAdapter(EncoderDecoderAdapter):
    """Cuts BART.

    Its configuration ties all embeddings or none. It says none, because the encoder's is not tied:
    so every version of `transformers` loads an export as it was trained. Decoder embedding and
    output layer are tied here while they train, and exported as copies.
    """

    family = "bart"
    config_class = BartConfig
    model_classes = {"translation": BartForConditionalGeneration}
    fixed = {"tie_word_embeddings": False, "encoder_layerdrop": 0.0}

    def for_export(self, model: "PreTrainedModel") -> "PreTrainedModel":
        for module in _modules_to_tie(model):
            module.weight = nn.Parameter(model.get_parameter(_SHARED).detach().clone())
        return model

    def _construct(self) -> "PreTrainedModel":
        model = super()._construct()
        for module in _modules_to_tie(model):
            module.weight = model.get_parameter(_SHARED)
        return model


def _modules_to_tie(model: "PreTrainedModel") -> tuple[nn.Module, nn.Module]:
    return model.get_submodule("model.decoder.embed_tokens"), model.get_submodule("lm_head")
