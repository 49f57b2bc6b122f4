"""Qwen2."""

from typing import TYPE_CHECKING, ClassVar

from torch import nn
from transformers.configuration_utils import PreTrainedConfig
from transformers.models.qwen2.configuration_qwen2 import Qwen2Config
from transformers.models.qwen2.modeling_qwen2 import Qwen2ForCausalLM, Qwen2RotaryEmbedding

from collapipe.job import LANGUAGE_TASKS
from collapipe.models.llama_class import LlamaClassAdapter
from collapipe.models.special_tokens import QWEN_TOKENS

if TYPE_CHECKING:
    from tokenizers import Tokenizer


class Qwen2Adapter(LlamaClassAdapter):
    """Cuts Qwen2, some of whose layers may see only a window of the tokens before."""

    family = "qwen2"
    config_class: ClassVar[type[PreTrainedConfig]] = Qwen2Config
    model_classes = dict.fromkeys(LANGUAGE_TASKS, Qwen2ForCausalLM)
    rotary_class: ClassVar[type[nn.Module]] = Qwen2RotaryEmbedding
    special_tokens = QWEN_TOKENS
    may_have_windows = True

    @classmethod
    def prepare_tokenizer(cls, tokenizer: "Tokenizer") -> None:
        """Does it like `Qwen2Tokenizer`, because `AutoTokenizer` uses that class whatever an export says."""
        from transformers.models.qwen2.tokenization_qwen2 import Qwen2Tokenizer

        theirs = Qwen2Tokenizer().backend_tokenizer
        tokenizer.normalizer = theirs.normalizer
        tokenizer.pre_tokenizer = theirs.pre_tokenizer
        tokenizer.decoder = theirs.decoder
