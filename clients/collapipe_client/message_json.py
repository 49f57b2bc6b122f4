"""Turns protobuf messages into JSON documents.

Protobuf's own JSON form writes 64-bit numbers as strings. These documents keep them as numbers.
"""

from typing import Any

from google.protobuf.message import Message
from google.protobuf.timestamp_pb2 import Timestamp


def to_document(message: Message) -> dict[str, Any]:
    """Turns a message into a document for `json.dumps`.

    An optional field that is not set is left out. Every other field is written, even if it is 0. Enum
    values are written as `enum_word` writes them, and bytes in hexadecimal.
    """
    document: dict[str, Any] = {}
    for field in message.DESCRIPTOR.fields:
        value = getattr(message, field.name)
        if field.is_repeated:
            document[field.name] = [_to_value(field, item) for item in value]
        elif not field.has_presence or message.HasField(field.name):
            document[field.name] = _to_value(field, value)
    return document


def _to_value(field: Any, value: Any) -> Any:
    if isinstance(value, Timestamp):
        return value.ToJsonString()
    if isinstance(value, Message):
        return to_document(value)
    if field.enum_type is not None:
        return enum_word(field.enum_type.values_by_number[value].name, field.enum_type.name)
    if isinstance(value, bytes):
        return value.hex()
    return value


def enum_word(value_name: str, enum_name: str) -> str:
    """Turns `JOB_STATE_RUNNING` of `JobState` into `running`. Codes, which people search for, keep their capitals."""
    prefix = "".join(f"_{c}" if c.isupper() else c.upper() for c in enum_name).strip("_")
    word = value_name.removeprefix(f"{prefix}_")
    return word if enum_name.endswith("Code") else word.lower()
