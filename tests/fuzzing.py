"""Random messages for every method of every service, and random bytes for everything that reads bytes."""

import random
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from importlib import import_module
from itertools import islice
from pkgutil import iter_modules
from typing import Any

import grpc
from google.protobuf.descriptor import Descriptor, FieldDescriptor, MethodDescriptor
from google.protobuf.message import DecodeError, Message
from google.protobuf.message_factory import GetMessageClass

from collapipe import v1
from collapipe.rpc.options import MAX_MESSAGE_BYTES, PUBLIC_SERVER_OPTIONS, SERVER_OPTIONS
from collapipe.rpc.status import BLAMED_HOST_KEY

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
_CALL_SECONDS = 60.0
"""A call that takes longer hangs, unless its method may wait."""
_WAITING_SECONDS = 1.0
"""Calls of methods that may wait end after this time."""
_WAITING = frozenset({"WatchJob"})
"""`WatchJob` waits for the next event of a job that runs. Each other method ends when its messages end."""
_TURN_SECONDS = 1.0
_TURN_CALLS = 20
_MOST_ANSWERS = 20
_MOST_FAULTS = 20
_KINDS = ("random", "damaged", "truncated", "wrong type", "replayed", "out of order")
_OVERSIZED = "oversized"
"""Rarer than the other kinds, because such a message costs as much as thousands of others."""
_CALLS_PER_OVERSIZED = 500
"""The first call of each method and role is oversized, and then one of so many."""
_GRANTED = "granted"
"""The first message is valid, with a grant of the scheduler where one is needed, and then some of it may be changed. A third of the
calls that may be so are so."""
KINDS = (*_KINDS, _OVERSIZED, _GRANTED)
"""What may be wrong with the messages of a call."""
_MOST_EARLIER = 50
"""Calls that are remembered, to repeat their messages."""
_RIGHT_CODES = frozenset(
    {
        grpc.StatusCode.OK,
        grpc.StatusCode.INVALID_ARGUMENT,
        grpc.StatusCode.FAILED_PRECONDITION,
        grpc.StatusCode.PERMISSION_DENIED,
        grpc.StatusCode.NOT_FOUND,
        grpc.StatusCode.DATA_LOSS,
    }
)

