from collapipe.v1 import job_pb2 as _job_pb2
from collapipe.v1 import model_use_pb2 as _model_use_pb2
from collapipe.v1 import plan_pb2 as _plan_pb2
from collapipe.v1 import secure_aggregation_pb2 as _secure_aggregation_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class PrepareDataRequest(_message.Message):
    __slots__ = ("job", "cluster_index", "vocabulary", "owner", "num_first_rows", "has_model")
    JOB_FIELD_NUMBER: _ClassVar[int]
    CLUSTER_INDEX_FIELD_NUMBER: _ClassVar[int]
    VOCABULARY_FIELD_NUMBER: _ClassVar[int]
    OWNER_FIELD_NUMBER: _ClassVar[int]
    NUM_FIRST_ROWS_FIELD_NUMBER: _ClassVar[int]
    HAS_MODEL_FIELD_NUMBER: _ClassVar[int]
    job: _job_pb2.JobSpec
    cluster_index: int
    vocabulary: _job_pb2.BlobSource
    owner: str
    num_first_rows: int
    has_model: bool
    def __init__(self, job: _Optional[_Union[_job_pb2.JobSpec, _Mapping]] = ..., cluster_index: _Optional[int] = ..., vocabulary: _Optional[_Union[_job_pb2.BlobSource, _Mapping]] = ..., owner: _Optional[str] = ..., num_first_rows: _Optional[int] = ..., has_model: bool = ...) -> None: ...

class PrepareDataResponse(_message.Message):
    __slots__ = ("num_rows", "labels", "vocabulary", "num_held_out_rows", "held_out_labels", "num_long_rows", "num_long_held_out_rows", "num_first_rows", "findings", "texts")
    NUM_ROWS_FIELD_NUMBER: _ClassVar[int]
    LABELS_FIELD_NUMBER: _ClassVar[int]
    VOCABULARY_FIELD_NUMBER: _ClassVar[int]
    NUM_HELD_OUT_ROWS_FIELD_NUMBER: _ClassVar[int]
    HELD_OUT_LABELS_FIELD_NUMBER: _ClassVar[int]
    NUM_LONG_ROWS_FIELD_NUMBER: _ClassVar[int]
    NUM_LONG_HELD_OUT_ROWS_FIELD_NUMBER: _ClassVar[int]
    NUM_FIRST_ROWS_FIELD_NUMBER: _ClassVar[int]
    FINDINGS_FIELD_NUMBER: _ClassVar[int]
    TEXTS_FIELD_NUMBER: _ClassVar[int]
    num_rows: int
    labels: _containers.RepeatedScalarFieldContainer[str]
    vocabulary: _job_pb2.BlobSource
    num_held_out_rows: int
    held_out_labels: _containers.RepeatedCompositeFieldContainer[HeldOutLabel]
    num_long_rows: int
    num_long_held_out_rows: int
    num_first_rows: int
    findings: _containers.RepeatedCompositeFieldContainer[_job_pb2.Finding]
    texts: TextCounts
    def __init__(self, num_rows: _Optional[int] = ..., labels: _Optional[_Iterable[str]] = ..., vocabulary: _Optional[_Union[_job_pb2.BlobSource, _Mapping]] = ..., num_held_out_rows: _Optional[int] = ..., held_out_labels: _Optional[_Iterable[_Union[HeldOutLabel, _Mapping]]] = ..., num_long_rows: _Optional[int] = ..., num_long_held_out_rows: _Optional[int] = ..., num_first_rows: _Optional[int] = ..., findings: _Optional[_Iterable[_Union[_job_pb2.Finding, _Mapping]]] = ..., texts: _Optional[_Union[TextCounts, _Mapping]] = ...) -> None: ...

