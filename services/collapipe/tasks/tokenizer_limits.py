"""Refuses a tokenizer.json with which one text could take for ever, or all memory.

The tokenizer may be of somebody else, and the library `tokenizers` runs it in this process, where nothing can end it. Its regular
expressions backtrack, and its steps can make a text longer. So only steps are read that take about as long as the text is long.
"""

import base64
import json
import re
from collections.abc import Iterator
from typing import Any

from collapipe.job import MOST_TOKENS

_MAX_STEPS = 16
_MAX_AFFIX = 64
"""Most characters of a text in a step, such as a prefix, and most tokens around a text."""
_MAX_GROWTH = 64
"""How many times as long all steps of a section may make a text with texts that the author of the tokenizer chose."""
MAX_TOKEN = 1_000
"""Most characters of a token."""
_MAX_WORD = 200
"""Most characters of a word that WordPiece cuts into tokens. The time grows with their cube. BERT has 100."""
_MAX_PATTERN = 1_000
"""Most characters of a pattern."""
_MAX_ADDED_TOKENS = 50_000

_STEPS = {
    "normalizer": {
        *("BertNormalizer", "ByteLevel", "Lowercase", "NFC", "NFD", "NFKC", "NFKD", "Nmt"),
        *("Precompiled", "Prepend", "Replace", "Strip", "StripAccents"),
    },
    "pre_tokenizer": {
        *("BertPreTokenizer", "ByteLevel", "CharDelimiterSplit", "Digits", "Metaspace"),
        *("Punctuation", "Split", "UnicodeScripts", "Whitespace", "WhitespaceSplit"),
    },
    "post_processor": {
        *("BertProcessing", "ByteLevel", "RobertaProcessing", "TemplateProcessing"),
    },
    "decoder": {
        *("BPEDecoder", "ByteFallback", "ByteLevel", "CTC", "Fuse", "Metaspace"),
        *("Replace", "Strip", "WordPiece"),
    },
}
"""The steps that may occur, by their section."""
_ONCE = {"ByteLevel", "Metaspace", "Precompiled", "Prepend"}
"""Each time, these may make a text longer."""
_MEMBERS = ("normalizers", "pretokenizers", "processors", "decoders")

_CLASS = r"\\[pP]\{\^?\w+\}|\\[sSdDwWrnt]|\\[^\w\s]"
_ITEM = re.compile(
    rf"(?:{_CLASS}|\[\^?(?:{_CLASS}|[^\[\]\\])+\]|[^\\\[\](){{}}|?*+.^$])(?P<times>[?*+]|\{{\d(?:,\d?)?\}})?"
)
"""One character or class of characters, and how often it occurs."""
_UPPER, _LOWER = r"\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}", r"\p{Ll}\p{Lm}\p{Lo}\p{M}"
_ENDINGS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SAFE_GROUPS = (
    _ENDINGS,
    r"'(?i:[sdmt]|ll|ve|re)",
    r"'(?:[sdmt]|ll|ve|re)",
    r"\s*[\r\n]+|\s+(?!\S)|\s+",
    r"\s+(?!\S)",
    *(
        rf"[^\r\n\p{{L}}\p{{N}}]?[{_UPPER}]*[{_LOWER}]+{end}|[^\r\n\p{{L}}\p{{N}}]?[{_UPPER}]+[{_LOWER}]*{end}"
        for end in ("", f"{_ENDINGS}?")
    ),
)
"""Alternatives that stand in the patterns of GPT-2 to GPT-4o, Llama 3, Qwen and Mistral. Some have groups or conditions, so the rules for other
alternatives would refuse them. They are safe: when one of them does not match after many characters, it or the next alternative of the same entry
matches all these characters. So no character is looked at many times."""


