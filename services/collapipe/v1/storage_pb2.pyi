from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Optional as _Optional

DESCRIPTOR: _descriptor.FileDescriptor

class DumpRowsRequest(_message.Message):
    __slots__ = ("job_id",)
    JOB_ID_FIELD_NUMBER: _ClassVar[int]
    job_id: str
    def __init__(self, job_id: _Optional[str] = ...) -> None: ...

class DumpRowsResponse(_message.Message):
    __slots__ = ("table", "round_index", "document_json")
    TABLE_FIELD_NUMBER: _ClassVar[int]
    ROUND_INDEX_FIELD_NUMBER: _ClassVar[int]
    DOCUMENT_JSON_FIELD_NUMBER: _ClassVar[int]
    table: str
    round_index: int
    document_json: str
    def __init__(self, table: _Optional[str] = ..., round_index: _Optional[int] = ..., document_json: _Optional[str] = ...) -> None: ...
