"""Random messages for every method of every service, and random bytes for everything that reads bytes."""

import random
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from importlib import import_module
from itertools import islice
from pkgutil import iter_modules
from typing import Any

import grpc
from google.protobuf.descriptor import Descriptor, FieldDescriptor, MethodDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass

from collapipe import v1

_WORDS = [
    "",
    "device-0-0",
    "a" * 300,
    "../../etc/passwd",
    "\0",
    "ü🙂",
    "{}",
    "[[",
    "-1",
    "nan",
    "0" * 64,
]
_INTEGERS = [0, 1, 2, 3, 7, 100, 2**31 - 1, 2**32 - 1, 2**63 - 1, 2**64 - 1, -1, -(2**31), -(2**63)]
_FLOATS = [0.0, 1.0, -1.0, 0.5, 1e308, -1e308, 5e-324, float("inf"), float("-inf"), float("nan")]
_MAX_DEPTH = 6
_MAX_BYTES = 200_000
_CALL_SECONDS = 10.0
_MOST_ANSWERS = 20
_FAULTS = (grpc.StatusCode.UNKNOWN, grpc.StatusCode.INTERNAL)


def all_methods() -> list[MethodDescriptor]:
    """Returns each method of the protocol."""
    found = {}
    for module in iter_modules(v1.__path__):
        if module.name.endswith("_pb2"):
            descriptor = import_module(f"collapipe.v1.{module.name}").DESCRIPTOR
            for service in descriptor.services_by_name.values():
                found |= {method.full_name: method for method in service.methods}
    return list(found.values())


class RandomInputs:
    """Makes random messages and damages bytes. The same seed makes the same inputs.

    Args:
        words: Texts that mean something to the receiver, such as ids of jobs.
    """

    def __init__(self, seed: int | str, words: Sequence[str] = ()) -> None:
        self._draw = random.Random(seed)
        self._words = [*_WORDS, *words, *words]

    def message(self, kind: Descriptor, depth: int = 0) -> Message:
        """Returns a message of a kind, with random values in about half of its fields."""
        message = GetMessageClass(kind)()
        share = self._draw.choice((0.2, 0.5, 0.9))
        for field_ in kind.fields:
            if self._draw.random() < share and depth < _MAX_DEPTH:
                self._fill(message, field_, depth)
        return message

    def stream(self, kind: Descriptor) -> list[bytes]:
        """Returns up to five messages, of which some are damaged, missing or repeated."""
        messages: list[bytes] = []
        for _ in range(self._draw.choice((0, 1, 1, 1, 2, 3, 5))):
            if messages and self._draw.random() < 0.2:
                messages.append(self._draw.choice(messages))
                continue
            data = self.message(kind).SerializeToString()
            messages.append(self.damaged(data) if self._draw.random() < 0.3 else data)
        return messages

    def damaged(self, data: bytes) -> bytes:
        """Returns bytes that differ from `data` in some places."""
        draw, changed = self._draw, bytearray(data)
        for _ in range(draw.choice((1, 1, 2, 8))):
            position = draw.randrange(len(changed) + 1)
            match draw.randrange(6):
                case 0:
                    del changed[position:]
                case 1:
                    changed[position : position + 1] = draw.randbytes(1)
                case 2:
                    changed[position:position] = draw.randbytes(draw.choice((1, 4, 100)))
                case 3:
                    del changed[position : position + draw.choice((1, 4, 100))]
                case 4:
                    start = draw.randrange(len(changed) + 1)
                    changed[position:position] = changed[start : start + draw.choice((4, 100))]
                case 5 if changed:
                    changed[position % len(changed)] ^= 1 << draw.randrange(8)
        return bytes(changed[:_MAX_BYTES])

    def _fill(self, message: Message, field_: FieldDescriptor, depth: int) -> None:
        target = getattr(message, field_.name)
        if field_.message_type is not None and field_.message_type.GetOptions().map_entry:
            entry = field_.message_type.fields_by_name
            for _ in range(self._draw.choice((1, 2))):
                key, value = self._value(entry["key"]), entry["value"]
                if value.message_type is None:
                    target[key] = self._value(value)
                else:
                    target[key].CopyFrom(self.message(value.message_type, depth + 1))
        elif field_.is_repeated:
            for _ in range(self._draw.choice((1, 2, 3, 50) if depth < 2 else (1, 2))):
                if field_.message_type is None:
                    target.append(self._value(field_))
                else:
                    target.add().CopyFrom(self.message(field_.message_type, depth + 1))
        elif field_.message_type is not None:
            target.CopyFrom(self.message(field_.message_type, depth + 1))
        else:
            setattr(message, field_.name, self._value(field_))

    def _value(self, field_: FieldDescriptor) -> Any:
        draw = self._draw
        match field_.cpp_type:
            case FieldDescriptor.CPPTYPE_STRING if field_.type == FieldDescriptor.TYPE_BYTES:
                return draw.randbytes(draw.choice((0, 1, 32, 64, 5000)))
            case FieldDescriptor.CPPTYPE_STRING:
                return draw.choice(self._words)
            case FieldDescriptor.CPPTYPE_BOOL:
                return draw.random() < 0.5
            case FieldDescriptor.CPPTYPE_DOUBLE | FieldDescriptor.CPPTYPE_FLOAT:
                return draw.choice(_FLOATS)
            case FieldDescriptor.CPPTYPE_ENUM:
                known = [value.number for value in field_.enum_type.values]
                return draw.choice([*known, *known, 99])
        signed = field_.cpp_type in (FieldDescriptor.CPPTYPE_INT32, FieldDescriptor.CPPTYPE_INT64)
        bits = (
            32
            if field_.cpp_type in (FieldDescriptor.CPPTYPE_INT32, FieldDescriptor.CPPTYPE_UINT32)
            else 64
        )
        low, high = (-(1 << bits - 1), (1 << bits - 1) - 1) if signed else (0, (1 << bits) - 1)
        return min(max(draw.choice(_INTEGERS), low), high)


