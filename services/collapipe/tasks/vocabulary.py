"""The vocabulary of a job: a `tokenizer.json`, made from text or read from a pretrained directory.

All clusters use the same bytes. Training encodes with the package `tokenizers` alone. The files of
`write_tokenizer_files` let `AutoTokenizer` of `transformers` produce the same token ids.
"""

import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from tokenizers import Encoding, Tokenizer, models, pre_tokenizers, processors, trainers
from tokenizers.decoders import DecodeStream

from collapipe.errors import InvalidInputError
from collapipe.models import adapter_class

_BATCH = 1024
_BATCH_CHARACTERS = 1_000_000
"""Most texts that are encoded at once, and about how many characters. An `Encoding` is large, so they are not all in
memory."""


class Vocabulary:
    """Turns text into token ids and back.

    Args:
        data: Bytes of a tokenizer.json.
        max_length: Longest sequence in tokens, with its special tokens.
        cuts_texts: Whether `encode` cuts texts to that length.

    Raises:
        InvalidInputError: The bytes are not a tokenizer.json, or lack a special token of the family.
    """

    def __init__(
        self, data: bytes, family: str, max_length: int, *, cuts_texts: bool = True
    ) -> None:
        self.data = data
        self.max_length = max_length
        self._tokenizer = _parse(data)
        special = adapter_class(family).special_token_ids(self._tokenizer)
        self.pad_id = special["pad_token"]
        self.end_id = special.get("eos_token")
        if cuts_texts:
            self._tokenizer.enable_truncation(max_length)

    def encode(self, texts: Sequence[str]) -> Iterable[Encoding]:
        """Encodes texts in order; a text that is too long is cut and has an `overflowing` part."""
        batch: list[str] = []
        num_characters = 0
        for text in texts:
            batch.append(text)
            num_characters += len(text)
            if len(batch) == _BATCH or num_characters > _BATCH_CHARACTERS:
                yield from self._tokenizer.encode_batch(batch)
                batch, num_characters = [], 0
        yield from self._tokenizer.encode_batch(batch)

    def encode_whole(self, text: str) -> Encoding:
        """Encodes one text; raises `InvalidInputError` if it has no tokens, or would be cut."""
        [encoding] = self.encode([text])
        if encoding.overflowing:
            num_tokens = len(encoding.ids) + sum(len(part.ids) for part in encoding.overflowing)
            raise InvalidInputError(
                f"it has about {num_tokens} tokens, more than task.max_length = {self.max_length} of the job: shorten it"
            )
        if not text.strip() or not encoding.ids:
            raise InvalidInputError("it is blank: give a text")
        return encoding

    def stream(self, ids_before: Sequence[int] = ()) -> Callable[[int], str]:
        """Returns a function that takes the next token, and returns the characters that it completes.

        Args:
            ids_before: Tokens before the first one. Their characters are left out.
        """
        decoder = DecodeStream(skip_special_tokens=True)

        def decode(token: int) -> str:
            return decoder.step(self._tokenizer, token) or ""

        for token in ids_before:
            decode(token)
        return decode

    def decode(self, ids: Sequence[int]) -> str:
        """Decodes generated tokens up to the first end token."""
        length = ids.index(self.end_id) if self.end_id in ids else len(ids)
        return self._tokenizer.decode(ids[:length], skip_special_tokens=True).strip()


def make_vocabulary(texts: Iterable[str], size: int, family: str) -> bytes:
    """Learns a byte-level BPE vocabulary, which can encode every text, and returns its tokenizer.json.

    Args:
        size: Wanted number of entries; little text gives fewer.
        family: It decides the special tokens.
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
    adapter_class(family).prepare_tokenizer(tokenizer)
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
    """Reads the tokenizer.json of a pretrained directory, and removes its padding and truncation."""
    path = directory / "tokenizer.json"
    try:
        tokenizer = _parse(path.read_bytes())
    except OSError as error:
        raise InvalidInputError(f"{path}: cannot be read: {error.strerror}") from error
    tokenizer.no_padding()
    tokenizer.no_truncation()
    return tokenizer.to_str().encode()


def write_tokenizer_files(directory: Path, vocabulary: bytes, family: str, max_length: int) -> None:
    """Writes the files that `AutoTokenizer` and `pipeline` need to use an exported model.

    Args:
        directory: Where `save_pretrained` wrote the model.
        vocabulary: Bytes of a tokenizer.json.
    """
    adapter, tokenizer = adapter_class(family), _parse(vocabulary)
    roles = dict(adapter.roles_in(tokenizer))
    mask_token = adapter.special_tokens.mask_token
    if mask_token and tokenizer.token_to_id(mask_token) is not None:
        roles["mask_token"] = mask_token
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
            f"the vocabulary ({len(vocabulary)} bytes) is not a tokenizer.json: {error}; write one "
            "with AutoTokenizer.from_pretrained(...).save_pretrained(...)"
        ) from error
