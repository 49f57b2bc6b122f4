from collapipe.v1 import stage_pb2 as _stage_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class JobSpec(_message.Message):
    __slots__ = ("job_id", "config_json")
    JOB_ID_FIELD_NUMBER: _ClassVar[int]
    CONFIG_JSON_FIELD_NUMBER: _ClassVar[int]
    job_id: str
    config_json: str
    def __init__(self, job_id: _Optional[str] = ..., config_json: _Optional[str] = ...) -> None: ...

class BlobSource(_message.Message):
    __slots__ = ("digest", "address")
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    digest: str
    address: str
    def __init__(self, digest: _Optional[str] = ..., address: _Optional[str] = ...) -> None: ...

class RoundProgress(_message.Message):
    __slots__ = ("cluster_index", "steps_done", "local_steps", "loss", "samples_per_second", "stages", "waiting_for", "candidate_copied", "training_began", "moved_bytes", "evaluated_rows")
    CLUSTER_INDEX_FIELD_NUMBER: _ClassVar[int]
    STEPS_DONE_FIELD_NUMBER: _ClassVar[int]
    LOCAL_STEPS_FIELD_NUMBER: _ClassVar[int]
    LOSS_FIELD_NUMBER: _ClassVar[int]
    SAMPLES_PER_SECOND_FIELD_NUMBER: _ClassVar[int]
    STAGES_FIELD_NUMBER: _ClassVar[int]
    WAITING_FOR_FIELD_NUMBER: _ClassVar[int]
    CANDIDATE_COPIED_FIELD_NUMBER: _ClassVar[int]
    TRAINING_BEGAN_FIELD_NUMBER: _ClassVar[int]
    MOVED_BYTES_FIELD_NUMBER: _ClassVar[int]
    EVALUATED_ROWS_FIELD_NUMBER: _ClassVar[int]
    cluster_index: int
    steps_done: int
    local_steps: int
    loss: float
    samples_per_second: float
    stages: _containers.RepeatedCompositeFieldContainer[StageReport]
    waiting_for: str
    candidate_copied: bool
    training_began: bool
    moved_bytes: int
    evaluated_rows: int
    def __init__(self, cluster_index: _Optional[int] = ..., steps_done: _Optional[int] = ..., local_steps: _Optional[int] = ..., loss: _Optional[float] = ..., samples_per_second: _Optional[float] = ..., stages: _Optional[_Iterable[_Union[StageReport, _Mapping]]] = ..., waiting_for: _Optional[str] = ..., candidate_copied: bool = ..., training_began: bool = ..., moved_bytes: _Optional[int] = ..., evaluated_rows: _Optional[int] = ...) -> None: ...

class StageReport(_message.Message):
    __slots__ = ("host_id", "start_unit", "stop_unit", "busy_ratio", "times")
    HOST_ID_FIELD_NUMBER: _ClassVar[int]
    START_UNIT_FIELD_NUMBER: _ClassVar[int]
    STOP_UNIT_FIELD_NUMBER: _ClassVar[int]
    BUSY_RATIO_FIELD_NUMBER: _ClassVar[int]
    TIMES_FIELD_NUMBER: _ClassVar[int]
    host_id: str
    start_unit: int
    stop_unit: int
    busy_ratio: float
    times: _stage_pb2.StageTimes
    def __init__(self, host_id: _Optional[str] = ..., start_unit: _Optional[int] = ..., stop_unit: _Optional[int] = ..., busy_ratio: _Optional[float] = ..., times: _Optional[_Union[_stage_pb2.StageTimes, _Mapping]] = ...) -> None: ...

class EvaluationSums(_message.Message):
    __slots__ = ("sums",)
    class SumsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    SUMS_FIELD_NUMBER: _ClassVar[int]
    sums: _containers.ScalarMap[str, float]
    def __init__(self, sums: _Optional[_Mapping[str, float]] = ...) -> None: ...

