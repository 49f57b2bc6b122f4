from collapipe.v1 import plan_pb2 as _plan_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class ReadClockRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ReadClockResponse(_message.Message):
    __slots__ = ("received_seconds", "sent_seconds")
    RECEIVED_SECONDS_FIELD_NUMBER: _ClassVar[int]
    SENT_SECONDS_FIELD_NUMBER: _ClassVar[int]
    received_seconds: float
    sent_seconds: float
    def __init__(self, received_seconds: _Optional[float] = ..., sent_seconds: _Optional[float] = ...) -> None: ...

class GetSpansRequest(_message.Message):
    __slots__ = ("attempt",)
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    attempt: _plan_pb2.Attempt
    def __init__(self, attempt: _Optional[_Union[_plan_pb2.Attempt, _Mapping]] = ...) -> None: ...

class GetSpansResponse(_message.Message):
    __slots__ = ("spans",)
    SPANS_FIELD_NUMBER: _ClassVar[int]
    spans: _containers.RepeatedCompositeFieldContainer[Span]
    def __init__(self, spans: _Optional[_Iterable[_Union[Span, _Mapping]]] = ...) -> None: ...

class Span(_message.Message):
    __slots__ = ("track", "name", "started_seconds", "ended_seconds", "peer", "codec", "step", "micro_batch", "unit", "bytes")
    TRACK_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    STARTED_SECONDS_FIELD_NUMBER: _ClassVar[int]
    ENDED_SECONDS_FIELD_NUMBER: _ClassVar[int]
    PEER_FIELD_NUMBER: _ClassVar[int]
    CODEC_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    MICRO_BATCH_FIELD_NUMBER: _ClassVar[int]
    UNIT_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    track: str
    name: str
    started_seconds: float
    ended_seconds: float
    peer: str
    codec: str
    step: int
    micro_batch: int
    unit: int
    bytes: int
    def __init__(self, track: _Optional[str] = ..., name: _Optional[str] = ..., started_seconds: _Optional[float] = ..., ended_seconds: _Optional[float] = ..., peer: _Optional[str] = ..., codec: _Optional[str] = ..., step: _Optional[int] = ..., micro_batch: _Optional[int] = ..., unit: _Optional[int] = ..., bytes: _Optional[int] = ...) -> None: ...