def read_tokenizer(tokenizer_json: bytes) -> dict[str, Any]:
    """Parses a tokenizer.json; raises `ValueError` if it is not one that may be used."""
    try:
        document: Any = json.loads(tokenizer_json, object_pairs_hook=_without_doubles)
    except RecursionError as error:
        raise ValueError("it is nested too deeply: copy it again") from error
    if not isinstance(document, dict) or not isinstance(document.get("model"), dict):
        raise ValueError("it must be an object with a model: copy it again")
    for section in _STEPS:
        _check_section(section, document.get(section))
    _check_model(document["model"])
    added = _list(document.get("added_tokens"), "added_tokens", _MAX_ADDED_TOKENS)
    contents = [token.get("content") if isinstance(token, dict) else token for token in added]
    _check_tokens("added_tokens", contents)
    return document


def takes_linear_time(pattern: str) -> bool:
    """Returns whether searching with a regular expression takes a time that is linear in the length of the text, for every text.

    Each alternative must be in `_SAFE_GROUPS`, or keep a rule: behind the first item with `*`, `+` or `{}`, all items have `*`. Such items match
    whatever follows, so the search never tries a shorter match again. The function may return `False` for an expression that is linear.
    """
    position = 0
    while True:
        end = _end_of_alternative(pattern, position)
        if end is None or end == len(pattern):
            return end is not None
        position = end + 1


def _end_of_alternative(pattern: str, position: int) -> int | None:
    """Returns where the alternative, or the group of `_SAFE_GROUPS`, ends that begins at a position. `None` if it may not be linear."""
    for group in _SAFE_GROUPS:
        end = position + len(group)
        if pattern.startswith(group, position) and pattern[end : end + 1] in ("", "|"):
            return end
    may_be_absent = repeats = False
    while position < len(pattern) and pattern[position] != "|":
        item = _ITEM.match(pattern, position)
        if item is None:
            return None
        times = item["times"]
        if (repeats and times != "*") or (may_be_absent and times == "?"):
            return None
        may_be_absent |= times == "?"
        repeats |= times is not None and times != "?"
        position = item.end()
    return position