class TextCounts(_message.Message):
    __slots__ = ("num_rows", "num_special", "special_place", "special_token", "num_unknown", "unknown_place")
    NUM_ROWS_FIELD_NUMBER: _ClassVar[int]
    NUM_SPECIAL_FIELD_NUMBER: _ClassVar[int]
    SPECIAL_PLACE_FIELD_NUMBER: _ClassVar[int]
    SPECIAL_TOKEN_FIELD_NUMBER: _ClassVar[int]
    NUM_UNKNOWN_FIELD_NUMBER: _ClassVar[int]
    UNKNOWN_PLACE_FIELD_NUMBER: _ClassVar[int]
    num_rows: int
    num_special: int
    special_place: str
    special_token: str
    num_unknown: int
    unknown_place: str
    def __init__(self, num_rows: _Optional[int] = ..., num_special: _Optional[int] = ..., special_place: _Optional[str] = ..., special_token: _Optional[str] = ..., num_unknown: _Optional[int] = ..., unknown_place: _Optional[str] = ...) -> None: ...

class HeldOutLabel(_message.Message):
    __slots__ = ("label", "place")
    LABEL_FIELD_NUMBER: _ClassVar[int]
    PLACE_FIELD_NUMBER: _ClassVar[int]
    label: str
    place: str
    def __init__(self, label: _Optional[str] = ..., place: _Optional[str] = ...) -> None: ...

class RunRoundRequest(_message.Message):
    __slots__ = ("attempt", "job", "model", "plan", "base", "labels", "local_steps", "evaluate", "previous_stages", "edge_address", "edge_host_id", "vocabulary", "restore_point", "restore_num_rounds", "candidate", "candidate_stages", "wait_for_copy", "total_steps", "anew_since", "is_committed", "predicted_step_seconds", "grant", "masked", "is_use")
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    JOB_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    PLAN_FIELD_NUMBER: _ClassVar[int]
    BASE_FIELD_NUMBER: _ClassVar[int]
    LABELS_FIELD_NUMBER: _ClassVar[int]
    LOCAL_STEPS_FIELD_NUMBER: _ClassVar[int]
    EVALUATE_FIELD_NUMBER: _ClassVar[int]
    PREVIOUS_STAGES_FIELD_NUMBER: _ClassVar[int]
    EDGE_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    EDGE_HOST_ID_FIELD_NUMBER: _ClassVar[int]
    VOCABULARY_FIELD_NUMBER: _ClassVar[int]
    RESTORE_POINT_FIELD_NUMBER: _ClassVar[int]
    RESTORE_NUM_ROUNDS_FIELD_NUMBER: _ClassVar[int]
    CANDIDATE_FIELD_NUMBER: _ClassVar[int]
    CANDIDATE_STAGES_FIELD_NUMBER: _ClassVar[int]
    WAIT_FOR_COPY_FIELD_NUMBER: _ClassVar[int]
    TOTAL_STEPS_FIELD_NUMBER: _ClassVar[int]
    ANEW_SINCE_FIELD_NUMBER: _ClassVar[int]
    IS_COMMITTED_FIELD_NUMBER: _ClassVar[int]
    PREDICTED_STEP_SECONDS_FIELD_NUMBER: _ClassVar[int]
    GRANT_FIELD_NUMBER: _ClassVar[int]
    MASKED_FIELD_NUMBER: _ClassVar[int]
    IS_USE_FIELD_NUMBER: _ClassVar[int]
    attempt: _plan_pb2.Attempt
    job: _job_pb2.JobSpec
    model: _plan_pb2.ModelSpec
    plan: _plan_pb2.Plan
    base: _plan_pb2.ClusterState
    labels: _containers.RepeatedScalarFieldContainer[str]
    local_steps: int
    evaluate: bool
    previous_stages: _containers.RepeatedCompositeFieldContainer[_plan_pb2.Stage]
    edge_address: str
    edge_host_id: str
    vocabulary: _job_pb2.BlobSource
    restore_point: _plan_pb2.ClusterState
    restore_num_rounds: int
    candidate: _plan_pb2.ClusterState
    candidate_stages: _containers.RepeatedCompositeFieldContainer[_plan_pb2.Stage]
    wait_for_copy: bool
    total_steps: int
    anew_since: int
    is_committed: bool
    predicted_step_seconds: float
    grant: _plan_pb2.SignedGrant
    masked: _secure_aggregation_pb2.MaskedRound
    is_use: bool
    def __init__(self, attempt: _Optional[_Union[_plan_pb2.Attempt, _Mapping]] = ..., job: _Optional[_Union[_job_pb2.JobSpec, _Mapping]] = ..., model: _Optional[_Union[_plan_pb2.ModelSpec, _Mapping]] = ..., plan: _Optional[_Union[_plan_pb2.Plan, _Mapping]] = ..., base: _Optional[_Union[_plan_pb2.ClusterState, _Mapping]] = ..., labels: _Optional[_Iterable[str]] = ..., local_steps: _Optional[int] = ..., evaluate: bool = ..., previous_stages: _Optional[_Iterable[_Union[_plan_pb2.Stage, _Mapping]]] = ..., edge_address: _Optional[str] = ..., edge_host_id: _Optional[str] = ..., vocabulary: _Optional[_Union[_job_pb2.BlobSource, _Mapping]] = ..., restore_point: _Optional[_Union[_plan_pb2.ClusterState, _Mapping]] = ..., restore_num_rounds: _Optional[int] = ..., candidate: _Optional[_Union[_plan_pb2.ClusterState, _Mapping]] = ..., candidate_stages: _Optional[_Iterable[_Union[_plan_pb2.Stage, _Mapping]]] = ..., wait_for_copy: bool = ..., total_steps: _Optional[int] = ..., anew_since: _Optional[int] = ..., is_committed: bool = ..., predicted_step_seconds: _Optional[float] = ..., grant: _Optional[_Union[_plan_pb2.SignedGrant, _Mapping]] = ..., masked: _Optional[_Union[_secure_aggregation_pb2.MaskedRound, _Mapping]] = ..., is_use: bool = ...) -> None: ...

