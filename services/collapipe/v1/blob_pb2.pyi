from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Optional as _Optional

DESCRIPTOR: _descriptor.FileDescriptor

class FetchBlobRequest(_message.Message):
    __slots__ = ("digest", "offset", "checks")
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    CHECKS_FIELD_NUMBER: _ClassVar[int]
    digest: str
    offset: int
    checks: bool
    def __init__(self, digest: _Optional[str] = ..., offset: _Optional[int] = ..., checks: bool = ...) -> None: ...

class FetchBlobResponse(_message.Message):
    __slots__ = ("total_bytes", "chunk")
    TOTAL_BYTES_FIELD_NUMBER: _ClassVar[int]
    CHUNK_FIELD_NUMBER: _ClassVar[int]
    total_bytes: int
    chunk: bytes
    def __init__(self, total_bytes: _Optional[int] = ..., chunk: _Optional[bytes] = ...) -> None: ...