_ATTEMPTS = frozenset({"RunRound", "RunModel"})
_FAILED_CODES = frozenset(
    {
        grpc.StatusCode.ABORTED,
        grpc.StatusCode.OUT_OF_RANGE,
    }
)
"""An attempt of `_ATTEMPTS` may fail, or its values may not be finite."""


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
        granted: Makes a valid first message, with a grant of the scheduler if it needs one. It gets a function that may change the fields of
            a message that it is given.
    """

    def __init__(
        self,
        seed: int | str,
        words: Sequence[str] = (),
        granted: Callable[[Callable[[Message], None]], Message] | None = None,
    ) -> None:
        self._granted = granted
        self._kinds = (*_KINDS, *[_GRANTED] * (len(_KINDS) // 2)) if granted else _KINDS
        self._draw = random.Random(seed)
        self._words = [*_WORDS, *words, *words]
        self._num_calls = 0
        self._earlier = deque[list[bytes]](maxlen=_MOST_EARLIER)

    def message(self, kind: Descriptor, depth: int = 0) -> Message:
        """Returns a message of a kind, with random values in about half of its fields."""
        message = GetMessageClass(kind)()
        share = self._draw.choice((0.2, 0.5, 0.9))
        for field_ in kind.fields:
            if self._draw.random() < share and depth < _MAX_DEPTH:
                self._fill(message, field_, depth)
        return message

    def call(self, kind: Descriptor, others: Sequence[Descriptor]) -> tuple[str, list[bytes]]:
        """Returns what is wrong with a call, of `KINDS`, and its messages: none to five, or more if some are repeated.

        Args:
            kind: The kind of messages that the method takes.
            others: Kinds that other methods take.
        """
        draw, number = self._draw, self._num_calls
        self._num_calls += 1
        if number % _CALLS_PER_OVERSIZED == 0:
            return _OVERSIZED, [bytes(MAX_MESSAGE_BYTES + 1)]
        wrong = draw.choice(self._kinds)
        if wrong == "replayed" and self._earlier:
            return wrong, draw.choice(self._earlier)
        kinds = others if wrong == "wrong type" else [kind]
        length = draw.choice((0, 1, 1, 1, 2, 3, 5))
        messages = [
            self.message(draw.choice(kinds)).SerializeToString(deterministic=True)
            for _ in range(length)
        ]
        match wrong:
            case "damaged":
                messages = [self.damaged(data) for data in messages]
            case "truncated":
                messages = [data[: draw.randrange(len(data) + 1)] for data in messages]
            case "out of order":
                messages += draw.choice(self._earlier) if self._earlier else []
                draw.shuffle(messages)
            case "granted":
                assert self._granted is not None
                first = self._granted(self._change).SerializeToString(deterministic=True)
                messages = [first, *messages]
                match draw.choice(("as made", "as made", "doubled", "reordered", "cut")):
                    case "doubled":
                        messages = [each for each in messages for _ in range(2)]
                    case "reordered":
                        draw.shuffle(messages)
                    case "cut":
                        messages[-1] = messages[-1][: draw.randrange(len(messages[-1]) + 1)]
        self._earlier.append(messages[:5])
        return wrong, messages

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

    def _change(self, message: Message) -> None:
        """Gives random values to one or two fields of a message, or to none."""
        fields = [field_ for field_ in message.DESCRIPTOR.fields if field_.name != "grant"]
        for field_ in self._draw.sample(fields, min(len(fields), self._draw.choice((0, 1, 2)))):
            message.ClearField(field_.name)
            self._fill(message, field_, depth=1)

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
        kinds: Number of messages by what is wrong with their call, of `KINDS`.
        codes: Number of calls by the name of their status.
        faults: Why a call counts as a fault of the server, with the messages of that call.
    """

    messages: int = 0
    kinds: Counter[str] = field(default_factory=Counter)
    codes: Counter[str] = field(default_factory=Counter)
    faults: list[tuple[str, list[bytes]]] = field(default_factory=list)


