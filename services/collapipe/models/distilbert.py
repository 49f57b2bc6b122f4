"""DistilBERT."""

from typing import Any

from torch import Tensor
from transformers.models.distilbert.configuration_distilbert import DistilBertConfig
from transformers.models.distilbert.modeling_distilbert import (
    DistilBertForSequenceClassification,
    DistilBertForTokenClassification,
)

from collapipe.models.encoder_only import EncoderOnlyAdapter
from collapipe.models.special_tokens import BERT_TOKENS


class DistilBertAdapter(EncoderOnlyAdapter):
    """Cuts DistilBERT."""

    family = "distilbert"
    config_class = DistilBertConfig
    model_classes = {
        "classification": DistilBertForSequenceClassification,
        "ner": DistilBertForTokenClassification,
    }
    embedding_path = "distilbert.embeddings"
    blocks_path = "distilbert.transformer.layer"
    special_tokens = BERT_TOKENS
    defaults = {"dim": 256, "n_layers": 4, "n_heads": 4, "hidden_dim": 1024}
    fixed = {}  # its configuration has no key that makes it a decoder
    attention_parts = frozenset({"attention", "sa_layer_norm"})

    def run_attention(self, layer: Any, activation: Tensor, mask: Tensor | None) -> Tensor:
        attended: Tensor = layer.attention(activation, attention_mask=mask)[0]
        output: Tensor = layer.sa_layer_norm(attended + activation)
        return output

    def run_feed_forward(self, layer: Any, activation: Tensor) -> Tensor:
        output: Tensor = layer.output_layer_norm(layer.ffn(activation) + activation)
        return output
