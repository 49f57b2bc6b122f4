from collapipe.v1 import generation_pb2 as _generation_pb2
from collapipe.v1 import plan_pb2 as _plan_pb2
from collapipe.v1 import secure_aggregation_pb2 as _secure_aggregation_pb2
from collapipe.v1 import tensor_pb2 as _tensor_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class FrameKind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    FRAME_KIND_UNSPECIFIED: _ClassVar[FrameKind]
    FRAME_KIND_FORWARD: _ClassVar[FrameKind]
    FRAME_KIND_BACKWARD: _ClassVar[FrameKind]
    FRAME_KIND_EVALUATE: _ClassVar[FrameKind]
    FRAME_KIND_PREDICTION: _ClassVar[FrameKind]
    FRAME_KIND_GENERATE: _ClassVar[FrameKind]
    FRAME_KIND_END_GENERATION: _ClassVar[FrameKind]
    FRAME_KIND_LABELS: _ClassVar[FrameKind]
FRAME_KIND_UNSPECIFIED: FrameKind
FRAME_KIND_FORWARD: FrameKind
FRAME_KIND_BACKWARD: FrameKind
FRAME_KIND_EVALUATE: FrameKind
FRAME_KIND_PREDICTION: FrameKind
FRAME_KIND_GENERATE: FrameKind
FRAME_KIND_END_GENERATION: FrameKind
FRAME_KIND_LABELS: FrameKind

class RunStageRequest(_message.Message):
    __slots__ = ("configure", "run_step", "run_evaluation", "finish", "run_generation", "labels", "labels_chunk")
    CONFIGURE_FIELD_NUMBER: _ClassVar[int]
    RUN_STEP_FIELD_NUMBER: _ClassVar[int]
    RUN_EVALUATION_FIELD_NUMBER: _ClassVar[int]
    FINISH_FIELD_NUMBER: _ClassVar[int]
    RUN_GENERATION_FIELD_NUMBER: _ClassVar[int]
    LABELS_FIELD_NUMBER: _ClassVar[int]
    LABELS_CHUNK_FIELD_NUMBER: _ClassVar[int]
    configure: ConfigureStage
    run_step: RunStep
    run_evaluation: RunEvaluation
    finish: FinishRound
    run_generation: RunGeneration
    labels: FrameHeader
    labels_chunk: bytes
    def __init__(self, configure: _Optional[_Union[ConfigureStage, _Mapping]] = ..., run_step: _Optional[_Union[RunStep, _Mapping]] = ..., run_evaluation: _Optional[_Union[RunEvaluation, _Mapping]] = ..., finish: _Optional[_Union[FinishRound, _Mapping]] = ..., run_generation: _Optional[_Union[RunGeneration, _Mapping]] = ..., labels: _Optional[_Union[FrameHeader, _Mapping]] = ..., labels_chunk: _Optional[bytes] = ...) -> None: ...

class RunStageResponse(_message.Message):
    __slots__ = ("configured", "step_done", "evaluation_done", "finished", "progress", "failed", "generation_done")
    CONFIGURED_FIELD_NUMBER: _ClassVar[int]
    STEP_DONE_FIELD_NUMBER: _ClassVar[int]
    EVALUATION_DONE_FIELD_NUMBER: _ClassVar[int]
    FINISHED_FIELD_NUMBER: _ClassVar[int]
    PROGRESS_FIELD_NUMBER: _ClassVar[int]
    FAILED_FIELD_NUMBER: _ClassVar[int]
    GENERATION_DONE_FIELD_NUMBER: _ClassVar[int]
    configured: StageConfigured
    step_done: StepDone
    evaluation_done: EvaluationDone
    finished: RoundFinished
    progress: StageProgress
    failed: StageFailed
    generation_done: GenerationDone
    def __init__(self, configured: _Optional[_Union[StageConfigured, _Mapping]] = ..., step_done: _Optional[_Union[StepDone, _Mapping]] = ..., evaluation_done: _Optional[_Union[EvaluationDone, _Mapping]] = ..., finished: _Optional[_Union[RoundFinished, _Mapping]] = ..., progress: _Optional[_Union[StageProgress, _Mapping]] = ..., failed: _Optional[_Union[StageFailed, _Mapping]] = ..., generation_done: _Optional[_Union[GenerationDone, _Mapping]] = ...) -> None: ...