class RandomCalls:
    """Calls one method with random messages.

    A server may refuse a call. It must do so with the right status, and within `_CALL_SECONDS` unless the method may wait.

    Args:
        channel: Where calls are made.
        open_channel: Opens another channel to the server, for one oversized message. gRPC keeps several MB to read from a connection
            until it closes, once a large message has come over it.
    """

    def __init__(
        self,
        channel: grpc.Channel,
        open_channel: Callable[[], grpc.Channel],
        method: MethodDescriptor,
        inputs: RandomInputs,
    ) -> None:
        self.outcome = Outcome()
        self.num_turns = 0
        self._name = f"/{method.containing_service.full_name}/{method.name}"
        self._channel = channel
        self._open_channel = open_channel
        self._inputs = inputs
        self._kind = method.input_type
        self._others = [one.input_type for one in all_methods() if one.input_type != self._kind]
        self._may_wait = method.name in _WAITING
        is_public = method.containing_service.name == "EnrollmentService"
        options = dict(PUBLIC_SERVER_OPTIONS if is_public else SERVER_OPTIONS)
        self._most_bytes = options["grpc.max_receive_message_length"]
        self._right_codes = (
            _RIGHT_CODES | _FAILED_CODES if method.name in _ATTEMPTS else _RIGHT_CODES
        )

    def take_turn(self) -> None:
        """Makes up to `_TURN_CALLS` calls, and begins none after `_TURN_SECONDS`."""
        self.num_turns += 1
        until = time.monotonic() + _TURN_SECONDS
        for _ in range(_TURN_CALLS):
            self._make_call()
            if time.monotonic() > until:
                break

    def _make_call(self) -> None:
        wrong, messages = self._inputs.call(self._kind, self._others)
        if wrong != _OVERSIZED:
            self._send(self._channel, wrong, messages)
            return
        with self._open_channel() as channel:
            self._send(channel, wrong, messages)

    def _send(self, channel: grpc.Channel, wrong: str, messages: Sequence[bytes]) -> None:
        outcome = self.outcome
        refusal = self._refusal(wrong, messages)
        may_wait = self._may_wait and refusal is None
        seconds = _WAITING_SECONDS if may_wait else _CALL_SECONDS
        call: Any = channel.stream_stream(self._name)(iter(messages), timeout=seconds)
        with suppress(grpc.RpcError):
            for _ in islice(call, _MOST_ANSWERS):
                pass
        outcome.messages += len(messages)
        outcome.kinds[wrong] += len(messages)
        if call.cancel():  # It had more answers.
            outcome.codes["more answers"] += 1
            return
        outcome.codes[call.code().name] += 1
        expected = {refusal} if refusal else set(self._right_codes)
        if may_wait:
            expected.add(grpc.StatusCode.DEADLINE_EXCEEDED)
        if any(len(message) > self._most_bytes for message in messages):
            expected.add(grpc.StatusCode.RESOURCE_EXHAUSTED)
        if not refusal and any(
            item.key == BLAMED_HOST_KEY for item in call.trailing_metadata() or ()
        ):
            expected.add(grpc.StatusCode.UNAVAILABLE)  # Another host cannot be reached.
        if "max_age" in (call.details() or ""):
            expected.add(
                grpc.StatusCode.UNAVAILABLE
            )  # A server for strangers limits the age of connections.
        if "more than its share" in (call.details() or ""):
            expected.add(grpc.StatusCode.UNAVAILABLE)
        if call.code() not in expected and len(outcome.faults) < _MOST_FAULTS:
            names = ", ".join(sorted(code.name for code in expected))
            fault = f"{wrong}: {call.code().name} instead of {names}: {call.details()}"
            outcome.faults.append((fault, list(messages)))

    def _refusal(self, wrong: str, messages: Sequence[bytes]) -> grpc.StatusCode | None:
        """Returns the only code with which a call may end, or `None` if that depends on the server."""
        if wrong == _OVERSIZED or (messages and len(messages[0]) > self._most_bytes):
            return grpc.StatusCode.RESOURCE_EXHAUSTED
        if messages and not self._is_readable(messages[0]):
            return grpc.StatusCode.INVALID_ARGUMENT
        return None

    def _is_readable(self, data: bytes) -> bool:
        try:
            GetMessageClass(self._kind).FromString(data)
        except DecodeError:
            return False
        return True


def read_random_bytes(
    read: Callable[[bytes], Any],
    samples: Sequence[bytes],
    inputs: RandomInputs,
    allowed: tuple[type[BaseException], ...],
    number: int,
) -> Outcome:
    """Lets a function read each sample and then damaged ones, and counts what it raises."""
    outcome = Outcome()
    for index in range(number):
        data = samples[index % len(samples)]
        if index >= len(samples):
            data = inputs.damaged(data)
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


def take_turns(line: deque[RandomCalls], threads: int, messages: int, until: float) -> None:
    """Makes calls in threads until so many messages are sent in all, and everybody had a turn. Nobody has a second turn before all
    had one.

    Args:
        line: Who has the next turns, in order. It goes on there when it is used again.
        until: When no further turn begins, on the clock of `time.monotonic`.
    """
    all_calls = list(line)

    def work() -> None:
        while time.monotonic() < until and (
            sum(calls.outcome.messages for calls in all_calls) < messages
            or any(not calls.num_turns for calls in all_calls)
        ):
            calls = line.popleft()
            calls.take_turn()
            line.append(calls)

    threads = min(threads, len(all_calls))
    with ThreadPoolExecutor(threads) as pool:
        for running in [pool.submit(work) for _ in range(threads)]:
            running.result()
