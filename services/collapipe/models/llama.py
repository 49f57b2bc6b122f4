"""Llama."""

from transformers.models.llama.configuration_llama import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaForCausalLM, LlamaRotaryEmbedding

from collapipe.job import LANGUAGE_TASKS
from collapipe.models.llama_class import LlamaClassAdapter
from collapipe.models.special_tokens import LLAMA_TOKENS


class LlamaAdapter(LlamaClassAdapter):
    """Cuts Llama."""

    family = "llama"
    config_class = LlamaConfig
    model_classes = dict.fromkeys(LANGUAGE_TASKS, LlamaForCausalLM)
    rotary_class = LlamaRotaryEmbedding
    special_tokens = LLAMA_TOKENS
