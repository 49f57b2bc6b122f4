"""DistilBERT."""

from collections.abc import Mapping
from typing import Any, ClassVar

from torch import Tensor, nn
from transformers.models.distilbert.configuration_distilbert import DistilBertConfig
from transformers.models.distilbert.modeling_distilbert import (
    DistilBertForSequenceClassification,
    DistilBertForTokenClassification,
)

from collapipe.models.encoder_only import EncoderOnlyAdapter
from collapipe.models.unit import Side


class DistilBertAdapter(EncoderOnlyAdapter):
    """Cuts DistilBERT, which knows no token types."""

    family = "distilbert"
    config_class = DistilBertConfig
    model_classes = {
        "classification": DistilBertForSequenceClassification,
        "ner": DistilBertForTokenClassification,
    }
    embedding_path = "distilbert.embeddings"
    blocks_path = "distilbert.transformer.layer"
    defaults = {"dim": 256, "n_layers": 4, "n_heads": 4, "hidden_dim": 1024}
    fixed: ClassVar[Mapping[str, Any]] = {}

    def run_embedding(self, module: nn.Module, side: Side) -> Tensor:
        embedded: Tensor = module(side["input_ids"])
        return embedded
