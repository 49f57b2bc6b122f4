"""The vocabulary of a job, made from text or read from a pretrained directory.

It is a `tokenizer.json` in one line. A second line, if there is one, is a JSON object with what else the pretrained
directory says: "special_tokens" by role where they are not those of the family, and "chat_template". All clusters use the
same bytes. Training encodes with the package `tokenizers` alone. The files of `write_tokenizer_files` let `AutoTokenizer`
of `transformers` produce the same token ids, and render chats as the same text.
"""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Encoding, Tokenizer, models, pre_tokenizers, processors, trainers
from tokenizers.decoders import DecodeStream

from collapipe.chat_renderer import ChatRenderer
from collapipe.data.data_files import MOST_CHARACTERS
from collapipe.data.rows import check_text
from collapipe.documents import decode_json
from collapipe.errors import InvalidInputError
from collapipe.models import adapter_class
from collapipe.pretrained_directories import MAX_VOCABULARY_BYTES, read_json, read_text
from collapipe.tasks.tokenizer_limits import MAX_TOKEN, read_tokenizer

_BATCH = 1024
_BATCH_CHARACTERS = 1_000_000
"""Most texts that are encoded at once, and about how many characters. An `Encoding` is large, so they are not all in
memory."""

_ROLES = [f"{name}_token" for name in ("bos", "eos", "unk", "sep", "pad", "cls", "mask")]
"""The special tokens that a tokenizer_config.json may name."""


