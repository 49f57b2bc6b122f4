"""The vocabulary of a job: a `tokenizer.json`, made from text or taken from a pretrained directory.

It travels as bytes, and every cluster uses the same. Training uses bare `tokenizers`;
`write_tokenizer_files` makes `AutoTokenizer` produce the same token ids from an exported model.
"""

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from tokenizers import Encoding, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from collapipe.errors import InvalidInputError

_BATCH = 1024
"""Texts encoded at once: an `Encoding` is large, so not all are kept at a time."""


@dataclass(frozen=True)
class Convention:
    """Which special tokens a family has, and where they go."""

    tokens: dict[str, str]
    """By their role in `transformers`, in the order of their ids."""
    template: str
    """How one sequence is framed."""
    decoder_start: str | None = None
    """The role of the token that decoding starts from."""


_BERT = Convention(
    {"pad_token": "[PAD]", "unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]"},
    "[CLS] $A [SEP]",
)
_ROBERTA = Convention(
    {
        "bos_token": "<s>",
        "pad_token": "<pad>",
        "eos_token": "</s>",
        "unk_token": "<unk>",
        "cls_token": "<s>",
        "sep_token": "</s>",
    },
    "<s> $A </s>",
)
_CONVENTIONS = {
    "bert": _BERT,
    "distilbert": _BERT,
    "roberta": _ROBERTA,
    "bart": Convention(_ROBERTA.tokens, _ROBERTA.template, decoder_start="eos_token"),
    "marian": Convention(
        {"pad_token": "<pad>", "eos_token": "</s>", "unk_token": "<unk>"},
        "$A </s>",
        decoder_start="pad_token",
    ),
}
_OPTIONAL = {"mask_token": ("[MASK]", "<mask>")}
"""Named in an export when a pretrained vocabulary has them."""


@dataclass(frozen=True)
class SpecialTokenIds:
    """What a model's configuration needs to know; `None` where the family has no such token."""

    pad: int
    unk: int
    bos: int | None
    eos: int | None
    cls: int | None
    sep: int | None
    decoder_start: int | None


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
        self.special = special_token_ids(data, family)
        self._tokenizer = _parse(data)
        self.size = self._tokenizer.get_vocab_size()
        self._tokenizer.enable_truncation(max_length)

    def encode(self, texts: Sequence[str]) -> Iterable[Encoding]:
        """Encodes texts in order; what is too long is cut, and its `overflowing` says so."""
        for start in range(0, len(texts), _BATCH):
            yield from self._tokenizer.encode_batch(texts[start : start + _BATCH])

    def decode(self, ids: Sequence[int]) -> str:
        """Decodes what a model generated, up to the first end token."""
        length = ids.index(self.special.eos) if self.special.eos in ids else len(ids)
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
    convention = _convention(family)
    special = list(dict.fromkeys(convention.tokens.values()))
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


def special_token_ids(vocabulary: bytes, family: str) -> SpecialTokenIds:
    """Looks the special tokens of a family up."""
    convention, tokenizer = _convention(family), _parse(vocabulary)
    ids: dict[str, int] = {}
    for role, token in convention.tokens.items():
        token_id = tokenizer.token_to_id(token)
        if token_id is None:
            raise InvalidInputError(
                f"the vocabulary has no {token!r}, the {role} of family {family!r}: set "
                "model.family to that of the pretrained directory"
            )
        ids[role] = token_id
    return SpecialTokenIds(
        pad=ids["pad_token"],
        unk=ids["unk_token"],
        bos=ids.get("bos_token"),
        eos=ids.get("eos_token"),
        cls=ids.get("cls_token"),
        sep=ids.get("sep_token"),
        decoder_start=ids[convention.decoder_start] if convention.decoder_start else None,
    )


def write_tokenizer_files(directory: Path, vocabulary: bytes, family: str, max_length: int) -> None:
    """Writes what `AutoTokenizer` and `pipeline` need to read an exported model.

    Args:
        directory: Where `save_pretrained` wrote the model.
        vocabulary: Bytes of a tokenizer.json.
        family: An adapter of `collapipe.models`.
        max_length: `TaskConfig.max_length`.
    """
    tokenizer = _parse(vocabulary)
    optional = {
        role: token
        for role, tokens in _OPTIONAL.items()
        for token in tokens
        if tokenizer.token_to_id(token) is not None
    }
    document = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": max_length,
        "model_input_names": ["input_ids", "attention_mask"],
        "clean_up_tokenization_spaces": False,
        **_convention(family).tokens,
        **optional,
    }
    (directory / "tokenizer.json").write_bytes(vocabulary)
    (directory / "tokenizer_config.json").write_text(
        json.dumps(document, indent=2) + "\n", encoding="utf-8"
    )


def _convention(family: str) -> Convention:
    if family not in _CONVENTIONS:
        raise InvalidInputError(
            f"model.family {family!r} is not known: use one of {', '.join(_CONVENTIONS)}"
        )
    return _CONVENTIONS[family]


def _parse(vocabulary: bytes) -> Tokenizer:
    try:
        return Tokenizer.from_buffer(vocabulary)
    except ValueError as error:
        raise InvalidInputError(
            f"the vocabulary ({len(vocabulary)} bytes) is no tokenizer.json: {error}; write one "
            "with AutoTokenizer.from_pretrained(...).save_pretrained(...)"
        ) from error
