from collapipe.v1 import job_pb2 as _job_pb2
from collapipe.v1 import plan_pb2 as _plan_pb2
from collapipe.v1 import secure_aggregation_pb2 as _secure_aggregation_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class PrepareJobRequest(_message.Message):
    __slots__ = ("job", "labels", "vocabulary", "host_clusters", "owner", "gives_up")
    JOB_FIELD_NUMBER: _ClassVar[int]
    LABELS_FIELD_NUMBER: _ClassVar[int]
    VOCABULARY_FIELD_NUMBER: _ClassVar[int]
    HOST_CLUSTERS_FIELD_NUMBER: _ClassVar[int]
    OWNER_FIELD_NUMBER: _ClassVar[int]
    GIVES_UP_FIELD_NUMBER: _ClassVar[int]
    job: _job_pb2.JobSpec
    labels: _containers.RepeatedScalarFieldContainer[str]
    vocabulary: _job_pb2.BlobSource
    host_clusters: _containers.RepeatedScalarFieldContainer[int]
    owner: str
    gives_up: bool
    def __init__(self, job: _Optional[_Union[_job_pb2.JobSpec, _Mapping]] = ..., labels: _Optional[_Iterable[str]] = ..., vocabulary: _Optional[_Union[_job_pb2.BlobSource, _Mapping]] = ..., host_clusters: _Optional[_Iterable[int]] = ..., owner: _Optional[str] = ..., gives_up: bool = ...) -> None: ...

class PrepareJobResponse(_message.Message):
    __slots__ = ("commit", "model", "num_blocks", "unit_bytes", "hidden_size", "frozen_bytes", "frozen_memory_share", "stored_bytes", "findings", "waits_for_job_id")
    COMMIT_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    UNIT_BYTES_FIELD_NUMBER: _ClassVar[int]
    HIDDEN_SIZE_FIELD_NUMBER: _ClassVar[int]
    FROZEN_BYTES_FIELD_NUMBER: _ClassVar[int]
    FROZEN_MEMORY_SHARE_FIELD_NUMBER: _ClassVar[int]
    STORED_BYTES_FIELD_NUMBER: _ClassVar[int]
    FINDINGS_FIELD_NUMBER: _ClassVar[int]
    WAITS_FOR_JOB_ID_FIELD_NUMBER: _ClassVar[int]
    commit: _plan_pb2.Commit
    model: _plan_pb2.ModelSpec
    num_blocks: int
    unit_bytes: _containers.RepeatedScalarFieldContainer[int]
    hidden_size: int
    frozen_bytes: _containers.RepeatedScalarFieldContainer[int]
    frozen_memory_share: float
    stored_bytes: int
    findings: _containers.RepeatedCompositeFieldContainer[_job_pb2.Finding]
    waits_for_job_id: str
    def __init__(self, commit: _Optional[_Union[_plan_pb2.Commit, _Mapping]] = ..., model: _Optional[_Union[_plan_pb2.ModelSpec, _Mapping]] = ..., num_blocks: _Optional[int] = ..., unit_bytes: _Optional[_Iterable[int]] = ..., hidden_size: _Optional[int] = ..., frozen_bytes: _Optional[_Iterable[int]] = ..., frozen_memory_share: _Optional[float] = ..., stored_bytes: _Optional[int] = ..., findings: _Optional[_Iterable[_Union[_job_pb2.Finding, _Mapping]]] = ..., waits_for_job_id: _Optional[str] = ...) -> None: ...

class PushUnitRequest(_message.Message):
    __slots__ = ("unit", "chunk", "digest")
    UNIT_FIELD_NUMBER: _ClassVar[int]
    CHUNK_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    unit: PushedUnit
    chunk: bytes
    digest: str
    def __init__(self, unit: _Optional[_Union[PushedUnit, _Mapping]] = ..., chunk: _Optional[bytes] = ..., digest: _Optional[str] = ...) -> None: ...

class PushedUnit(_message.Message):
    __slots__ = ("attempt", "cluster_index", "unit_index", "total_bytes", "num_samples", "base_digest", "grant")
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    CLUSTER_INDEX_FIELD_NUMBER: _ClassVar[int]
    UNIT_INDEX_FIELD_NUMBER: _ClassVar[int]
    TOTAL_BYTES_FIELD_NUMBER: _ClassVar[int]
    NUM_SAMPLES_FIELD_NUMBER: _ClassVar[int]
    BASE_DIGEST_FIELD_NUMBER: _ClassVar[int]
    GRANT_FIELD_NUMBER: _ClassVar[int]
    attempt: _plan_pb2.Attempt
    cluster_index: int
    unit_index: int
    total_bytes: int
    num_samples: int
    base_digest: str
    grant: _plan_pb2.SignedGrant
    def __init__(self, attempt: _Optional[_Union[_plan_pb2.Attempt, _Mapping]] = ..., cluster_index: _Optional[int] = ..., unit_index: _Optional[int] = ..., total_bytes: _Optional[int] = ..., num_samples: _Optional[int] = ..., base_digest: _Optional[str] = ..., grant: _Optional[_Union[_plan_pb2.SignedGrant, _Mapping]] = ...) -> None: ...