@dataclass
class Outcome:
    """What became of the calls of one method.

    Args:
        codes: Number of calls by the name of their status.
        faults: Why a call counts as a fault of the server, with the messages of that call.
    """

    messages: int = 0
    codes: Counter[str] = field(default_factory=Counter)
    faults: list[tuple[str, list[bytes]]] = field(default_factory=list)


def call_with_random_messages(
    channel: grpc.Channel, method: MethodDescriptor, inputs: RandomInputs, until: float, calls: int
) -> Outcome:
    """Calls a method with random messages until the time `until` of the monotonic clock, or `calls` times, whichever comes first.

    A server may refuse a call or leave it open. It must not fail unexpectedly, and it must not be gone.
    """
    name = f"/{method.containing_service.full_name}/{method.name}"
    calling: Any = channel.stream_stream(name)
    outcome = Outcome()
    for _ in range(calls):
        if time.monotonic() > until:
            break
        messages = inputs.stream(method.input_type)
        call = calling(iter(messages), timeout=_CALL_SECONDS)
        with suppress(grpc.RpcError):
            for _ in islice(call, _MOST_ANSWERS):
                pass
        call.cancel()
        code, said = call.code(), str(call.details())
        outcome.messages += len(messages)
        outcome.codes[code.name] += 1
        is_gone = code is grpc.StatusCode.UNAVAILABLE and said.startswith("failed to connect")
        if code in _FAULTS or is_gone:
            outcome.faults.append((f"{code.name}: {said}", messages))
    return outcome


def read_random_bytes(
    read: Callable[[bytes], Any],
    samples: Sequence[bytes],
    inputs: RandomInputs,
    allowed: tuple[type[BaseException], ...],
    number: int,
) -> Outcome:
    """Lets a function read damaged samples, and counts what it raises."""
    outcome = Outcome()
    for index in range(number):
        data = inputs.damaged(samples[index % len(samples)])
        outcome.messages += 1
        try:
            read(data)
            outcome.codes["accepted"] += 1
        except allowed as error:
            outcome.codes[type(error).__name__] += 1
        except Exception as error:
            outcome.codes[type(error).__name__] += 1
            if len(outcome.faults) < 20:
                outcome.faults.append((repr(error), [data]))
    return outcome


def in_threads(
    tasks: Mapping[str, Callable[[], Outcome]], number: int
) -> Iterator[tuple[str, Outcome]]:
    """Runs tasks in so many threads, and yields the outcome of each by its name."""
    with ThreadPoolExecutor(number) as threads:
        running = {name: threads.submit(task) for name, task in tasks.items()}
        for name in sorted(running):
            yield name, running[name].result()
