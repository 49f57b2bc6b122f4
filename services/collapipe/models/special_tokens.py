"""The special tokens of the model families."""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class SpecialTokens:
    """The special tokens of a vocabulary, and their places in a sequence."""

    by_role: Mapping[str, str]
    """Every token by its role in `transformers`, for example "pad_token". A vocabulary that is made for a job
    numbers them in this order, from 0."""
    template: str
    """The special tokens around one sequence, which is `$A`, in the notation of `tokenizers`."""
    mask_token: str | None = None
    """Only pretrained vocabularies have it, so `by_role` does not contain it."""


BERT_TOKENS = SpecialTokens(
    {"pad_token": "[PAD]", "unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]"},
    "[CLS] $A [SEP]",
    mask_token="[MASK]",
)
ROBERTA_TOKENS = SpecialTokens(
    {
        "bos_token": "<s>",
        "pad_token": "<pad>",
        "eos_token": "</s>",
        "unk_token": "<unk>",
        "cls_token": "<s>",
        "sep_token": "</s>",
    },
    "<s> $A </s>",
    mask_token="<mask>",
)
LLAMA_TOKENS = SpecialTokens(
    {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}, "<s> $A"
)
QWEN_TOKENS = SpecialTokens(
    {"pad_token": "<|pad|>", "eos_token": "<|endoftext|>", "unk_token": "<|endoftext|>"}, "$A"
)