class PushUnitResponse(_message.Message):
    __slots__ = ("received_bytes", "complete")
    RECEIVED_BYTES_FIELD_NUMBER: _ClassVar[int]
    COMPLETE_FIELD_NUMBER: _ClassVar[int]
    received_bytes: int
    complete: bool
    def __init__(self, received_bytes: _Optional[int] = ..., complete: bool = ...) -> None: ...

class CommitRoundRequest(_message.Message):
    __slots__ = ("attempt", "clusters", "candidate_copied", "is_candidate", "keep_commits", "late_clusters", "unmasking", "keep_furthest")
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    CLUSTERS_FIELD_NUMBER: _ClassVar[int]
    CANDIDATE_COPIED_FIELD_NUMBER: _ClassVar[int]
    IS_CANDIDATE_FIELD_NUMBER: _ClassVar[int]
    KEEP_COMMITS_FIELD_NUMBER: _ClassVar[int]
    LATE_CLUSTERS_FIELD_NUMBER: _ClassVar[int]
    UNMASKING_FIELD_NUMBER: _ClassVar[int]
    KEEP_FURTHEST_FIELD_NUMBER: _ClassVar[int]
    attempt: _plan_pb2.Attempt
    clusters: _containers.RepeatedCompositeFieldContainer[_plan_pb2.ClusterState]
    candidate_copied: bool
    is_candidate: bool
    keep_commits: int
    late_clusters: _containers.RepeatedScalarFieldContainer[int]
    unmasking: _secure_aggregation_pb2.Unmasking
    keep_furthest: bool
    def __init__(self, attempt: _Optional[_Union[_plan_pb2.Attempt, _Mapping]] = ..., clusters: _Optional[_Iterable[_Union[_plan_pb2.ClusterState, _Mapping]]] = ..., candidate_copied: bool = ..., is_candidate: bool = ..., keep_commits: _Optional[int] = ..., late_clusters: _Optional[_Iterable[int]] = ..., unmasking: _Optional[_Union[_secure_aggregation_pb2.Unmasking, _Mapping]] = ..., keep_furthest: bool = ...) -> None: ...

class CommitRoundResponse(_message.Message):
    __slots__ = ("commit", "stored_bytes", "changes")
    class ChangesEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: int
        value: float
        def __init__(self, key: _Optional[int] = ..., value: _Optional[float] = ...) -> None: ...
    COMMIT_FIELD_NUMBER: _ClassVar[int]
    STORED_BYTES_FIELD_NUMBER: _ClassVar[int]
    CHANGES_FIELD_NUMBER: _ClassVar[int]
    commit: _plan_pb2.Commit
    stored_bytes: int
    changes: _containers.ScalarMap[int, float]
    def __init__(self, commit: _Optional[_Union[_plan_pb2.Commit, _Mapping]] = ..., stored_bytes: _Optional[int] = ..., changes: _Optional[_Mapping[int, float]] = ...) -> None: ...

class RollBackRequest(_message.Message):
    __slots__ = ("job_id", "num_rounds", "attempt")
    JOB_ID_FIELD_NUMBER: _ClassVar[int]
    NUM_ROUNDS_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    job_id: str
    num_rounds: int
    attempt: int
    def __init__(self, job_id: _Optional[str] = ..., num_rounds: _Optional[int] = ..., attempt: _Optional[int] = ...) -> None: ...

class RollBackResponse(_message.Message):
    __slots__ = ("commit", "stored_bytes")
    COMMIT_FIELD_NUMBER: _ClassVar[int]
    STORED_BYTES_FIELD_NUMBER: _ClassVar[int]
    commit: _plan_pb2.Commit
    stored_bytes: int
    def __init__(self, commit: _Optional[_Union[_plan_pb2.Commit, _Mapping]] = ..., stored_bytes: _Optional[int] = ...) -> None: ...

class ExportModelRequest(_message.Message):
    __slots__ = ("job_id", "merged")
    JOB_ID_FIELD_NUMBER: _ClassVar[int]
    MERGED_FIELD_NUMBER: _ClassVar[int]
    job_id: str
    merged: bool
    def __init__(self, job_id: _Optional[str] = ..., merged: bool = ...) -> None: ...

class ExportModelResponse(_message.Message):
    __slots__ = ("file_name", "chunk", "total_bytes")
    FILE_NAME_FIELD_NUMBER: _ClassVar[int]
    CHUNK_FIELD_NUMBER: _ClassVar[int]
    TOTAL_BYTES_FIELD_NUMBER: _ClassVar[int]
    file_name: str
    chunk: bytes
    total_bytes: int
    def __init__(self, file_name: _Optional[str] = ..., chunk: _Optional[bytes] = ..., total_bytes: _Optional[int] = ...) -> None: ...
