"""What no honest host tells: numbers that are not finite, negative or huge, and long texts."""

import math
from collections.abc import Iterator, Mapping
from typing import Any

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

MOST_TOLD = 1e15
"""More than any number of seconds, bytes, rows or tokens, and any sum of losses. Sums of many such numbers are exact."""
MOST_OF_FP32 = 1e45
"""More than any loss or norm, which follow from many values below 4e38."""
MOST_CHARACTERS = 1000
"""Longest text that another host tells, unless its message has another limit. Longer ones are refused or cut."""
SHOWN = 200
"""Characters that are shown of what is wrong."""


def impossible_value(
    message: Message,
    magnitudes: Mapping[str, float] | None = None,
    *,
    most_characters: int = MOST_CHARACTERS,
) -> str:
    """Returns the first value in a message, or in the messages within it, that no honest host tells. It is in words; empty if there is none.

    Values of maps are not checked.

    Args:
        magnitudes: Fields whose values may be negative, with their largest magnitude. If it is infinite, any number is possible.
        most_characters: Longest text.
    """
    for field, value in _values(message):
        if isinstance(value, (str, bytes)):
            if len(value) > most_characters:
                return f"{len(value)} characters as {field.name}, of which {most_characters} are possible: {str(value[:SHOWN])!r}"
            continue
        magnitude = (magnitudes or {}).get(field.name)
        low, high = (0.0, MOST_TOLD) if magnitude is None else (-magnitude, magnitude)
        if magnitude != math.inf and not low <= value <= high:
            return f"{value} as {field.name}, which must be finite and from {low:g} to {high:g}"
    return ""


def _values(message: Message) -> Iterator[tuple[FieldDescriptor, Any]]:
    for field, value in message.ListFields():
        kind = field.message_type
        if kind is not None and kind.GetOptions().map_entry:
            continue
        for each in value if field.is_repeated else [value]:
            if kind is None:
                yield field, each
            else:
                yield from _values(each)
