"""Tokenizers that somebody made to attack hosts are refused before they take time or memory."""

import base64
import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from collapipe.errors import InvalidInputError
from collapipe.tasks.tokenizer_limits import read_tokenizer, takes_linear_time
from collapipe.tasks.vocabulary import Vocabulary, make_vocabulary, read_vocabulary

QWEN2 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|"
    r"\s*[\r\n]+|\s+(?!\S)|\s+"
)
TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|"
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|"
    r"\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
DATA = make_vocabulary(["a b"], 300, "llama")
SLOW = {"Regex": "(?:.|.){22}(?!)"}
"""It takes a tenth of a second for each character, and no limit of the library ends it."""


def changed(**sections: Any) -> bytes:
    return json.dumps({**json.loads(DATA), **sections}).encode()


def changed_model(**values: Any) -> bytes:
    return changed(model={**json.loads(DATA)["model"], **values})


def replace(pattern: Any, content: str) -> dict[str, Any]:
    return {"type": "Replace", "pattern": pattern, "content": content}


def split(pattern: str) -> dict[str, Any]:
    return {
        "type": "Split",
        "pattern": {"Regex": pattern},
        "behavior": "Isolated",
        "invert": False,
    }


def several(key: str, *steps: Any) -> dict[str, Any]:
    return {"type": "Sequence", key: list(steps)}


def added(content: str) -> dict[str, Any]:
    flags: dict[str, Any] = dict.fromkeys(
        ("single_word", "lstrip", "rstrip", "normalized", "special"), False
    )
    return {**flags, "id": 300, "content": content, "normalized": True}


def characters(tree_bytes: int, text: bytes) -> dict[str, Any]:
    table = tree_bytes.to_bytes(4, "little") + bytes(4) + text
    return {"type": "Precompiled", "precompiled_charsmap": base64.b64encode(table).decode()}


BYTE_LEVEL = {
    "type": "ByteLevel",
    "add_prefix_space": True,
    "trim_offsets": True,
    "use_regex": False,
}
AROUND = {"type": "TemplateProcessing", "single": [], "pair": [], "special_tokens": {}}


@pytest.mark.parametrize(
    "data",
    [
        changed(pre_tokenizer=split(SLOW["Regex"])),
        changed(pre_tokenizer=split("a" * 1001)),
        changed(normalizer=replace({"String": "a" * 1001}, "a")),
        changed_model(type="WordPiece", max_input_chars_per_word=201, unk_token="<unk>"),
        changed(normalizer=replace(SLOW, "a"), added_tokens=[added("b" * 40)]),
        changed(decoder=replace(SLOW, "a")),
        changed(normalizer=several("normalizers", *[replace({"String": "a"}, "aa")] * 16)),
        changed(normalizer=several("normalizers", *[{"type": "ByteLevel"}] * 2)),
        changed(pre_tokenizer=several("pretokenizers", *[BYTE_LEVEL] * 2)),
        changed(normalizer=several("normalizers", *[{"type": "NFC"}] * 17)),
        changed(normalizer=several("normalizers", *[several("normalizers")] * 100)),
        changed(normalizer={"type": "Prepend", "prepend": "a" * 65}),
        changed(normalizer=characters(2**32 - 1, b"")),
        changed(normalizer=characters(4, b"a" * 65)),
        changed(normalizer={"type": "Precompiled", "precompiled_charsmap": "%"}),
        changed(pre_tokenizer={"type": "FixedLength", "length": 0}),
        changed(post_processor={**AROUND, "single": [{"Sequence": {"id": "A", "type_id": 0}}] * 65}),
        changed(post_processor={**AROUND, "single": [{"Sequence": {"id": "B", "type_id": 0}}]}),
        changed(post_processor={**AROUND, "single": [{"SpecialToken": {"id": "a", "type_id": 0}}]}),
        changed(added_tokens=[added("a" * 1001)]),
        changed(added_tokens=[added("a")] * 50_001),
        changed_model(vocab={"a" * 1001: 0}, merges=[]),
        changed_model(vocab={"a": -1}, merges=[]),
        changed_model(vocab={"a": 2**32}, merges=[]),
        changed_model(vocab={"a": 0.5}, merges=[]),
        changed_model(vocab={"a": 0, "b": 1}, merges=["a b"]),
        changed_model(merges=["nobody knows"]),
        changed_model(continuing_subword_prefix="a" * 65),
        changed_model(type="WordPiece", max_input_chars_per_word=10**9, unk_token="<unk>"),
        changed_model(type="Somebody"),
        DATA.replace(b'"normalizer":null', b'"normalizer":' + b"[" * 100_000),
        DATA.replace(b'"normalizer":', b'"normalizer":{"type":"NFC"},"normalizer":'),
        b"[]",
        b"\xff",
    ],
    ids=range(34),
)  # fmt: skip
def test_tokenizer_that_takes_time_or_memory_or_ends_the_process_is_refused(data: bytes) -> None:
    with pytest.raises(InvalidInputError, match=f"{len(data)} bytes.*tokenizer.json"):
        Vocabulary(data, "llama", 8)


@pytest.mark.parametrize(
    "first",
    [
        replace({"String": "a"}, "a" * 33),
        characters(4, b"a" * 33),
        {"type": "Prepend", "prepend": "a" * 33},
    ],
    ids=lambda step: step["type"],
)
def test_growth_of_steps_that_follow_each_other_is_multiplied(first: dict[str, Any]) -> None:
    second = replace({"String": "a"}, "aa")
    read_tokenizer(changed(normalizer=several("normalizers", first)))
    with pytest.raises(ValueError, match="normalizer .* 66 .* 64 "):
        read_tokenizer(changed(normalizer=several("normalizers", first, second)))