class MakeMaskingKeysRequest(_message.Message):
    __slots__ = ("attempt", "job", "cluster_index")
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    JOB_FIELD_NUMBER: _ClassVar[int]
    CLUSTER_INDEX_FIELD_NUMBER: _ClassVar[int]
    attempt: _plan_pb2.Attempt
    job: _job_pb2.JobSpec
    cluster_index: int
    def __init__(self, attempt: _Optional[_Union[_plan_pb2.Attempt, _Mapping]] = ..., job: _Optional[_Union[_job_pb2.JobSpec, _Mapping]] = ..., cluster_index: _Optional[int] = ...) -> None: ...

class MakeMaskingKeysResponse(_message.Message):
    __slots__ = ("keys",)
    KEYS_FIELD_NUMBER: _ClassVar[int]
    keys: _secure_aggregation_pb2.SignedMaskingKeys
    def __init__(self, keys: _Optional[_Union[_secure_aggregation_pb2.SignedMaskingKeys, _Mapping]] = ...) -> None: ...

class ShareMasksRequest(_message.Message):
    __slots__ = ("attempt", "keys", "total_samples")
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    KEYS_FIELD_NUMBER: _ClassVar[int]
    TOTAL_SAMPLES_FIELD_NUMBER: _ClassVar[int]
    attempt: _plan_pb2.Attempt
    keys: _containers.RepeatedCompositeFieldContainer[_secure_aggregation_pb2.SignedMaskingKeys]
    total_samples: int
    def __init__(self, attempt: _Optional[_Union[_plan_pb2.Attempt, _Mapping]] = ..., keys: _Optional[_Iterable[_Union[_secure_aggregation_pb2.SignedMaskingKeys, _Mapping]]] = ..., total_samples: _Optional[int] = ...) -> None: ...

class ShareMasksResponse(_message.Message):
    __slots__ = ("shares",)
    SHARES_FIELD_NUMBER: _ClassVar[int]
    shares: _containers.RepeatedCompositeFieldContainer[_secure_aggregation_pb2.EncryptedShares]
    def __init__(self, shares: _Optional[_Iterable[_Union[_secure_aggregation_pb2.EncryptedShares, _Mapping]]] = ...) -> None: ...