class ConfigureStage(_message.Message):
    __slots__ = ("attempt", "plan", "stage_index", "model", "settings", "units", "sources", "kept_optimizer_digests", "host_cluster", "grant", "privacy", "is_masked", "is_hidden")
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    PLAN_FIELD_NUMBER: _ClassVar[int]
    STAGE_INDEX_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    SETTINGS_FIELD_NUMBER: _ClassVar[int]
    UNITS_FIELD_NUMBER: _ClassVar[int]
    SOURCES_FIELD_NUMBER: _ClassVar[int]
    KEPT_OPTIMIZER_DIGESTS_FIELD_NUMBER: _ClassVar[int]
    HOST_CLUSTER_FIELD_NUMBER: _ClassVar[int]
    GRANT_FIELD_NUMBER: _ClassVar[int]
    PRIVACY_FIELD_NUMBER: _ClassVar[int]
    IS_MASKED_FIELD_NUMBER: _ClassVar[int]
    IS_HIDDEN_FIELD_NUMBER: _ClassVar[int]
    attempt: _plan_pb2.Attempt
    plan: _plan_pb2.Plan
    stage_index: int
    model: _plan_pb2.ModelSpec
    settings: _plan_pb2.SessionSettings
    units: _containers.RepeatedCompositeFieldContainer[_plan_pb2.UnitState]
    sources: _containers.RepeatedCompositeFieldContainer[UnitSource]
    kept_optimizer_digests: _containers.RepeatedScalarFieldContainer[str]
    host_cluster: int
    grant: _plan_pb2.SignedGrant
    privacy: UpdatePrivacy
    is_masked: bool
    is_hidden: bool
    def __init__(self, attempt: _Optional[_Union[_plan_pb2.Attempt, _Mapping]] = ..., plan: _Optional[_Union[_plan_pb2.Plan, _Mapping]] = ..., stage_index: _Optional[int] = ..., model: _Optional[_Union[_plan_pb2.ModelSpec, _Mapping]] = ..., settings: _Optional[_Union[_plan_pb2.SessionSettings, _Mapping]] = ..., units: _Optional[_Iterable[_Union[_plan_pb2.UnitState, _Mapping]]] = ..., sources: _Optional[_Iterable[_Union[UnitSource, _Mapping]]] = ..., kept_optimizer_digests: _Optional[_Iterable[str]] = ..., host_cluster: _Optional[int] = ..., grant: _Optional[_Union[_plan_pb2.SignedGrant, _Mapping]] = ..., privacy: _Optional[_Union[UpdatePrivacy, _Mapping]] = ..., is_masked: bool = ..., is_hidden: bool = ...) -> None: ...

class UpdatePrivacy(_message.Message):
    __slots__ = ("clip_norm", "noise_stddev", "secrets")
    CLIP_NORM_FIELD_NUMBER: _ClassVar[int]
    NOISE_STDDEV_FIELD_NUMBER: _ClassVar[int]
    SECRETS_FIELD_NUMBER: _ClassVar[int]
    clip_norm: float
    noise_stddev: float
    secrets: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, clip_norm: _Optional[float] = ..., noise_stddev: _Optional[float] = ..., secrets: _Optional[_Iterable[bytes]] = ...) -> None: ...

class UnitSource(_message.Message):
    __slots__ = ("unit_index", "weights_addresses", "optimizer_addresses", "frozen_addresses")
    UNIT_INDEX_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_ADDRESSES_FIELD_NUMBER: _ClassVar[int]
    OPTIMIZER_ADDRESSES_FIELD_NUMBER: _ClassVar[int]
    FROZEN_ADDRESSES_FIELD_NUMBER: _ClassVar[int]
    unit_index: int
    weights_addresses: _containers.RepeatedScalarFieldContainer[str]
    optimizer_addresses: _containers.RepeatedScalarFieldContainer[str]
    frozen_addresses: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, unit_index: _Optional[int] = ..., weights_addresses: _Optional[_Iterable[str]] = ..., optimizer_addresses: _Optional[_Iterable[str]] = ..., frozen_addresses: _Optional[_Iterable[str]] = ...) -> None: ...

class StageConfigured(_message.Message):
    __slots__ = ("fetched_bytes", "reused_units", "fetch_seconds")
    FETCHED_BYTES_FIELD_NUMBER: _ClassVar[int]
    REUSED_UNITS_FIELD_NUMBER: _ClassVar[int]
    FETCH_SECONDS_FIELD_NUMBER: _ClassVar[int]
    fetched_bytes: int
    reused_units: int
    fetch_seconds: float
    def __init__(self, fetched_bytes: _Optional[int] = ..., reused_units: _Optional[int] = ..., fetch_seconds: _Optional[float] = ...) -> None: ...

