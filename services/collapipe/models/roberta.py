"""RoBERTa."""

from typing import Any

from transformers.models.roberta.configuration_roberta import RobertaConfig
from transformers.models.roberta.modeling_roberta import (
    RobertaForSequenceClassification,
    RobertaForTokenClassification,
)

from collapipe.models.encoder_only import EncoderOnlyAdapter
from collapipe.models.special_tokens import ROBERTA_TOKENS


class RobertaAdapter(EncoderOnlyAdapter):
    """Cuts RoBERTa, whose positions start behind the id of the padding token."""

    family = "roberta"
    config_class = RobertaConfig
    model_classes = {
        "classification": RobertaForSequenceClassification,
        "ner": RobertaForTokenClassification,
    }
    embedding_path = "roberta.embeddings"
    blocks_path = "roberta.encoder.layer"
    special_tokens = ROBERTA_TOKENS
    defaults = {
        "hidden_size": 256,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "intermediate_size": 1024,
        "max_position_embeddings": 516,
        "type_vocab_size": 1,
        "layer_norm_eps": 1e-5,
    }

    @classmethod
    def max_length(cls, config: Any) -> int:
        return int(config.max_position_embeddings - config.pad_token_id - 1)
