"""The base of the families that have an encoder and a small head, which labels texts or tokens."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import apply_chunking_to_forward

from collapipe.models.adapter import ModelAdapter, ModelHead, cross_entropy_sum
from collapipe.models.pretrained import load_pretrained
from collapipe.models.unit import Side

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class EncoderOnlyAdapter(ModelAdapter):
    """Cuts BERT and its relatives. A pretrained directory gives the encoder, never the labelling layer."""

    attention_parts = frozenset({"attention"})
    always_trained = ("classifier", "pooler")
    fixed: ClassVar[Mapping[str, Any]] = {"is_decoder": False, "add_cross_attention": False}

    def run_embedding(self, module: nn.Module, side: Side) -> Tensor:
        embedded: Tensor = module(side["input_ids"])
        return embedded

    def run_attention(self, layer: Any, activation: Tensor, mask: Tensor | None) -> Tensor:
        attended: Tensor = layer.attention(activation, mask)[0]
        return attended

    def run_feed_forward(self, layer: Any, activation: Tensor) -> Tensor:
        output: Tensor = apply_chunking_to_forward(
            layer.feed_forward_chunk,
            layer.chunk_size_feed_forward,
            layer.seq_len_dim,
            activation,
        )
        return output

    def make_head(self, model: "PreTrainedModel") -> "LabelHead":
        return LabelHead(model)

    def read_pretrained(self, directory: Path) -> dict[str, Tensor]:
        """Reads the encoder, and its pooler if there is one."""
        prefix = self.family
        encoder_class: Any = type(self.build_on_meta()[0].get_submodule(prefix))
        weights = load_pretrained(
            encoder_class, directory, self.config, self.base_dtype, may_lack="pooler."
        )
        return {f"{prefix}.{name}": tensor for name, tensor in weights.items()}


class LabelHead(ModelHead):
    """The layers behind the encoder: dropout, the classifier and, in some families, a pooler."""

    def loss_sum(self, activation: Tensor, side: Side, label_smoothing: float) -> Tensor:
        return cross_entropy_sum(self._logits(activation), side["labels"], label_smoothing)

    @torch.no_grad()
    def predict(self, activation: Tensor, side: Side) -> Tensor:
        return self._logits(activation).argmax(dim=-1)

    def _logits(self, activation: Tensor) -> Tensor:
        logits: Tensor = self.whole_model(inputs_embeds=activation).logits
        return logits