def test_padding_and_cutting_of_a_vocabulary_are_not_used() -> None:
    padding: dict[str, Any] = {"strategy": {"Fixed": 10**12}, "direction": "Right"}
    padding["pad_to_multiple_of"] = None
    padding |= {"pad_id": 0, "pad_type_id": 0, "pad_token": "a"}
    [encoding] = Vocabulary(changed(padding=padding), "llama", 8).encode(["a b"])
    assert len(encoding.ids) < 8


def test_text_that_a_tokenizer_cannot_encode_is_refused() -> None:
    tokenizer = Tokenizer(models.WordLevel({"a": 0, "</s>": 1, "<pad>": 2}, unk_token="<unk>"))
    vocabulary = Vocabulary(tokenizer.to_str().encode(), "llama", 8)
    with pytest.raises(InvalidInputError, match="UNK"):
        list(vocabulary.encode(["b"]))


@pytest.mark.parametrize(
    "line",
    [
        b"[" * 100_000,
        b"[]",
        b"{",
        b'{"chat_template": 1}',
        b'{"special_tokens": []}',
        b'{"special_tokens": {"pad_token": 1}}',
    ],
    ids=range(6),
)
def test_damaged_second_line_of_a_vocabulary_is_refused(line: bytes) -> None:
    with pytest.raises(InvalidInputError, match="second line"):
        Vocabulary(DATA + b"\n" + line, "llama", 8)


@pytest.mark.parametrize(
    "pattern",
    [
        QWEN2,
        QWEN2.replace(r"\p{N}|", r"\p{N}{1,3}|"),
        TEKKEN,
        r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",
        r"'s|'t|'re|'ve|'m|'ll|'d|[\p{L}]+|[\p{N}]|[^\s\p{L}\p{N}]+",
        " {2,}",
        r"\s{2,}|[\n\r\t]",
        r"\s?\p{L}+",
        "[一-龥ࠀ-一가-퟿]+",
        r"[\r\n]",
    ],
)
def test_patterns_of_known_tokenizers_are_allowed(pattern: str) -> None:
    assert takes_linear_time(pattern)


@pytest.mark.parametrize(
    "pattern",
    [
        "(a+)+$",
        "(?:a|a)*b",
        "a+b",
        "a*a*b",
        "a?a?b",
        r"\s+$",
        r"\s*[\r\n]+",
        "a{100000}",
        "a{1,100000}",
        "a+?",
        "a++",
        r"(a)\1",
        r"(?<x>a\g<x>)",
        r"\X",
        r"a(?=b)",
        QWEN2 + "|",
        QWEN2 + "a+b",
        "(?i:a+)",
        "[[a]&&b]",
        "a**",
        "^*",
    ],
)  # fmt: skip
def test_other_patterns_are_refused(pattern: str) -> None:
    assert takes_linear_time(pattern) == (pattern == QWEN2 + "|")


def test_tokenizers_of_the_known_kinds_are_read(tmp_path: Path) -> None:
    unigram = Tokenizer(models.Unigram([("<pad>", 0.0), ("</s>", 0.0), ("▁a", -1.0)], unk_id=0))
    blanks = normalizers.Replace(Regex(" {2,}"), " ")
    unigram.normalizer = normalizers.Sequence(
        [normalizers.NFKC(), blanks, normalizers.Prepend("▁")]
    )
    unigram.pre_tokenizer = pre_tokenizers.Metaspace()
    unigram.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip()]
    )
    old = json.loads(DATA)  # That of GPT-2 names no type of its model.
    del old["model"]["type"]
    for data in (unigram.to_str().encode(), json.dumps(old).encode()):
        (tmp_path / "tokenizer.json").write_bytes(data)
        read = read_vocabulary(tmp_path, "llama")
        assert list(Vocabulary(read, "llama", 8).encode(["a"]))


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("tokenizer.json", " " * ((64 << 20) + 1)),
        ("tokenizer_config.json", "[" * 100_000),
        ("tokenizer_config.json", "[]"),
        ("tokenizer_config.json", '{"chat_template": [1]}'),
        ("tokenizer_config.json", '{"chat_template": [{"name": "rag", "template": ""}]}'),
        ("special_tokens_map.json", "{"),
        ("chat_template.jinja", " " * ((16 << 20) + 1)),
        ("config.json", "[]"),
        ("generation_config.json", "[" * 100_000),
    ],
    ids=range(9),
)
def test_damaged_file_of_a_tokenizer_is_named(tmp_path: Path, name: str, text: str) -> None:
    (tmp_path / "tokenizer.json").write_bytes(DATA)
    (tmp_path / name).write_text(text)
    with pytest.raises(InvalidInputError, match=f"{tmp_path}.*{name}"):
        read_vocabulary(tmp_path, "llama")


def test_ids_and_roles_that_no_tokenizer_has_are_left_out(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_bytes(DATA)
    (tmp_path / "config.json").write_text('{"eos_token_id": 1e999, "pad_token_id": 99999999999999}')
    named = {"unk_token": 5, "mask_token": {"content": [1]}, "own_token": "a", "cls_token": "a"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(named))
    additions = read_vocabulary(tmp_path, "llama").partition(b"\n")[2]
    assert json.loads(additions or b"{}").get("special_tokens", {}).keys() <= {"cls_token"}


def test_template_that_refuses_a_chat_is_named_with_the_row() -> None:
    line = json.dumps(
        {"chat_template": "{% if messages[1] %}{{ raise_exception('own words') }}{% endif %}"}
    )
    vocabulary = Vocabulary(DATA + b"\n" + line.encode(), "llama", 8, origin="model")
    with pytest.raises(InvalidInputError, match=r"^FILE:3: .*model .*user, user: own words"):
        vocabulary.render([{"role": "user", "content": "a"}] * 2, "FILE:3")