class Evaluation(_message.Message):
    __slots__ = ("num_rounds", "metric", "value", "num_rows", "other_metrics", "one_answer", "definitions", "findings")
    class OtherMetricsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    class DefinitionsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    NUM_ROUNDS_FIELD_NUMBER: _ClassVar[int]
    METRIC_FIELD_NUMBER: _ClassVar[int]
    VALUE_FIELD_NUMBER: _ClassVar[int]
    NUM_ROWS_FIELD_NUMBER: _ClassVar[int]
    OTHER_METRICS_FIELD_NUMBER: _ClassVar[int]
    ONE_ANSWER_FIELD_NUMBER: _ClassVar[int]
    DEFINITIONS_FIELD_NUMBER: _ClassVar[int]
    FINDINGS_FIELD_NUMBER: _ClassVar[int]
    num_rounds: int
    metric: str
    value: float
    num_rows: int
    other_metrics: _containers.ScalarMap[str, float]
    one_answer: bool
    definitions: _containers.ScalarMap[str, str]
    findings: _containers.RepeatedCompositeFieldContainer[Finding]
    def __init__(self, num_rounds: _Optional[int] = ..., metric: _Optional[str] = ..., value: _Optional[float] = ..., num_rows: _Optional[int] = ..., other_metrics: _Optional[_Mapping[str, float]] = ..., one_answer: bool = ..., definitions: _Optional[_Mapping[str, str]] = ..., findings: _Optional[_Iterable[_Union[Finding, _Mapping]]] = ...) -> None: ...

class Finding(_message.Message):
    __slots__ = ("is_warning", "place", "what", "remedy")
    IS_WARNING_FIELD_NUMBER: _ClassVar[int]
    PLACE_FIELD_NUMBER: _ClassVar[int]
    WHAT_FIELD_NUMBER: _ClassVar[int]
    REMEDY_FIELD_NUMBER: _ClassVar[int]
    is_warning: bool
    place: str
    what: str
    remedy: str
    def __init__(self, is_warning: bool = ..., place: _Optional[str] = ..., what: _Optional[str] = ..., remedy: _Optional[str] = ...) -> None: ...

class RoundSummary(_message.Message):
    __slots__ = ("losses", "gradient_norms", "training_seconds", "configure_seconds", "gather_seconds", "fetched_bytes", "stages", "evaluation_seconds", "pushed", "fetched", "local_steps")
    LOSSES_FIELD_NUMBER: _ClassVar[int]
    GRADIENT_NORMS_FIELD_NUMBER: _ClassVar[int]
    TRAINING_SECONDS_FIELD_NUMBER: _ClassVar[int]
    CONFIGURE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    GATHER_SECONDS_FIELD_NUMBER: _ClassVar[int]
    FETCHED_BYTES_FIELD_NUMBER: _ClassVar[int]
    STAGES_FIELD_NUMBER: _ClassVar[int]
    EVALUATION_SECONDS_FIELD_NUMBER: _ClassVar[int]
    PUSHED_FIELD_NUMBER: _ClassVar[int]
    FETCHED_FIELD_NUMBER: _ClassVar[int]
    LOCAL_STEPS_FIELD_NUMBER: _ClassVar[int]
    losses: _containers.RepeatedScalarFieldContainer[float]
    gradient_norms: _containers.RepeatedScalarFieldContainer[float]
    training_seconds: float
    configure_seconds: float
    gather_seconds: float
    fetched_bytes: int
    stages: _containers.RepeatedCompositeFieldContainer[StageReport]
    evaluation_seconds: float
    pushed: _containers.RepeatedCompositeFieldContainer[WeightsTransfer]
    fetched: _containers.RepeatedCompositeFieldContainer[WeightsTransfer]
    local_steps: int
    def __init__(self, losses: _Optional[_Iterable[float]] = ..., gradient_norms: _Optional[_Iterable[float]] = ..., training_seconds: _Optional[float] = ..., configure_seconds: _Optional[float] = ..., gather_seconds: _Optional[float] = ..., fetched_bytes: _Optional[int] = ..., stages: _Optional[_Iterable[_Union[StageReport, _Mapping]]] = ..., evaluation_seconds: _Optional[float] = ..., pushed: _Optional[_Iterable[_Union[WeightsTransfer, _Mapping]]] = ..., fetched: _Optional[_Iterable[_Union[WeightsTransfer, _Mapping]]] = ..., local_steps: _Optional[int] = ...) -> None: ...

class WeightsTransfer(_message.Message):
    __slots__ = ("host_id", "bytes", "seconds")
    HOST_ID_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    host_id: str
    bytes: int
    seconds: float
    def __init__(self, host_id: _Optional[str] = ..., bytes: _Optional[int] = ..., seconds: _Optional[float] = ...) -> None: ...