class RunStep(_message.Message):
    __slots__ = ("step_index", "num_micro_batches", "num_targets", "pending_gradient_scale")
    STEP_INDEX_FIELD_NUMBER: _ClassVar[int]
    NUM_MICRO_BATCHES_FIELD_NUMBER: _ClassVar[int]
    NUM_TARGETS_FIELD_NUMBER: _ClassVar[int]
    PENDING_GRADIENT_SCALE_FIELD_NUMBER: _ClassVar[int]
    step_index: int
    num_micro_batches: int
    num_targets: int
    pending_gradient_scale: float
    def __init__(self, step_index: _Optional[int] = ..., num_micro_batches: _Optional[int] = ..., num_targets: _Optional[int] = ..., pending_gradient_scale: _Optional[float] = ...) -> None: ...

class StepDone(_message.Message):
    __slots__ = ("step_index", "squared_gradient_norms", "loss", "times")
    STEP_INDEX_FIELD_NUMBER: _ClassVar[int]
    SQUARED_GRADIENT_NORMS_FIELD_NUMBER: _ClassVar[int]
    LOSS_FIELD_NUMBER: _ClassVar[int]
    TIMES_FIELD_NUMBER: _ClassVar[int]
    step_index: int
    squared_gradient_norms: _containers.RepeatedScalarFieldContainer[float]
    loss: float
    times: StageTimes
    def __init__(self, step_index: _Optional[int] = ..., squared_gradient_norms: _Optional[_Iterable[float]] = ..., loss: _Optional[float] = ..., times: _Optional[_Union[StageTimes, _Mapping]] = ...) -> None: ...

class StageTimes(_message.Message):
    __slots__ = ("forward_seconds", "backward_seconds", "waiting_seconds", "total_seconds")
    FORWARD_SECONDS_FIELD_NUMBER: _ClassVar[int]
    BACKWARD_SECONDS_FIELD_NUMBER: _ClassVar[int]
    WAITING_SECONDS_FIELD_NUMBER: _ClassVar[int]
    TOTAL_SECONDS_FIELD_NUMBER: _ClassVar[int]
    forward_seconds: float
    backward_seconds: float
    waiting_seconds: float
    total_seconds: float
    def __init__(self, forward_seconds: _Optional[float] = ..., backward_seconds: _Optional[float] = ..., waiting_seconds: _Optional[float] = ..., total_seconds: _Optional[float] = ...) -> None: ...

class RunEvaluation(_message.Message):
    __slots__ = ("num_micro_batches", "has_labels")
    NUM_MICRO_BATCHES_FIELD_NUMBER: _ClassVar[int]
    HAS_LABELS_FIELD_NUMBER: _ClassVar[int]
    num_micro_batches: int
    has_labels: bool
    def __init__(self, num_micro_batches: _Optional[int] = ..., has_labels: bool = ...) -> None: ...

