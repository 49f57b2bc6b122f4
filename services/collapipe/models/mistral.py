"""Mistral."""

from transformers.models.mistral.configuration_mistral import MistralConfig
from transformers.models.mistral.modeling_mistral import MistralForCausalLM, MistralRotaryEmbedding

from collapipe.job import LANGUAGE_TASKS
from collapipe.models.llama_class import LlamaClassAdapter
from collapipe.models.special_tokens import LLAMA_TOKENS


class MistralAdapter(LlamaClassAdapter):
    """Cuts Mistral, whose layers may see only a window of the tokens before."""

    family = "mistral"
    config_class = MistralConfig
    model_classes = dict.fromkeys(LANGUAGE_TASKS, MistralForCausalLM)
    rotary_class = MistralRotaryEmbedding
    special_tokens = LLAMA_TOKENS
    may_have_windows = True