class Vocabulary:
    """Turns text into token ids and back.

    Args:
        max_length: Longest sequence in tokens, with its special tokens.
        cuts_texts: Whether `encode` cuts texts to that length.
        origin: The pretrained directory. `None` for a vocabulary that was made for the job.

    Raises:
        InvalidInputError: The data is not a vocabulary, or lacks a special token that the family needs.
    """

    def __init__(
        self,
        data: bytes,
        family: str,
        max_length: int,
        *,
        cuts_texts: bool = True,
        origin: str | None = None,
    ) -> None:
        self.data = data
        self.max_length = max_length
        self._origin = origin
        self._tokenizer = parse_vocabulary(data)
        self._chat_template: str | None = _additions(data).get("chat_template")
        declared = declared_tokens(data)
        adapter = adapter_class(family)
        self._roles = adapter.roles_in(self._tokenizer, declared)
        special = adapter.special_token_ids(self._tokenizer, declared)
        self.pad_id = special["pad_token"]
        self.end_id = special.get("eos_token")
        if cuts_texts:
            self._tokenizer.enable_truncation(max_length)

    def encode(
        self, texts: Sequence[str], *, add_special_tokens: bool = True
    ) -> Iterable[Encoding]:
        """Encodes texts in order; a text that is too long is cut and has an `overflowing` part."""
        batch: list[str] = []
        num_characters = 0
        for text in texts:
            batch.append(text)
            num_characters += len(text)
            if len(batch) == _BATCH or num_characters > _BATCH_CHARACTERS:
                yield from self._encode_batch(batch, add_special_tokens)
                batch, num_characters = [], 0
        yield from self._encode_batch(batch, add_special_tokens)

    def _encode_batch(self, texts: list[str], add_special_tokens: bool) -> list[Encoding]:
        with _faults_of_tokenizer("the tokenizer fails on a text"):
            return self._tokenizer.encode_batch(texts, add_special_tokens=add_special_tokens)

    def encode_beginnings(
        self, texts: Sequence[str], *, add_start: bool = True
    ) -> Iterator[list[int]]:
        """Encodes texts that a model continues, in order.

        Args:
            add_start: Whether the start tokens of the tokenizer come first. A text that begins with them gets no others.
        """
        start = self._start_ids if add_start else []
        for encoding in self.encode(texts, add_special_tokens=False):
            ids = encoding.ids
            yield ids if ids[: len(start)] == start else [*start, *ids]

    def encode_answers(
        self, prompts: Sequence[str], answers: Sequence[str], *, add_start: bool
    ) -> Iterator[tuple[list[int], list[int]]]:
        """Encodes prompts and the texts that follow them. An end token follows each answer.

        The prompt has the tokens that it has alone, because a model that answers gets no more. So if a token of the joined text
        spans both, the answer is encoded by itself, without a blank before it.
        """
        joined = [prompt + answer for prompt, answer in zip(prompts, answers, strict=True)]
        encoded = zip(
            self.encode_beginnings(prompts, add_start=add_start),
            self.encode_beginnings(joined, add_start=add_start),
            answers,
            strict=True,
        )
        for prompt, whole, text in encoded:
            length = len(prompt)
            ids = whole[length:] if whole[:length] == prompt else self._apart(prompt, text)
            yield prompt, self.ended(ids)

    def ended(self, ids: list[int]) -> list[int]:
        """Returns tokens with the end token behind them, unless it is there."""
        assert self.end_id is not None
        return ids if ids[-1:] == [self.end_id] else [*ids, self.end_id]

    def _apart(self, prompt: Sequence[int], text: str) -> list[int]:
        """Encodes a text by itself, and without the blank that many tokenizers put before a text."""
        before = len(self._tokenizer.decode(prompt, skip_special_tokens=False))

        def gains_a_blank(ids: Sequence[int]) -> bool:
            decoded = self._tokenizer.decode([*prompt, *ids], skip_special_tokens=False)[before:]
            return decoded[:1].isspace() and not text[:1].isspace()

        line_break, behind_it, alone = (
            self._tokenizer.encode(each, add_special_tokens=False).ids
            for each in ("\n", f"\n{text}", text)
        )
        if gains_a_blank(alone) and behind_it[: len(line_break)] == line_break:
            return behind_it[len(line_break) :]
        return alone

    @cached_property
    def _start_ids(self) -> list[int]:
        """The tokens that the tokenizer puts before each text."""
        return _tokens_around(self._tokenizer)[0]

    def special_token_in(self, text: str) -> str:
        """Returns a special token that is written out in a text, because the tokenizer reads it as that token; "" if there is none."""
        for is_normalized, by_start in self._special_tokens.items():
            searched = self._normalized(text) if is_normalized else text
            # One expression for all tokens would hold the interpreter for seconds in a long text.
            starts = (start for start in by_start if start in searched)
            for written, token in (each for start in starts for each in by_start[start]):
                if written in searched and (not token.single_word or self._has(text, token)):
                    return str(token.content)
        return ""

    @cached_property
    def _special_tokens(self) -> dict[bool, dict[str, list[tuple[str, AddedToken]]]]:
        """The special tokens, each with the text that stands for it: those for normalised texts, and those for texts as they are. Both
        are sorted by the first two characters, which few texts have."""
        found: dict[bool, dict[str, list[tuple[str, AddedToken]]]] = {}
        for token in self._tokenizer.get_added_tokens_decoder().values():
            written = self._normalized(token.content) if token.normalized else token.content
            if token.special and written:
                by_start = found.setdefault(token.normalized, {})
                by_start.setdefault(written[:2], []).append((written, token))
        return found

    def _normalized(self, text: str) -> str:
        normalizer = self._tokenizer.normalizer
        return text if normalizer is None else str(normalizer.normalize_str(text))

    def _has(self, text: str, token: AddedToken) -> bool:
        """Returns whether the tokenizer finds an added token in a text."""
        ids = self._tokenizer.encode(text, add_special_tokens=False).ids
        return self._tokenizer.token_to_id(token.content) in ids

    def is_unknown(self, encoding: Encoding) -> bool:
        """Returns whether at least half of the tokens of a text are unknown."""
        if self._unknown_id is None:
            return False
        number = encoding.ids.count(self._unknown_id)
        return number > 0 and 2 * number >= encoding.special_tokens_mask.count(0)

    @cached_property
    def _unknown_id(self) -> int | None:
        """The id of the unknown token. `None` if every text can be encoded without it."""
        model: dict[str, Any] = decode_json(self.data.partition(b"\n")[0])["model"]
        if model.get("byte_fallback"):
            return None
        token, number = model.get("unk_token"), model.get("unk_id")
        return number if token is None else self._tokenizer.token_to_id(token)

    @property
    def end_token(self) -> str:
        """The end token as text; "" if there is none."""
        return (self.end_id is not None and self._tokenizer.id_to_token(self.end_id)) or ""

    def render(self, messages: Sequence[Mapping[str, Any]], place: str) -> tuple[str, str]:
        """Renders a chat with the chat template, as the text before the last message and the rest, which is that message.

        Args:
            place: Where the messages come from, for the error.

        Raises:
            InvalidInputError: There is no chat template, it refuses the messages, it does not render the last message behind
                the others, or the text cannot be encoded.
        """
        renderer = self._renderer
        try:
            before, whole = renderer.render([(messages[:-1], True), (messages, False)])
        except InvalidInputError as error:
            roles = ", ".join(str(message["role"]) for message in messages)
            raise InvalidInputError(
                f"{place}: the chat template of {self._origin} refuses the messages, whose roles are {roles:.200}: {error}; "
                "change the messages to what the template allows"
            ) from error
        # The template may render any key of a message.
        check_text(whole, "the rendered chat", place, may_be_blank=True)
        if not whole.startswith(before):
            raise InvalidInputError(
                f"{place}: the chat template of {self._origin} renders the prompt as {before[-60:]!r} at its end, but the whole "
                f"chat does not begin with the prompt: use a template that renders answers behind its generation prompt"
            )
        return before, whole[len(before) :]

    @cached_property
    def _renderer(self) -> ChatRenderer:
        if self._chat_template is None:
            what = (
                self._origin
                or "a vocabulary that is made for the job (model.pretrained is not set)"
            )
            raise InvalidInputError(
                f"{what}: has no chat template, but rows of the data have messages: set model.pretrained to a directory with "
                "chat_template.jinja, or with chat_template in its tokenizer_config.json, or give each row a prompt and a completion"
            )
        return ChatRenderer(self._chat_template, self._roles, MOST_CHARACTERS)

    def encode_prompt(self, text: str, *, add_start: bool = True) -> list[int]:
        """Encodes one text that a model continues; raises `InvalidInputError` if it has no tokens."""
        [ids] = self.encode_beginnings([text], add_start=add_start)
        if not text.strip() or not ids:
            raise InvalidInputError("it is blank: give a text")
        return ids

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
    """Learns a byte-level BPE vocabulary, which can encode every text.

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
        max_token_length=MAX_TOKEN,  # Long rules and DNA would become tokens that no host accepts.
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=convention.template,
        special_tokens=[(token, tokenizer.token_to_id(token)) for token in special],
    )
    return tokenizer.to_str().encode()


def read_vocabulary(directory: Path, family: str) -> bytes:
    """Reads the vocabulary of a pretrained directory, without the padding and truncation of its tokenizer.json."""
    path = directory / "tokenizer.json"
    tokenizer = _parse(read_text(path, MAX_VOCABULARY_BYTES).encode())
    adapter = adapter_class(family)
    start, end = _tokens_around(tokenizer)
    if end and adapter.continues_text:
        # Behind a prompt, these tokens would end it before the answer.
        tokens = [tokenizer.id_to_token(number) for number in start]
        tokenizer.post_processor = processors.TemplateProcessing(
            single=[*tokens, "$A"], special_tokens=list(zip(tokens, start, strict=True))
        )
    convention = adapter.special_tokens
    known = {**convention.by_role, "mask_token": convention.mask_token}
    declared, chat_template = _read_additions(directory, tokenizer)
    additions = {
        "special_tokens": {
            role: token for role, token in declared.items() if known.get(role) != token
        },
        "chat_template": chat_template,
    }
    lines = [tokenizer.to_str()]
    if any(additions.values()):
        lines.append(json.dumps({key: value for key, value in additions.items() if value}))
    return "\n".join(lines).encode()


def _tokens_around(tokenizer: Tokenizer) -> tuple[list[int], list[int]]:
    """Returns the tokens that a tokenizer puts before and behind each text."""
    encoding = tokenizer.encode("a")
    own = [index for index, added in enumerate(encoding.special_tokens_mask) if not added]
    if not own:
        return encoding.ids, []
    return encoding.ids[: own[0]], encoding.ids[own[-1] + 1 :]


def _read_additions(directory: Path, tokenizer: Tokenizer) -> tuple[dict[str, str], str | None]:
    """Returns the special tokens that a pretrained directory names and the vocabulary has, by role, and its chat template."""
    configs = [
        read_json(directory / name)
        for name in ("config.json", "generation_config.json")
        if (directory / name).is_file()
    ]
    path, older = directory / "tokenizer_config.json", directory / "special_tokens_map.json"
    described = read_json(path) if path.is_file() else {}
    # `transformers` also reads the older file only then.
    if "added_tokens_decoder" not in described and older.is_file():
        described |= read_json(older)
    declared: dict[str, str] = {}
    for config in configs:
        for role in ("bos_token", "eos_token", "pad_token"):
            ids = config.get(f"{role}_id")
            first: Any = ids[0] if isinstance(ids, list) and ids else ids
            is_id = isinstance(first, int) and 0 <= first < 1 << 32
            token = tokenizer.id_to_token(first) if is_id else None
            declared |= {} if token is None else {role: token}
    # What the tokenizer's own files say counts first.
    for role in _ROLES:
        token = described.get(role)
        token = token.get("content") if isinstance(token, dict) else token
        declared |= {role: token} if isinstance(token, str) else {}
    has_token = {role: t for role, t in declared.items() if tokenizer.token_to_id(t) is not None}
    return has_token, _chat_template(directory, described.get("chat_template"))


def _chat_template(directory: Path, described: Any) -> str | None:
    """Returns the chat template of a pretrained directory.

    Args:
        described: What tokenizer_config.json says: a template, or several with their names. A file of its own counts first.
    """
    path = directory / "chat_template.jinja"
    if path.is_file():
        return read_text(path)
    template = described
    if isinstance(described, list):
        named = (each for each in described if isinstance(each, dict))
        template = {each.get("name"): each.get("template") for each in named}
    if isinstance(template, dict):
        template = template.get("default")
    if described is not None and not isinstance(template, str):
        raise InvalidInputError(
            f"{directory}: the chat_template in tokenizer_config.json is {described!r:.80}, but must be a text, or named templates with "
            "one of the name 'default': write the template into chat_template.jinja"
        )
    return None if template is None else str(template)


def write_tokenizer_files(directory: Path, vocabulary: bytes, family: str, max_length: int) -> None:
    """Writes the files that `AutoTokenizer` and `pipeline` need to use an exported model.

    Args:
        directory: Where `save_pretrained` wrote the model.
    """
    adapter, tokenizer = adapter_class(family), parse_vocabulary(vocabulary)
    additions = _additions(vocabulary)
    roles = dict(adapter.roles_in(tokenizer, declared_tokens(vocabulary)))
    mask_token = adapter.special_tokens.mask_token
    if mask_token and tokenizer.token_to_id(mask_token) is not None:
        roles.setdefault("mask_token", mask_token)
    document = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": max_length,
        "model_input_names": ["input_ids", "attention_mask"],
        "clean_up_tokenization_spaces": False,
        **roles,
    }
    (directory / "tokenizer.json").write_bytes(vocabulary.partition(b"\n")[0])
    if "chat_template" in additions:
        path = directory / "chat_template.jinja"
        path.write_text(additions["chat_template"], encoding="utf-8", newline="")
    (directory / "tokenizer_config.json").write_text(
        json.dumps(document, indent=2) + "\n", encoding="utf-8"
    )


def parse_vocabulary(vocabulary: bytes) -> Tokenizer:
    """Returns the tokenizer of a vocabulary; raises `InvalidInputError` if it is none."""
    return _parse(vocabulary.partition(b"\n")[0])


def declared_tokens(vocabulary: bytes) -> dict[str, str]:
    """Returns the special tokens by role that the pretrained directory names, where they are not those of the family."""
    declared: dict[str, str] = _additions(vocabulary).get("special_tokens", {})
    return declared


def _additions(vocabulary: bytes) -> dict[str, Any]:
    """Returns the second line of a vocabulary, which may come from another host; raises `InvalidInputError`."""
    line = vocabulary.partition(b"\n")[2] or b"{}"
    try:
        additions: Any = decode_json(line)
        tokens, template = additions.get("special_tokens", {}), additions.get("chat_template", "")
        is_right = all(isinstance(text, str) for text in (template, *tokens, *tokens.values()))
    except (AttributeError, TypeError, ValueError) as error:
        raise InvalidInputError(_bad_additions(line)) from error
    if not is_right:
        raise InvalidInputError(_bad_additions(line))
    return dict(additions)


def _bad_additions(line: bytes) -> str:
    return (
        f"the second line of the vocabulary is {line!r:.80}, but must have special tokens and a chat template: run the same version of "
        "CollaPipe on all machines"
    )


def _parse(tokenizer_json: bytes) -> Tokenizer:
    """Returns a tokenizer that neither pads nor cuts."""
    with _faults_of_tokenizer(
        f"the vocabulary ({len(tokenizer_json)} bytes) is not a tokenizer.json that can be used"
    ):
        read_tokenizer(tokenizer_json)
        tokenizer = Tokenizer.from_buffer(tokenizer_json)
        tokenizer.no_padding()
        tokenizer.no_truncation()
        tokenizer.decode(tokenizer.encode("a").ids)  # finds mistakes now
    return tokenizer


@contextmanager
def _faults_of_tokenizer(what: str) -> Iterator[None]:
    """Raises `InvalidInputError` for whatever the library raises, which may be a panic of Rust."""
    try:
        yield
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise InvalidInputError(
            f"{what}: {error!s:.500}; write one with AutoTokenizer.from_pretrained(...).save_pretrained(...)"
        ) from error