def _without_doubles(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Refuses a key that is there twice, because the library may take the other one."""
    result = dict(pairs)
    if len(result) < len(pairs):
        raise ValueError("an object in it has a key twice: remove one of them")
    return result


def _check_section(section: str, first: Any) -> None:
    growth = 1
    found: set[str] = set()
    steps = list(_steps(first, section))
    if len(steps) > _MAX_STEPS:
        raise ValueError(f"{section} has too many steps: use at most {_MAX_STEPS}")
    for step in steps:
        kind = step.get("type")
        if not isinstance(kind, str) or kind not in _STEPS[section]:
            raise ValueError(
                f"{section} has a step of type {kind!r:.80}: use one of {', '.join(sorted(_STEPS[section]))}"
            )
        if kind in found & _ONCE:
            raise ValueError(
                f"{section} has {kind} twice, which can make texts very long: use it once"
            )
        found.add(kind)
        growth *= _check_step(f"{section} {kind}", step)
    if growth > _MAX_GROWTH:
        raise ValueError(
            f"{section} can make a text {growth} times as long, but at most {_MAX_GROWTH} times is allowed: use shorter replacements"
        )


def _steps(step: Any, section: str) -> Iterator[dict[str, Any]]:
    """Yields the steps of a section. A `Sequence` is not yielded itself, but its members are.

    Raises:
        ValueError: The section has something that is no step, or so many steps that it could take long to go through them.
    """
    waiting = [step]
    for _ in range(4 * _MAX_STEPS):
        if not waiting:
            return
        step = waiting.pop()
        if step is None:
            continue
        if not isinstance(step, dict):
            raise ValueError(f"{section} is {step!r:.80}, but must be an object")
        if step.get("type") == "Sequence":
            members = next((step[key] for key in _MEMBERS if key in step), None)
            waiting += _list(members, section, _MAX_STEPS)
        else:
            yield step
    raise ValueError(f"{section} has too many steps: use at most {_MAX_STEPS}")


def _check_step(name: str, step: dict[str, Any]) -> int:
    """Checks a step, and returns how many times as long its longest text may make a text. 1 if it puts no text of its own into texts."""
    growth = 1
    for key, value in step.items():
        if key == "precompiled_charsmap":
            growth = max(growth, _check_characters(name, value))
        elif key == "pattern":
            _check_pattern(name, value)
        elif key in ("single", "pair"):
            _list(value, f"{name}.{key}", _MAX_AFFIX)
        elif isinstance(value, str):
            _check_affix(f"{name}.{key}", value)
            if key in ("content", "prepend"):
                growth = max(growth, len(value))
    if name.endswith("TemplateProcessing"):
        special = step.get("special_tokens")
        for token in special.values() if isinstance(special, dict) else ():
            _list(token.get("ids") if isinstance(token, dict) else None, name, _MAX_AFFIX)
    if name.endswith("Replace") and not isinstance(step.get("content"), str):
        raise ValueError(
            f"{name} has the content {step.get('content')!r:.80}, but must have a text"
        )
    return growth


def _check_pattern(name: str, pattern: Any) -> None:
    expression = pattern.get("Regex") if isinstance(pattern, dict) else None
    # Items before the first repeated one are compared at each place of a text.
    for text in pattern.values() if isinstance(pattern, dict) else ():
        if isinstance(text, str) and len(text) > _MAX_PATTERN:
            raise ValueError(
                f"{name} has a pattern of {len(text)} characters, but may have at most {_MAX_PATTERN}: use a shorter one"
            )
    if isinstance(expression, str) and not takes_linear_time(expression):
        raise ValueError(
            f"{name} has the pattern {expression!r:.200}, which may take very long for some texts: use those of GPT-2, GPT-4, "
            "Llama 3, Qwen or Mistral, or one without groups in which only items that may be absent follow a repeated one"
        )


def _check_characters(name: str, characters: Any) -> int:
    """Checks the table of a `Precompiled`, and returns the length of its longest replacement in bytes.

    It has the size of its tree, the tree, and the replacements, each of which ends with a zero byte.
    """
    try:
        table = base64.b64decode(characters, validate=True)
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"{name} has a table that is not base64 ({error}): copy it again"
        ) from error
    size = int.from_bytes(table[:4], "little")
    longest = max(map(len, table[4 + size :].split(b"\0")))
    if len(table) < 4 + size or longest > _MAX_AFFIX:
        raise ValueError(
            f"{name} has a table of {len(table)} bytes with a tree of {size} bytes and a replacement of {longest} bytes, but only "
            f"complete tables with replacements of at most {_MAX_AFFIX} bytes are read"
        )
    return longest


def _check_model(model: dict[str, Any]) -> None:
    for key, value in model.items():
        if isinstance(value, str):
            _check_affix(f"model.{key}", value)
    vocabulary = model.get("vocab")
    tokens: Any = list(vocabulary) if isinstance(vocabulary, (dict, list)) else None
    if isinstance(vocabulary, list):
        tokens = [entry[0] if isinstance(entry, list) and entry else entry for entry in vocabulary]
    _check_tokens("model.vocab", _list(tokens, "model.vocab", MOST_TOKENS))
    longest = model.get("max_input_chars_per_word", 0)
    if not isinstance(longest, int) or longest > _MAX_WORD:
        raise ValueError(
            f"model.max_input_chars_per_word is {longest!r:.80}, but may be at most {_MAX_WORD}"
        )


def _check_tokens(name: str, tokens: list[Any]) -> None:
    for token in tokens:
        if not isinstance(token, str) or len(token) > MAX_TOKEN:
            raise ValueError(
                f"{name} has the token {token!r:.80}, but tokens are texts of at most {MAX_TOKEN} characters"
            )


def _check_affix(name: str, text: str) -> None:
    if len(text) > _MAX_AFFIX:
        raise ValueError(
            f"{name} is a text of {len(text)} characters, but may have at most {_MAX_AFFIX}"
        )


def _list(value: Any, name: str, most: int) -> list[Any]:
    if value is None:
        return []
    if not isinstance(value, list) or len(value) > most:
        size = f"a list of {len(value)}" if isinstance(value, list) else repr(value)[:80]
        raise ValueError(f"{name} is {size}, but must be a list of at most {most}")
    return value
