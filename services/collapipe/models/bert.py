"""BERT."""

from transformers.models.bert.configuration_bert import BertConfig
from transformers.models.bert.modeling_bert import (
    BertForSequenceClassification,
    BertForTokenClassification,
)

from collapipe.models.encoder_only import EncoderOnlyAdapter
from collapipe.models.special_tokens import BERT_TOKENS


class BertAdapter(EncoderOnlyAdapter):
    """Cuts BERT."""

    family = "bert"
    config_class = BertConfig
    model_classes = {
        "classification": BertForSequenceClassification,
        "ner": BertForTokenClassification,
    }
    embedding_path = "bert.embeddings"
    blocks_path = "bert.encoder.layer"
    special_tokens = BERT_TOKENS
    defaults = {
        "hidden_size": 256,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "intermediate_size": 1024,
    }
