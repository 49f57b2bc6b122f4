from collapipe.v1 import job_pb2 as _job_pb2
from collapipe.v1 import plan_pb2 as _plan_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class PrepareJobRequest(_message.Message):
    __slots__ = ("job", "labels", "vocabulary")
    JOB_FIELD_NUMBER: _ClassVar[int]
    LABELS_FIELD_NUMBER: _ClassVar[int]
    VOCABULARY_FIELD_NUMBER: _ClassVar[int]
    job: _job_pb2.JobSpec
    labels: _containers.RepeatedScalarFieldContainer[str]
    vocabulary: _job_pb2.BlobSource
    def __init__(self, job: _Optional[_Union[_job_pb2.JobSpec, _Mapping]] = ..., labels: _Optional[_Iterable[str]] = ..., vocabulary: _Optional[_Union[_job_pb2.BlobSource, _Mapping]] = ...) -> None: ...

class PrepareJobResponse(_message.Message):
    __slots__ = ("commit", "model", "num_blocks", "unit_bytes", "hidden_size")
    COMMIT_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    UNIT_BYTES_FIELD_NUMBER: _ClassVar[int]
    HIDDEN_SIZE_FIELD_NUMBER: _ClassVar[int]
    commit: _plan_pb2.Commit
    model: _plan_pb2.ModelSpec
    num_blocks: int
    unit_bytes: _containers.RepeatedScalarFieldContainer[int]
    hidden_size: int
    def __init__(self, commit: _Optional[_Union[_plan_pb2.Commit, _Mapping]] = ..., model: _Optional[_Union[_plan_pb2.ModelSpec, _Mapping]] = ..., num_blocks: _Optional[int] = ..., unit_bytes: _Optional[_Iterable[int]] = ..., hidden_size: _Optional[int] = ...) -> None: ...

class CommitRoundRequest(_message.Message):
    __slots__ = ("attempt", "clusters")
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    CLUSTERS_FIELD_NUMBER: _ClassVar[int]
    attempt: _plan_pb2.Attempt
    clusters: _containers.RepeatedCompositeFieldContainer[PreparedCluster]
    def __init__(self, attempt: _Optional[_Union[_plan_pb2.Attempt, _Mapping]] = ..., clusters: _Optional[_Iterable[_Union[PreparedCluster, _Mapping]]] = ...) -> None: ...

class PreparedCluster(_message.Message):
    __slots__ = ("state", "address")
    STATE_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    state: _plan_pb2.ClusterState
    address: str
    def __init__(self, state: _Optional[_Union[_plan_pb2.ClusterState, _Mapping]] = ..., address: _Optional[str] = ...) -> None: ...

class CommitRoundResponse(_message.Message):
    __slots__ = ("commit",)
    COMMIT_FIELD_NUMBER: _ClassVar[int]
    commit: _plan_pb2.Commit
    def __init__(self, commit: _Optional[_Union[_plan_pb2.Commit, _Mapping]] = ...) -> None: ...

class ExportModelRequest(_message.Message):
    __slots__ = ("job_id",)
    JOB_ID_FIELD_NUMBER: _ClassVar[int]
    job_id: str
    def __init__(self, job_id: _Optional[str] = ...) -> None: ...

class ExportModelResponse(_message.Message):
    __slots__ = ("file_name", "chunk", "total_bytes")
    FILE_NAME_FIELD_NUMBER: _ClassVar[int]
    CHUNK_FIELD_NUMBER: _ClassVar[int]
    TOTAL_BYTES_FIELD_NUMBER: _ClassVar[int]
    file_name: str
    chunk: bytes
    total_bytes: int
    def __init__(self, file_name: _Optional[str] = ..., chunk: _Optional[bytes] = ..., total_bytes: _Optional[int] = ...) -> None: ...
