"""Every field of every message is in its JSON document, with its value, as in protobuf's own JSON form."""

import base64
import json
import math
from collections.abc import Iterator
from importlib import import_module
from pkgutil import iter_modules
from typing import Any

import pytest
from google.protobuf.json_format import MessageToDict
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass

from collapipe import v1
from collapipe.v1 import job_pb2
from collapipe_client.message_json import to_document

MESSAGES = [
    message
    for module in iter_modules(v1.__path__)
    if module.name.endswith("_pb2")
    for message in import_module(
        f"collapipe.v1.{module.name}"
    ).DESCRIPTOR.message_types_by_name.values()
]


def value_of(field: Any, number: int) -> Any:
    """Returns a value for a field that is no message. Different numbers give different values."""
    if field.enum_type is not None:
        return field.enum_type.values[-1].number
    if field.cpp_type == field.CPPTYPE_STRING:
        return f"text {number}" if field.type == field.TYPE_STRING else bytes([number, 255])
    if field.cpp_type == field.CPPTYPE_BOOL:
        return True
    return number + 0.5 if field.cpp_type == field.CPPTYPE_DOUBLE else number


def fill(message: Message, depth: int = 0) -> Message:
    """Sets every field, with two values where it may have several. Messages within messages within messages are empty."""
    for number, field in enumerate(message.DESCRIPTOR.fields, start=1):
        target = getattr(message, field.name)
        if field.message_type is not None and field.message_type.GetOptions().map_entry:
            key, value = (field.message_type.fields_by_name[name] for name in ("key", "value"))
            for entry in (number + 1, number):
                target[value_of(key, entry)] = value_of(value, entry)
        elif field.message_type is not None:
            for each in [target.add(), target.add()] if field.is_repeated else [target]:
                each.SetInParent()
                if depth < 2:
                    fill(each, depth + 1)
        elif field.is_repeated:
            target.extend([value_of(field, number), value_of(field, number + 1)])
        else:
            setattr(message, field.name, value_of(field, number))
    return message


def leaves(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yields each value that is no list and no object, with its place."""
    entries = (
        value.items()
        if isinstance(value, dict)
        else enumerate(value)
        if isinstance(value, list)
        else None
    )
    if entries is None or not value:
        yield path, value
        return
    for key, each in entries:
        yield from leaves(each, f"{path}/{key}")


def is_same(plain: Any, found: Any) -> bool:
    """Compares a value of protobuf's JSON form: it has large integers as text, whole names of enums, and bytes in base 64."""
    if isinstance(found, str):
        return plain.lower().endswith(found.lower()) or base64.b64decode(plain).hex() == found
    return bool(type(found)(plain) == found)


@pytest.mark.parametrize("descriptor", MESSAGES, ids=lambda descriptor: descriptor.name)
def test_document_has_every_field_with_its_value(descriptor: Any) -> None:
    message = fill(GetMessageClass(descriptor)())
    document = json.loads(json.dumps(to_document(message)))
    plain = MessageToDict(
        message, preserving_proto_field_name=True, always_print_fields_with_no_presence=True
    )
    found, wanted = dict(leaves(document)), dict(leaves(plain))
    assert found.keys() == wanted.keys()
    assert [path for path in found if not is_same(wanted[path], found[path])] == []


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_number_that_json_does_not_have_is_null(value: float) -> None:
    evaluation = job_pb2.Evaluation(value=value, other_metrics={"perplexity": value})
    document = to_document(evaluation)
    assert document["value"] is None and document["other_metrics"] == {"perplexity": None}


def test_keys_of_maps_are_sorted() -> None:
    definitions = {"b": "1", "a": "2", "c": "3"}
    evaluation = job_pb2.Evaluation(definitions=definitions)
    assert list(to_document(evaluation)["definitions"].items()) == sorted(definitions.items())
