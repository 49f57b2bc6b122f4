"""Turns protobuf messages into JSON documents.

Protobuf's own JSON form writes 64-bit numbers as strings. These documents keep them as numbers.
"""

import math
from typing import Any

from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import Message
from google.protobuf.timestamp_pb2 import Timestamp


def to_document(message: Message) -> dict[str, Any]:
    """Turns a message into a document for `json.dumps`.

    An optional field that is not set is left out. Every other field is written, even if it is 0. Enum
    values are written as `enum_word` writes them, bytes in hexadecimal, and maps as objects whose keys are sorted. Infinity and NaN
    become null, because JSON does not have them.
    """
    document: dict[str, Any] = {}
    for field in message.DESCRIPTOR.fields:
        value = getattr(message, field.name)
        if field.message_type is not None and field.message_type.GetOptions().map_entry:
            of_value = field.message_type.fields_by_name["value"]
            document[field.name] = {key: _to_value(of_value, value[key]) for key in sorted(value)}
        elif field.is_repeated:
            document[field.name] = [_to_value(field, item) for item in value]
        elif not field.has_presence or message.HasField(field.name):
            document[field.name] = _to_value(field, value)
    return document


def _to_value(field: Any, value: Any) -> Any:
    if isinstance(value, Timestamp | Duration):
        return value.ToJsonString()
    if isinstance(value, Message):
        return to_document(value)
    if field.enum_type is not None:
        return enum_word(field.enum_type.values_by_number[value].name, field.enum_type.name)
    if isinstance(value, bytes):
        return value.hex()
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def enum_word(value_name: str, enum_name: str) -> str:
    """Turns `JOB_STATE_RUNNING` of `JobState` into `running`. Codes, which people search for, keep their capitals."""
    prefix = "".join(f"_{c}" if c.isupper() else c.upper() for c in enum_name).strip("_")
    word = value_name.removeprefix(f"{prefix}_")
    return word if enum_name.endswith("Code") else word.lower()