class RevealMasksRequest(_message.Message):
    __slots__ = ("attempt", "present_clusters")
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    PRESENT_CLUSTERS_FIELD_NUMBER: _ClassVar[int]
    attempt: _plan_pb2.Attempt
    present_clusters: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, attempt: _Optional[_Union[_plan_pb2.Attempt, _Mapping]] = ..., present_clusters: _Optional[_Iterable[int]] = ...) -> None: ...

class RevealMasksResponse(_message.Message):
    __slots__ = ("revealed",)
    REVEALED_FIELD_NUMBER: _ClassVar[int]
    revealed: _secure_aggregation_pb2.RevealedShares
    def __init__(self, revealed: _Optional[_Union[_secure_aggregation_pb2.RevealedShares, _Mapping]] = ...) -> None: ...

class EndTrainingRequest(_message.Message):
    __slots__ = ("attempt",)
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    attempt: _plan_pb2.Attempt
    def __init__(self, attempt: _Optional[_Union[_plan_pb2.Attempt, _Mapping]] = ...) -> None: ...

class EndTrainingResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class RunRoundResponse(_message.Message):
    __slots__ = ("progress", "evaluation", "prepared")
    PROGRESS_FIELD_NUMBER: _ClassVar[int]
    EVALUATION_FIELD_NUMBER: _ClassVar[int]
    PREPARED_FIELD_NUMBER: _ClassVar[int]
    progress: _job_pb2.RoundProgress
    evaluation: _job_pb2.EvaluationSums
    prepared: RoundPrepared
    def __init__(self, progress: _Optional[_Union[_job_pb2.RoundProgress, _Mapping]] = ..., evaluation: _Optional[_Union[_job_pb2.EvaluationSums, _Mapping]] = ..., prepared: _Optional[_Union[RoundPrepared, _Mapping]] = ...) -> None: ...

class RoundPrepared(_message.Message):
    __slots__ = ("state", "summary", "candidate_copied")
    STATE_FIELD_NUMBER: _ClassVar[int]
    SUMMARY_FIELD_NUMBER: _ClassVar[int]
    CANDIDATE_COPIED_FIELD_NUMBER: _ClassVar[int]
    state: _plan_pb2.ClusterState
    summary: _job_pb2.RoundSummary
    candidate_copied: bool
    def __init__(self, state: _Optional[_Union[_plan_pb2.ClusterState, _Mapping]] = ..., summary: _Optional[_Union[_job_pb2.RoundSummary, _Mapping]] = ..., candidate_copied: bool = ...) -> None: ...

class RunModelRequest(_message.Message):
    __slots__ = ("start", "chunk")
    START_FIELD_NUMBER: _ClassVar[int]
    CHUNK_FIELD_NUMBER: _ClassVar[int]
    start: RunModelStart
    chunk: bytes
    def __init__(self, start: _Optional[_Union[RunModelStart, _Mapping]] = ..., chunk: _Optional[bytes] = ...) -> None: ...

class RunModelStart(_message.Message):
    __slots__ = ("round", "use")
    ROUND_FIELD_NUMBER: _ClassVar[int]
    USE_FIELD_NUMBER: _ClassVar[int]
    round: RunRoundRequest
    use: _model_use_pb2.ModelUse
    def __init__(self, round: _Optional[_Union[RunRoundRequest, _Mapping]] = ..., use: _Optional[_Union[_model_use_pb2.ModelUse, _Mapping]] = ...) -> None: ...

class RunModelResponse(_message.Message):
    __slots__ = ("output",)
    OUTPUT_FIELD_NUMBER: _ClassVar[int]
    output: _model_use_pb2.ModelOutput
    def __init__(self, output: _Optional[_Union[_model_use_pb2.ModelOutput, _Mapping]] = ...) -> None: ...
