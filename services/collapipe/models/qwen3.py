"""Qwen3."""

from transformers.models.qwen3.configuration_qwen3 import Qwen3Config
from transformers.models.qwen3.modeling_qwen3 import Qwen3ForCausalLM, Qwen3RotaryEmbedding

from collapipe.job import LANGUAGE_TASKS
from collapipe.models.qwen2 import Qwen2Adapter


class Qwen3Adapter(Qwen2Adapter):
    """Cuts Qwen3, which also norms queries and keys."""

    family = "qwen3"
    config_class = Qwen3Config
    model_classes = dict.fromkeys(LANGUAGE_TASKS, Qwen3ForCausalLM)
    rotary_class = Qwen3RotaryEmbedding
    defaults = {**Qwen2Adapter.defaults, "head_dim": 64}