class EvaluationDone(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class RunGeneration(_message.Message):
    __slots__ = ("num_sequences", "options")
    NUM_SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    OPTIONS_FIELD_NUMBER: _ClassVar[int]
    num_sequences: int
    options: _generation_pb2.GenerationOptions
    def __init__(self, num_sequences: _Optional[int] = ..., options: _Optional[_Union[_generation_pb2.GenerationOptions, _Mapping]] = ...) -> None: ...

class GenerationDone(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class FinishRound(_message.Message):
    __slots__ = ("pending_gradient_scale", "edge_address", "num_samples", "edge_host_id", "masks", "total_samples")
    PENDING_GRADIENT_SCALE_FIELD_NUMBER: _ClassVar[int]
    EDGE_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    NUM_SAMPLES_FIELD_NUMBER: _ClassVar[int]
    EDGE_HOST_ID_FIELD_NUMBER: _ClassVar[int]
    MASKS_FIELD_NUMBER: _ClassVar[int]
    TOTAL_SAMPLES_FIELD_NUMBER: _ClassVar[int]
    pending_gradient_scale: float
    edge_address: str
    num_samples: int
    edge_host_id: str
    masks: _containers.RepeatedCompositeFieldContainer[_secure_aggregation_pb2.UnitMasks]
    total_samples: int
    def __init__(self, pending_gradient_scale: _Optional[float] = ..., edge_address: _Optional[str] = ..., num_samples: _Optional[int] = ..., edge_host_id: _Optional[str] = ..., masks: _Optional[_Iterable[_Union[_secure_aggregation_pb2.UnitMasks, _Mapping]]] = ..., total_samples: _Optional[int] = ...) -> None: ...

class RoundFinished(_message.Message):
    __slots__ = ("units", "pushed_bytes", "push_seconds")
    UNITS_FIELD_NUMBER: _ClassVar[int]
    PUSHED_BYTES_FIELD_NUMBER: _ClassVar[int]
    PUSH_SECONDS_FIELD_NUMBER: _ClassVar[int]
    units: _containers.RepeatedCompositeFieldContainer[_plan_pb2.UnitState]
    pushed_bytes: int
    push_seconds: float
    def __init__(self, units: _Optional[_Iterable[_Union[_plan_pb2.UnitState, _Mapping]]] = ..., pushed_bytes: _Optional[int] = ..., push_seconds: _Optional[float] = ...) -> None: ...

class StageProgress(_message.Message):
    __slots__ = ("waiting_for", "received_bytes", "moved_bytes", "is_idle")
    WAITING_FOR_FIELD_NUMBER: _ClassVar[int]
    RECEIVED_BYTES_FIELD_NUMBER: _ClassVar[int]
    MOVED_BYTES_FIELD_NUMBER: _ClassVar[int]
    IS_IDLE_FIELD_NUMBER: _ClassVar[int]
    waiting_for: str
    received_bytes: int
    moved_bytes: int
    is_idle: bool
    def __init__(self, waiting_for: _Optional[str] = ..., received_bytes: _Optional[int] = ..., moved_bytes: _Optional[int] = ..., is_idle: bool = ...) -> None: ...

class StageFailed(_message.Message):
    __slots__ = ("message", "blamed_host_id", "diverged")
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    BLAMED_HOST_ID_FIELD_NUMBER: _ClassVar[int]
    DIVERGED_FIELD_NUMBER: _ClassVar[int]
    message: str
    blamed_host_id: str
    diverged: bool
    def __init__(self, message: _Optional[str] = ..., blamed_host_id: _Optional[str] = ..., diverged: bool = ...) -> None: ...

class ExchangeActivationsRequest(_message.Message):
    __slots__ = ("open", "frame", "chunk")
    OPEN_FIELD_NUMBER: _ClassVar[int]
    FRAME_FIELD_NUMBER: _ClassVar[int]
    CHUNK_FIELD_NUMBER: _ClassVar[int]
    open: OpenLink
    frame: FrameHeader
    chunk: bytes
    def __init__(self, open: _Optional[_Union[OpenLink, _Mapping]] = ..., frame: _Optional[_Union[FrameHeader, _Mapping]] = ..., chunk: _Optional[bytes] = ...) -> None: ...

class ExchangeActivationsResponse(_message.Message):
    __slots__ = ("opened", "frame", "chunk")
    OPENED_FIELD_NUMBER: _ClassVar[int]
    FRAME_FIELD_NUMBER: _ClassVar[int]
    CHUNK_FIELD_NUMBER: _ClassVar[int]
    opened: LinkOpened
    frame: FrameHeader
    chunk: bytes
    def __init__(self, opened: _Optional[_Union[LinkOpened, _Mapping]] = ..., frame: _Optional[_Union[FrameHeader, _Mapping]] = ..., chunk: _Optional[bytes] = ...) -> None: ...

class OpenLink(_message.Message):
    __slots__ = ("attempt", "cluster_index", "stage_index")
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    CLUSTER_INDEX_FIELD_NUMBER: _ClassVar[int]
    STAGE_INDEX_FIELD_NUMBER: _ClassVar[int]
    attempt: _plan_pb2.Attempt
    cluster_index: int
    stage_index: int
    def __init__(self, attempt: _Optional[_Union[_plan_pb2.Attempt, _Mapping]] = ..., cluster_index: _Optional[int] = ..., stage_index: _Optional[int] = ...) -> None: ...

class LinkOpened(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class FrameHeader(_message.Message):
    __slots__ = ("kind", "step_index", "micro_batch", "tensors", "sent_at_seconds", "slice_index")
    KIND_FIELD_NUMBER: _ClassVar[int]
    STEP_INDEX_FIELD_NUMBER: _ClassVar[int]
    MICRO_BATCH_FIELD_NUMBER: _ClassVar[int]
    TENSORS_FIELD_NUMBER: _ClassVar[int]
    SENT_AT_SECONDS_FIELD_NUMBER: _ClassVar[int]
    SLICE_INDEX_FIELD_NUMBER: _ClassVar[int]
    kind: FrameKind
    step_index: int
    micro_batch: int
    tensors: _containers.RepeatedCompositeFieldContainer[_tensor_pb2.TensorHeader]
    sent_at_seconds: float
    slice_index: int
    def __init__(self, kind: _Optional[_Union[FrameKind, str]] = ..., step_index: _Optional[int] = ..., micro_batch: _Optional[int] = ..., tensors: _Optional[_Iterable[_Union[_tensor_pb2.TensorHeader, _Mapping]]] = ..., sent_at_seconds: _Optional[float] = ..., slice_index: _Optional[int] = ...) -> None: ...
