from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Optional as _Optional

DESCRIPTOR: _descriptor.FileDescriptor

class MeasureLinkRequest(_message.Message):
    __slots__ = ("host_id", "address")
    HOST_ID_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    host_id: str
    address: str
    def __init__(self, host_id: _Optional[str] = ..., address: _Optional[str] = ...) -> None: ...

class MeasureLinkResponse(_message.Message):
    __slots__ = ("goodput_bps", "round_trip_seconds")
    GOODPUT_BPS_FIELD_NUMBER: _ClassVar[int]
    ROUND_TRIP_SECONDS_FIELD_NUMBER: _ClassVar[int]
    goodput_bps: float
    round_trip_seconds: float
    def __init__(self, goodput_bps: _Optional[float] = ..., round_trip_seconds: _Optional[float] = ...) -> None: ...

class ReceiveProbeRequest(_message.Message):
    __slots__ = ("host_id", "chunk", "last")
    HOST_ID_FIELD_NUMBER: _ClassVar[int]
    CHUNK_FIELD_NUMBER: _ClassVar[int]
    LAST_FIELD_NUMBER: _ClassVar[int]
    host_id: str
    chunk: bytes
    last: bool
    def __init__(self, host_id: _Optional[str] = ..., chunk: _Optional[bytes] = ..., last: bool = ...) -> None: ...

class ReceiveProbeResponse(_message.Message):
    __slots__ = ("goodput_bps",)
    GOODPUT_BPS_FIELD_NUMBER: _ClassVar[int]
    goodput_bps: float
    def __init__(self, goodput_bps: _Optional[float] = ...) -> None: ...
