from collapipe.v1 import tensor_pb2 as _tensor_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Attempt(_message.Message):
    __slots__ = ("job_id", "round_index", "attempt", "plan_id")
    JOB_ID_FIELD_NUMBER: _ClassVar[int]
    ROUND_INDEX_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    PLAN_ID_FIELD_NUMBER: _ClassVar[int]
    job_id: str
    round_index: int
    attempt: int
    plan_id: str
    def __init__(self, job_id: _Optional[str] = ..., round_index: _Optional[int] = ..., attempt: _Optional[int] = ..., plan_id: _Optional[str] = ...) -> None: ...

class Stage(_message.Message):
    __slots__ = ("host_id", "address", "start_unit", "stop_unit", "in_flight", "upload_bandwidth_hz", "upload_transmit_power_watts", "recompute")
    HOST_ID_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    START_UNIT_FIELD_NUMBER: _ClassVar[int]
    STOP_UNIT_FIELD_NUMBER: _ClassVar[int]
    IN_FLIGHT_FIELD_NUMBER: _ClassVar[int]
    UPLOAD_BANDWIDTH_HZ_FIELD_NUMBER: _ClassVar[int]
    UPLOAD_TRANSMIT_POWER_WATTS_FIELD_NUMBER: _ClassVar[int]
    RECOMPUTE_FIELD_NUMBER: _ClassVar[int]
    host_id: str
    address: str
    start_unit: int
    stop_unit: int
    in_flight: int
    upload_bandwidth_hz: float
    upload_transmit_power_watts: float
    recompute: bool
    def __init__(self, host_id: _Optional[str] = ..., address: _Optional[str] = ..., start_unit: _Optional[int] = ..., stop_unit: _Optional[int] = ..., in_flight: _Optional[int] = ..., upload_bandwidth_hz: _Optional[float] = ..., upload_transmit_power_watts: _Optional[float] = ..., recompute: bool = ...) -> None: ...

class LinkPlan(_message.Message):
    __slots__ = ("codec", "rate_limit_bps", "transmit_power_watts", "bandwidth_hz", "return_transmit_power_watts")
    CODEC_FIELD_NUMBER: _ClassVar[int]
    RATE_LIMIT_BPS_FIELD_NUMBER: _ClassVar[int]
    TRANSMIT_POWER_WATTS_FIELD_NUMBER: _ClassVar[int]
    BANDWIDTH_HZ_FIELD_NUMBER: _ClassVar[int]
    RETURN_TRANSMIT_POWER_WATTS_FIELD_NUMBER: _ClassVar[int]
    codec: _tensor_pb2.Codec
    rate_limit_bps: int
    transmit_power_watts: float
    bandwidth_hz: float
    return_transmit_power_watts: float
    def __init__(self, codec: _Optional[_Union[_tensor_pb2.Codec, str]] = ..., rate_limit_bps: _Optional[int] = ..., transmit_power_watts: _Optional[float] = ..., bandwidth_hz: _Optional[float] = ..., return_transmit_power_watts: _Optional[float] = ...) -> None: ...

class Plan(_message.Message):
    __slots__ = ("plan_id", "cluster_index", "stages", "num_micro_batches", "links", "upload_codec", "num_slices")
    PLAN_ID_FIELD_NUMBER: _ClassVar[int]
    CLUSTER_INDEX_FIELD_NUMBER: _ClassVar[int]
    STAGES_FIELD_NUMBER: _ClassVar[int]
    NUM_MICRO_BATCHES_FIELD_NUMBER: _ClassVar[int]
    LINKS_FIELD_NUMBER: _ClassVar[int]
    UPLOAD_CODEC_FIELD_NUMBER: _ClassVar[int]
    NUM_SLICES_FIELD_NUMBER: _ClassVar[int]
    plan_id: str
    cluster_index: int
    stages: _containers.RepeatedCompositeFieldContainer[Stage]
    num_micro_batches: int
    links: _containers.RepeatedCompositeFieldContainer[LinkPlan]
    upload_codec: str
    num_slices: int
    def __init__(self, plan_id: _Optional[str] = ..., cluster_index: _Optional[int] = ..., stages: _Optional[_Iterable[_Union[Stage, _Mapping]]] = ..., num_micro_batches: _Optional[int] = ..., links: _Optional[_Iterable[_Union[LinkPlan, _Mapping]]] = ..., upload_codec: _Optional[str] = ..., num_slices: _Optional[int] = ...) -> None: ...

