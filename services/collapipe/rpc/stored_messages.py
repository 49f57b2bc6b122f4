"""Reads messages from JSON documents on the disk, which may be damaged."""

from typing import Any, TypeVar

from google.protobuf import json_format
from google.protobuf.message import Message

_M = TypeVar("_M", bound=Message)


def message_from_json(value: Any, kind: type[_M]) -> _M:
    """Returns a message from its JSON form; raises `ValueError` for anything else."""
    try:
        return json_format.ParseDict(value, kind())
    # For a list instead of an object, or an infinite number, protobuf raises errors of its own parts.
    except (json_format.ParseError, TypeError, AttributeError, ArithmeticError) as error:
        raise ValueError(str(error)) from error
