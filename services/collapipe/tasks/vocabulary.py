"""The vocabulary of a job: a `tokenizer.json`, made from text or taken from a pretrained directory.

It travels as bytes, and every cluster uses the same. Training uses bare `tokenizers`;
`write_tokenizer_files` makes `AutoTokenizer` produce the same token ids from an exported model.
"""

import json
from collections.abc import Iterable, Sequence
from pathlib import Path

from tokenizers import Encoding, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from collapipe.errors import InvalidInputError
from collapipe.models import adapter_class

_BATCH = 1024
"""Texts encoded at once: an `Encoding` is large, so not all are kept at a time."""


class Vocabulary:
    """Turns text into token ids and back.

    Args:
        data: Bytes of a tokenizer.json.
        family: An adapter of `collapipe.models`.
        max_length: Longest sequence in tokens, special tokens included.

    Raises:
        InvalidInputError: The bytes are no tokenizer, or lack a special token of the family.
    """

    def __init__(self, data: bytes, family: str, max_length: int) -> None:
        self.data = data
        self.max_length = max_length
        special = special_token_ids(data, family)
        self.pad_id = special["pad_token"]
        self._end_id = special.get("eos_token")
        self._tokenizer = _parse(data)
        self.size = self._tokenizer.get_vocab_size()
        self._tokenizer.enable_truncation(max_length)

    def encode(self, texts: Sequence[str]) -> Iterable[Encoding]:
        """Encodes texts in order; what is too long is cut, and its `overflowing` says so."""
        for start in range(0, len(texts), _BATCH):
            yield from self._tokenizer.encode_batch(texts[start : start + _BATCH])

    def decode(self, ids: Sequence[int]) -> str:
        """Decodes what a model generated, up to the first end token."""
        length = ids.index(self._end_id) if self._end_id in ids else len(ids)
        return self._tokenizer.decode(ids[:length], skip_special_tokens=True).strip()


def make_vocabulary(texts: Iterable[str], size: int, family: str) -> bytes:
    """Makes a byte-level BPE vocabulary: no text is unknown to it.

    Args:
        texts: What to make it from.
        size: Entries wanted; little text gives fewer.
        family: Whose special tokens it gets.

    Returns:
        Bytes of a tokenizer.json.
    """
    convention = adapter_class(family).special_tokens
    special = list(dict.fromkeys(convention.by_role.values()))
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    smallest = len(alphabet) + len(special)
    if size < smallest:
        raise InvalidInputError(
            f"model.vocabulary_size is {size}, but {len(alphabet)} bytes and {len(special)} "
            f"special tokens need {smallest}: raise it"
        )
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    tokenizer.decoder = decoders.Sequence([decoders.ByteLevel(), decoders.Strip(" ", 1, 0)])
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=special,
        initial_alphabet=sorted(alphabet),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=convention.template,
        special_tokens=[(token, tokenizer.token_to_id(token)) for token in special],
    )
    return tokenizer.to_str().encode()


def read_vocabulary(directory: Path) -> bytes:
    """Reads a pretrained directory's tokenizer.json, without its own padding and truncation."""
    path = directory / "tokenizer.json"
    try:
        tokenizer = _parse(path.read_bytes())
    except OSError as error:
        raise InvalidInputError(f"{path}: cannot be read: {error.strerror}") from error
    tokenizer.no_padding()
    tokenizer.no_truncation()
    return tokenizer.to_str().encode()


def special_token_ids(vocabulary: bytes, family: str) -> dict[str, int]:
    """Looks up the special tokens of a family; returns their ids by role, for example "pad_token"."""
    return adapter_class(family).special_token_ids(_parse(vocabulary))


def write_tokenizer_files(directory: Path, vocabulary: bytes, family: str, max_length: int) -> None:
    """Writes what `AutoTokenizer` and `pipeline` need to read an exported model.

    Args:
        directory: Where `save_pretrained` wrote the model.
        vocabulary: Bytes of a tokenizer.json.
        family: An adapter of `collapipe.models`.
        max_length: `TaskConfig.max_length`.
    """
    special = adapter_class(family).special_tokens
    roles = dict(special.by_role)
    if special.mask_token and _parse(vocabulary).token_to_id(special.mask_token) is not None:
        roles["mask_token"] = special.mask_token
    document = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": max_length,
        "model_input_names": ["input_ids", "attention_mask"],
        "clean_up_tokenization_spaces": False,
        **roles,
    }
    (directory / "tokenizer.json").write_bytes(vocabulary)
    (directory / "tokenizer_config.json").write_text(
        json.dumps(document, indent=2) + "\n", encoding="utf-8"
    )


def _parse(vocabulary: bytes) -> Tokenizer:
    try:
        return Tokenizer.from_buffer(vocabulary)
    except ValueError as error:
        raise InvalidInputError(
            f"the vocabulary ({len(vocabulary)} bytes) is no tokenizer.json: {error}; write one "
            "with AutoTokenizer.from_pretrained(...).save_pretrained(...)"
        ) from error