class Grant(_message.Message):
    __slots__ = ("attempt", "plan", "host_cluster", "edge_host_id", "model_sha256", "number", "settings", "edge_address", "previous_addresses")
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    PLAN_FIELD_NUMBER: _ClassVar[int]
    HOST_CLUSTER_FIELD_NUMBER: _ClassVar[int]
    EDGE_HOST_ID_FIELD_NUMBER: _ClassVar[int]
    MODEL_SHA256_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    SETTINGS_FIELD_NUMBER: _ClassVar[int]
    EDGE_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    PREVIOUS_ADDRESSES_FIELD_NUMBER: _ClassVar[int]
    attempt: Attempt
    plan: Plan
    host_cluster: int
    edge_host_id: str
    model_sha256: bytes
    number: int
    settings: SessionSettings
    edge_address: str
    previous_addresses: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, attempt: _Optional[_Union[Attempt, _Mapping]] = ..., plan: _Optional[_Union[Plan, _Mapping]] = ..., host_cluster: _Optional[int] = ..., edge_host_id: _Optional[str] = ..., model_sha256: _Optional[bytes] = ..., number: _Optional[int] = ..., settings: _Optional[_Union[SessionSettings, _Mapping]] = ..., edge_address: _Optional[str] = ..., previous_addresses: _Optional[_Iterable[str]] = ...) -> None: ...

class SessionSettings(_message.Message):
    __slots__ = ("training_json", "seed", "step_index", "total_steps", "silence_seconds", "max_length", "is_use")
    TRAINING_JSON_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    STEP_INDEX_FIELD_NUMBER: _ClassVar[int]
    TOTAL_STEPS_FIELD_NUMBER: _ClassVar[int]
    SILENCE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    MAX_LENGTH_FIELD_NUMBER: _ClassVar[int]
    IS_USE_FIELD_NUMBER: _ClassVar[int]
    training_json: str
    seed: int
    step_index: int
    total_steps: int
    silence_seconds: float
    max_length: int
    is_use: bool
    def __init__(self, training_json: _Optional[str] = ..., seed: _Optional[int] = ..., step_index: _Optional[int] = ..., total_steps: _Optional[int] = ..., silence_seconds: _Optional[float] = ..., max_length: _Optional[int] = ..., is_use: bool = ...) -> None: ...

class SignedGrant(_message.Message):
    __slots__ = ("grant", "signature", "certificate")
    GRANT_FIELD_NUMBER: _ClassVar[int]
    SIGNATURE_FIELD_NUMBER: _ClassVar[int]
    CERTIFICATE_FIELD_NUMBER: _ClassVar[int]
    grant: bytes
    signature: bytes
    certificate: bytes
    def __init__(self, grant: _Optional[bytes] = ..., signature: _Optional[bytes] = ..., certificate: _Optional[bytes] = ...) -> None: ...

class UnitState(_message.Message):
    __slots__ = ("unit_index", "weights_digest", "optimizer_digest", "frozen_digest", "largest_change")
    UNIT_INDEX_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_DIGEST_FIELD_NUMBER: _ClassVar[int]
    OPTIMIZER_DIGEST_FIELD_NUMBER: _ClassVar[int]
    FROZEN_DIGEST_FIELD_NUMBER: _ClassVar[int]
    LARGEST_CHANGE_FIELD_NUMBER: _ClassVar[int]
    unit_index: int
    weights_digest: str
    optimizer_digest: str
    frozen_digest: str
    largest_change: float
    def __init__(self, unit_index: _Optional[int] = ..., weights_digest: _Optional[str] = ..., optimizer_digest: _Optional[str] = ..., frozen_digest: _Optional[str] = ..., largest_change: _Optional[float] = ...) -> None: ...

class DataCursor(_message.Message):
    __slots__ = ("epoch", "offset", "num_rows")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    NUM_ROWS_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    offset: int
    num_rows: int
    def __init__(self, epoch: _Optional[int] = ..., offset: _Optional[int] = ..., num_rows: _Optional[int] = ...) -> None: ...

class ClusterState(_message.Message):
    __slots__ = ("cluster_index", "units", "cursor", "num_samples", "step_index")
    CLUSTER_INDEX_FIELD_NUMBER: _ClassVar[int]
    UNITS_FIELD_NUMBER: _ClassVar[int]
    CURSOR_FIELD_NUMBER: _ClassVar[int]
    NUM_SAMPLES_FIELD_NUMBER: _ClassVar[int]
    STEP_INDEX_FIELD_NUMBER: _ClassVar[int]
    cluster_index: int
    units: _containers.RepeatedCompositeFieldContainer[UnitState]
    cursor: DataCursor
    num_samples: int
    step_index: int
    def __init__(self, cluster_index: _Optional[int] = ..., units: _Optional[_Iterable[_Union[UnitState, _Mapping]]] = ..., cursor: _Optional[_Union[DataCursor, _Mapping]] = ..., num_samples: _Optional[int] = ..., step_index: _Optional[int] = ...) -> None: ...

class Commit(_message.Message):
    __slots__ = ("job_id", "num_rounds", "global_units", "clusters", "attempt", "restore_point", "candidate", "history", "anew_since", "late_clusters")
    JOB_ID_FIELD_NUMBER: _ClassVar[int]
    NUM_ROUNDS_FIELD_NUMBER: _ClassVar[int]
    GLOBAL_UNITS_FIELD_NUMBER: _ClassVar[int]
    CLUSTERS_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    RESTORE_POINT_FIELD_NUMBER: _ClassVar[int]
    CANDIDATE_FIELD_NUMBER: _ClassVar[int]
    HISTORY_FIELD_NUMBER: _ClassVar[int]
    ANEW_SINCE_FIELD_NUMBER: _ClassVar[int]
    LATE_CLUSTERS_FIELD_NUMBER: _ClassVar[int]
    job_id: str
    num_rounds: int
    global_units: _containers.RepeatedCompositeFieldContainer[UnitState]
    clusters: _containers.RepeatedCompositeFieldContainer[ClusterState]
    attempt: int
    restore_point: Commit
    candidate: Commit
    history: _containers.RepeatedCompositeFieldContainer[Commit]
    anew_since: int
    late_clusters: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, job_id: _Optional[str] = ..., num_rounds: _Optional[int] = ..., global_units: _Optional[_Iterable[_Union[UnitState, _Mapping]]] = ..., clusters: _Optional[_Iterable[_Union[ClusterState, _Mapping]]] = ..., attempt: _Optional[int] = ..., restore_point: _Optional[_Union[Commit, _Mapping]] = ..., candidate: _Optional[_Union[Commit, _Mapping]] = ..., history: _Optional[_Iterable[_Union[Commit, _Mapping]]] = ..., anew_since: _Optional[int] = ..., late_clusters: _Optional[_Iterable[int]] = ...) -> None: ...

class ModelSpec(_message.Message):
    __slots__ = ("family", "task", "config_json", "pretrained")
    FAMILY_FIELD_NUMBER: _ClassVar[int]
    TASK_FIELD_NUMBER: _ClassVar[int]
    CONFIG_JSON_FIELD_NUMBER: _ClassVar[int]
    PRETRAINED_FIELD_NUMBER: _ClassVar[int]
    family: str
    task: str
    config_json: str
    pretrained: str
    def __init__(self, family: _Optional[str] = ..., task: _Optional[str] = ..., config_json: _Optional[str] = ..., pretrained: _Optional[str] = ...) -> None: ...
