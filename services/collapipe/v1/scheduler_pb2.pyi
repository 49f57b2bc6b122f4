import datetime

from collapipe.v1 import enrollment_pb2 as _enrollment_pb2
from collapipe.v1 import job_pb2 as _job_pb2
from collapipe.v1 import model_use_pb2 as _model_use_pb2
from collapipe.v1 import plan_pb2 as _plan_pb2
from collapipe.v1 import trace_pb2 as _trace_pb2
from google.protobuf import duration_pb2 as _duration_pb2
from google.protobuf import timestamp_pb2 as _timestamp_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class HostRole(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    HOST_ROLE_UNSPECIFIED: _ClassVar[HostRole]
    HOST_ROLE_DEVICE_AGENT: _ClassVar[HostRole]
    HOST_ROLE_CONTROL_UNIT: _ClassVar[HostRole]
    HOST_ROLE_EDGE_SERVER: _ClassVar[HostRole]

class JobState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    JOB_STATE_UNSPECIFIED: _ClassVar[JobState]
    JOB_STATE_QUEUED: _ClassVar[JobState]
    JOB_STATE_PREPARING: _ClassVar[JobState]
    JOB_STATE_RUNNING: _ClassVar[JobState]
    JOB_STATE_SUCCEEDED: _ClassVar[JobState]
    JOB_STATE_FAILED: _ClassVar[JobState]
    JOB_STATE_CANCELLED: _ClassVar[JobState]
    JOB_STATE_UNREADABLE: _ClassVar[JobState]

class IncidentCode(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    INCIDENT_CODE_UNSPECIFIED: _ClassVar[IncidentCode]
    INCIDENT_CODE_HOST_LOST: _ClassVar[IncidentCode]
    INCIDENT_CODE_HOST_LEFT_OUT: _ClassVar[IncidentCode]
    INCIDENT_CODE_HOST_BACK: _ClassVar[IncidentCode]
    INCIDENT_CODE_ATTEMPT_FAILED: _ClassVar[IncidentCode]
    INCIDENT_CODE_WAITING_FOR_HOSTS: _ClassVar[IncidentCode]
    INCIDENT_CODE_HOSTS_CHANGED: _ClassVar[IncidentCode]
    INCIDENT_CODE_ROUNDS_REPEATED: _ClassVar[IncidentCode]
    INCIDENT_CODE_PLAN_CHANGED: _ClassVar[IncidentCode]
    INCIDENT_CODE_RECOVERED: _ClassVar[IncidentCode]
    INCIDENT_CODE_SCHEDULER_RESTARTED: _ClassVar[IncidentCode]
    INCIDENT_CODE_JOB_GIVEN_UP: _ClassVar[IncidentCode]
    INCIDENT_CODE_UNUSUAL_CHANGE: _ClassVar[IncidentCode]

class WarningCode(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    WARNING_CODE_UNSPECIFIED: _ClassVar[WarningCode]
    WARNING_CODE_LONG_WARM_UP: _ClassVar[WarningCode]
    WARNING_CODE_FEW_ROWS: _ClassVar[WarningCode]
    WARNING_CODE_ONE_CLASS: _ClassVar[WarningCode]
    WARNING_CODE_FLAT_LOSS: _ClassVar[WarningCode]
    WARNING_CODE_WAITING_DEVICE: _ClassVar[WarningCode]
    WARNING_CODE_SLOW_EMULATION: _ClassVar[WarningCode]
    WARNING_CODE_RANDOM_BASE: _ClassVar[WarningCode]
HOST_ROLE_UNSPECIFIED: HostRole
HOST_ROLE_DEVICE_AGENT: HostRole
HOST_ROLE_CONTROL_UNIT: HostRole
HOST_ROLE_EDGE_SERVER: HostRole
JOB_STATE_UNSPECIFIED: JobState
JOB_STATE_QUEUED: JobState
JOB_STATE_PREPARING: JobState
JOB_STATE_RUNNING: JobState
JOB_STATE_SUCCEEDED: JobState
JOB_STATE_FAILED: JobState
JOB_STATE_CANCELLED: JobState
JOB_STATE_UNREADABLE: JobState
INCIDENT_CODE_UNSPECIFIED: IncidentCode
INCIDENT_CODE_HOST_LOST: IncidentCode
INCIDENT_CODE_HOST_LEFT_OUT: IncidentCode
INCIDENT_CODE_HOST_BACK: IncidentCode
INCIDENT_CODE_ATTEMPT_FAILED: IncidentCode
INCIDENT_CODE_WAITING_FOR_HOSTS: IncidentCode
INCIDENT_CODE_HOSTS_CHANGED: IncidentCode
INCIDENT_CODE_ROUNDS_REPEATED: IncidentCode
INCIDENT_CODE_PLAN_CHANGED: IncidentCode
INCIDENT_CODE_RECOVERED: IncidentCode
INCIDENT_CODE_SCHEDULER_RESTARTED: IncidentCode
INCIDENT_CODE_JOB_GIVEN_UP: IncidentCode
INCIDENT_CODE_UNUSUAL_CHANGE: IncidentCode
WARNING_CODE_UNSPECIFIED: WarningCode
WARNING_CODE_LONG_WARM_UP: WarningCode
WARNING_CODE_FEW_ROWS: WarningCode
WARNING_CODE_ONE_CLASS: WarningCode
WARNING_CODE_FLAT_LOSS: WarningCode
WARNING_CODE_WAITING_DEVICE: WarningCode
WARNING_CODE_SLOW_EMULATION: WarningCode
WARNING_CODE_RANDOM_BASE: WarningCode

class Host(_message.Message):
    __slots__ = ("host_id", "role", "address", "cluster_index", "incarnation", "memory_bytes", "speed", "metrics_address", "energy_budget_joules", "busy_watts", "max_transmit_watts", "idle_watts")
    HOST_ID_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    CLUSTER_INDEX_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    MEMORY_BYTES_FIELD_NUMBER: _ClassVar[int]
    SPEED_FIELD_NUMBER: _ClassVar[int]
    METRICS_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    ENERGY_BUDGET_JOULES_FIELD_NUMBER: _ClassVar[int]
    BUSY_WATTS_FIELD_NUMBER: _ClassVar[int]
    MAX_TRANSMIT_WATTS_FIELD_NUMBER: _ClassVar[int]
    IDLE_WATTS_FIELD_NUMBER: _ClassVar[int]
    host_id: str
    role: HostRole
    address: str
    cluster_index: int
    incarnation: str
    memory_bytes: int
    speed: float
    metrics_address: str
    energy_budget_joules: float
    busy_watts: float
    max_transmit_watts: float
    idle_watts: float
    def __init__(self, host_id: _Optional[str] = ..., role: _Optional[_Union[HostRole, str]] = ..., address: _Optional[str] = ..., cluster_index: _Optional[int] = ..., incarnation: _Optional[str] = ..., memory_bytes: _Optional[int] = ..., speed: _Optional[float] = ..., metrics_address: _Optional[str] = ..., energy_budget_joules: _Optional[float] = ..., busy_watts: _Optional[float] = ..., max_transmit_watts: _Optional[float] = ..., idle_watts: _Optional[float] = ...) -> None: ...

class RegisterHostRequest(_message.Message):
    __slots__ = ("host",)
    HOST_FIELD_NUMBER: _ClassVar[int]
    host: Host
    def __init__(self, host: _Optional[_Union[Host, _Mapping]] = ...) -> None: ...

class RegisterHostResponse(_message.Message):
    __slots__ = ("heartbeat_interval", "least_grant", "revoked_keys", "protocol")
    HEARTBEAT_INTERVAL_FIELD_NUMBER: _ClassVar[int]
    LEAST_GRANT_FIELD_NUMBER: _ClassVar[int]
    REVOKED_KEYS_FIELD_NUMBER: _ClassVar[int]
    PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    heartbeat_interval: _duration_pb2.Duration
    least_grant: int
    revoked_keys: _enrollment_pb2.SignedRevokedKeys
    protocol: _enrollment_pb2.ProtocolVersions
    def __init__(self, heartbeat_interval: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., least_grant: _Optional[int] = ..., revoked_keys: _Optional[_Union[_enrollment_pb2.SignedRevokedKeys, _Mapping]] = ..., protocol: _Optional[_Union[_enrollment_pb2.ProtocolVersions, _Mapping]] = ...) -> None: ...

class HeartbeatRequest(_message.Message):
    __slots__ = ("host_id", "incarnation", "num_deletions", "revoked_keys_sha256", "unshaped")
    HOST_ID_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    NUM_DELETIONS_FIELD_NUMBER: _ClassVar[int]
    REVOKED_KEYS_SHA256_FIELD_NUMBER: _ClassVar[int]
    UNSHAPED_FIELD_NUMBER: _ClassVar[int]
    host_id: str
    incarnation: str
    num_deletions: int
    revoked_keys_sha256: bytes
    unshaped: str
    def __init__(self, host_id: _Optional[str] = ..., incarnation: _Optional[str] = ..., num_deletions: _Optional[int] = ..., revoked_keys_sha256: _Optional[bytes] = ..., unshaped: _Optional[str] = ...) -> None: ...

class HeartbeatResponse(_message.Message):
    __slots__ = ("deleted_job_ids", "num_deletions", "heartbeat_interval", "revoked_keys", "least_grant")
    DELETED_JOB_IDS_FIELD_NUMBER: _ClassVar[int]
    NUM_DELETIONS_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_INTERVAL_FIELD_NUMBER: _ClassVar[int]
    REVOKED_KEYS_FIELD_NUMBER: _ClassVar[int]
    LEAST_GRANT_FIELD_NUMBER: _ClassVar[int]
    deleted_job_ids: _containers.RepeatedScalarFieldContainer[str]
    num_deletions: int
    heartbeat_interval: _duration_pb2.Duration
    revoked_keys: _enrollment_pb2.SignedRevokedKeys
    least_grant: int
    def __init__(self, deleted_job_ids: _Optional[_Iterable[str]] = ..., num_deletions: _Optional[int] = ..., heartbeat_interval: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., revoked_keys: _Optional[_Union[_enrollment_pb2.SignedRevokedKeys, _Mapping]] = ..., least_grant: _Optional[int] = ...) -> None: ...

class ListHostsRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListHostsResponse(_message.Message):
    __slots__ = ("hosts",)
    HOSTS_FIELD_NUMBER: _ClassVar[int]
    hosts: _containers.RepeatedCompositeFieldContainer[HostStatus]
    def __init__(self, hosts: _Optional[_Iterable[_Union[HostStatus, _Mapping]]] = ...) -> None: ...

class HostStatus(_message.Message):
    __slots__ = ("host", "alive", "last_seen", "suspicion", "suspected_until", "refusal", "twin_address", "unshaped")
    HOST_FIELD_NUMBER: _ClassVar[int]
    ALIVE_FIELD_NUMBER: _ClassVar[int]
    LAST_SEEN_FIELD_NUMBER: _ClassVar[int]
    SUSPICION_FIELD_NUMBER: _ClassVar[int]
    SUSPECTED_UNTIL_FIELD_NUMBER: _ClassVar[int]
    REFUSAL_FIELD_NUMBER: _ClassVar[int]
    TWIN_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    UNSHAPED_FIELD_NUMBER: _ClassVar[int]
    host: Host
    alive: bool
    last_seen: _timestamp_pb2.Timestamp
    suspicion: str
    suspected_until: _timestamp_pb2.Timestamp
    refusal: str
    twin_address: str
    unshaped: str
    def __init__(self, host: _Optional[_Union[Host, _Mapping]] = ..., alive: bool = ..., last_seen: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., suspicion: _Optional[str] = ..., suspected_until: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., refusal: _Optional[str] = ..., twin_address: _Optional[str] = ..., unshaped: _Optional[str] = ...) -> None: ...

class SubmitJobRequest(_message.Message):
    __slots__ = ("config_json", "resume")
    CONFIG_JSON_FIELD_NUMBER: _ClassVar[int]
    RESUME_FIELD_NUMBER: _ClassVar[int]
    config_json: str
    resume: bool
    def __init__(self, config_json: _Optional[str] = ..., resume: bool = ...) -> None: ...

class SubmitJobResponse(_message.Message):
    __slots__ = ("job_id",)
    JOB_ID_FIELD_NUMBER: _ClassVar[int]
    job_id: str
    def __init__(self, job_id: _Optional[str] = ...) -> None: ...

class CheckResumeRequest(_message.Message):
    __slots__ = ("config_json",)
    CONFIG_JSON_FIELD_NUMBER: _ClassVar[int]
    config_json: str
    def __init__(self, config_json: _Optional[str] = ...) -> None: ...

class CheckResumeResponse(_message.Message):
    __slots__ = ("job", "num_rounds_restorable")
    JOB_FIELD_NUMBER: _ClassVar[int]
    NUM_ROUNDS_RESTORABLE_FIELD_NUMBER: _ClassVar[int]
    job: JobStatus
    num_rounds_restorable: int
    def __init__(self, job: _Optional[_Union[JobStatus, _Mapping]] = ..., num_rounds_restorable: _Optional[int] = ...) -> None: ...

class WatchJobRequest(_message.Message):
    __slots__ = ("job_id", "log_id", "after")
    JOB_ID_FIELD_NUMBER: _ClassVar[int]
    LOG_ID_FIELD_NUMBER: _ClassVar[int]
    AFTER_FIELD_NUMBER: _ClassVar[int]
    job_id: str
    log_id: str
    after: int
    def __init__(self, job_id: _Optional[str] = ..., log_id: _Optional[str] = ..., after: _Optional[int] = ...) -> None: ...

class GetJobSnapshotRequest(_message.Message):
    __slots__ = ("job_id", "clusters")
    JOB_ID_FIELD_NUMBER: _ClassVar[int]
    CLUSTERS_FIELD_NUMBER: _ClassVar[int]
    job_id: str
    clusters: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, job_id: _Optional[str] = ..., clusters: _Optional[_Iterable[int]] = ...) -> None: ...

class GetJobSnapshotResponse(_message.Message):
    __slots__ = ("snapshot_json",)
    SNAPSHOT_JSON_FIELD_NUMBER: _ClassVar[int]
    snapshot_json: str
    def __init__(self, snapshot_json: _Optional[str] = ...) -> None: ...

class WatchJobResponse(_message.Message):
    __slots__ = ("elapsed_seconds", "status", "round_started", "progress", "evaluation", "round_committed", "incident", "data_note", "warning", "log_id", "number", "batch")
    ELAPSED_SECONDS_FIELD_NUMBER: _ClassVar[int]
    STATUS_FIELD_NUMBER: _ClassVar[int]
    ROUND_STARTED_FIELD_NUMBER: _ClassVar[int]
    PROGRESS_FIELD_NUMBER: _ClassVar[int]
    EVALUATION_FIELD_NUMBER: _ClassVar[int]
    ROUND_COMMITTED_FIELD_NUMBER: _ClassVar[int]
    INCIDENT_FIELD_NUMBER: _ClassVar[int]
    DATA_NOTE_FIELD_NUMBER: _ClassVar[int]
    WARNING_FIELD_NUMBER: _ClassVar[int]
    LOG_ID_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    BATCH_FIELD_NUMBER: _ClassVar[int]
    elapsed_seconds: float
    status: JobStatus
    round_started: RoundStarted
    progress: _job_pb2.RoundProgress
    evaluation: _job_pb2.Evaluation
    round_committed: RoundCommitted
    incident: Incident
    data_note: DataNote
    warning: JobWarning
    log_id: str
    number: int
    batch: _containers.RepeatedCompositeFieldContainer[WatchJobResponse]
    def __init__(self, elapsed_seconds: _Optional[float] = ..., status: _Optional[_Union[JobStatus, _Mapping]] = ..., round_started: _Optional[_Union[RoundStarted, _Mapping]] = ..., progress: _Optional[_Union[_job_pb2.RoundProgress, _Mapping]] = ..., evaluation: _Optional[_Union[_job_pb2.Evaluation, _Mapping]] = ..., round_committed: _Optional[_Union[RoundCommitted, _Mapping]] = ..., incident: _Optional[_Union[Incident, _Mapping]] = ..., data_note: _Optional[_Union[DataNote, _Mapping]] = ..., warning: _Optional[_Union[JobWarning, _Mapping]] = ..., log_id: _Optional[str] = ..., number: _Optional[int] = ..., batch: _Optional[_Iterable[_Union[WatchJobResponse, _Mapping]]] = ...) -> None: ...

class JobStatus(_message.Message):
    __slots__ = ("job_id", "state", "message", "num_rounds_committed", "num_rounds", "name", "evaluation", "submitted_at", "ended_at", "trouble", "stored_bytes", "owner", "privacy_loss")
    JOB_ID_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    NUM_ROUNDS_COMMITTED_FIELD_NUMBER: _ClassVar[int]
    NUM_ROUNDS_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    EVALUATION_FIELD_NUMBER: _ClassVar[int]
    SUBMITTED_AT_FIELD_NUMBER: _ClassVar[int]
    ENDED_AT_FIELD_NUMBER: _ClassVar[int]
    TROUBLE_FIELD_NUMBER: _ClassVar[int]
    STORED_BYTES_FIELD_NUMBER: _ClassVar[int]
    OWNER_FIELD_NUMBER: _ClassVar[int]
    PRIVACY_LOSS_FIELD_NUMBER: _ClassVar[int]
    job_id: str
    state: JobState
    message: str
    num_rounds_committed: int
    num_rounds: int
    name: str
    evaluation: _job_pb2.Evaluation
    submitted_at: _timestamp_pb2.Timestamp
    ended_at: _timestamp_pb2.Timestamp
    trouble: JobTrouble
    stored_bytes: int
    owner: str
    privacy_loss: PrivacyLoss
    def __init__(self, job_id: _Optional[str] = ..., state: _Optional[_Union[JobState, str]] = ..., message: _Optional[str] = ..., num_rounds_committed: _Optional[int] = ..., num_rounds: _Optional[int] = ..., name: _Optional[str] = ..., evaluation: _Optional[_Union[_job_pb2.Evaluation, _Mapping]] = ..., submitted_at: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., ended_at: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., trouble: _Optional[_Union[JobTrouble, _Mapping]] = ..., stored_bytes: _Optional[int] = ..., owner: _Optional[str] = ..., privacy_loss: _Optional[_Union[PrivacyLoss, _Mapping]] = ...) -> None: ...

class PrivacyLoss(_message.Message):
    __slots__ = ("epsilon", "update_epsilon", "delta")
    EPSILON_FIELD_NUMBER: _ClassVar[int]
    UPDATE_EPSILON_FIELD_NUMBER: _ClassVar[int]
    DELTA_FIELD_NUMBER: _ClassVar[int]
    epsilon: float
    update_epsilon: float
    delta: float
    def __init__(self, epsilon: _Optional[float] = ..., update_epsilon: _Optional[float] = ..., delta: _Optional[float] = ...) -> None: ...

class JobTrouble(_message.Message):
    __slots__ = ("missing", "waiting", "num_failures", "failure", "gives_up_at")
    MISSING_FIELD_NUMBER: _ClassVar[int]
    WAITING_FIELD_NUMBER: _ClassVar[int]
    NUM_FAILURES_FIELD_NUMBER: _ClassVar[int]
    FAILURE_FIELD_NUMBER: _ClassVar[int]
    GIVES_UP_AT_FIELD_NUMBER: _ClassVar[int]
    missing: _containers.RepeatedCompositeFieldContainer[MissingHost]
    waiting: bool
    num_failures: int
    failure: str
    gives_up_at: _timestamp_pb2.Timestamp
    def __init__(self, missing: _Optional[_Iterable[_Union[MissingHost, _Mapping]]] = ..., waiting: bool = ..., num_failures: _Optional[int] = ..., failure: _Optional[str] = ..., gives_up_at: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ...) -> None: ...

class MissingHost(_message.Message):
    __slots__ = ("host_id", "wanted", "last_seen", "left_out")
    HOST_ID_FIELD_NUMBER: _ClassVar[int]
    WANTED_FIELD_NUMBER: _ClassVar[int]
    LAST_SEEN_FIELD_NUMBER: _ClassVar[int]
    LEFT_OUT_FIELD_NUMBER: _ClassVar[int]
    host_id: str
    wanted: str
    last_seen: _timestamp_pb2.Timestamp
    left_out: str
    def __init__(self, host_id: _Optional[str] = ..., wanted: _Optional[str] = ..., last_seen: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., left_out: _Optional[str] = ...) -> None: ...

class Incident(_message.Message):
    __slots__ = ("code", "message", "host_ids", "time")
    CODE_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    HOST_IDS_FIELD_NUMBER: _ClassVar[int]
    TIME_FIELD_NUMBER: _ClassVar[int]
    code: IncidentCode
    message: str
    host_ids: _containers.RepeatedScalarFieldContainer[str]
    time: _timestamp_pb2.Timestamp
    def __init__(self, code: _Optional[_Union[IncidentCode, str]] = ..., message: _Optional[str] = ..., host_ids: _Optional[_Iterable[str]] = ..., time: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ...) -> None: ...

class DataNote(_message.Message):
    __slots__ = ("message", "is_warning")
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    IS_WARNING_FIELD_NUMBER: _ClassVar[int]
    message: str
    is_warning: bool
    def __init__(self, message: _Optional[str] = ..., is_warning: bool = ...) -> None: ...

class JobWarning(_message.Message):
    __slots__ = ("code", "message", "advice")
    CODE_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    ADVICE_FIELD_NUMBER: _ClassVar[int]
    code: WarningCode
    message: str
    advice: str
    def __init__(self, code: _Optional[_Union[WarningCode, str]] = ..., message: _Optional[str] = ..., advice: _Optional[str] = ...) -> None: ...

class RoundStarted(_message.Message):
    __slots__ = ("round_index", "attempt", "plans", "change")
    ROUND_INDEX_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    PLANS_FIELD_NUMBER: _ClassVar[int]
    CHANGE_FIELD_NUMBER: _ClassVar[int]
    round_index: int
    attempt: int
    plans: _containers.RepeatedCompositeFieldContainer[_plan_pb2.Plan]
    change: str
    def __init__(self, round_index: _Optional[int] = ..., attempt: _Optional[int] = ..., plans: _Optional[_Iterable[_Union[_plan_pb2.Plan, _Mapping]]] = ..., change: _Optional[str] = ...) -> None: ...

class RoundCommitted(_message.Message):
    __slots__ = ("num_rounds", "summaries", "round_seconds", "late_clusters", "privacy_loss")
    NUM_ROUNDS_FIELD_NUMBER: _ClassVar[int]
    SUMMARIES_FIELD_NUMBER: _ClassVar[int]
    ROUND_SECONDS_FIELD_NUMBER: _ClassVar[int]
    LATE_CLUSTERS_FIELD_NUMBER: _ClassVar[int]
    PRIVACY_LOSS_FIELD_NUMBER: _ClassVar[int]
    num_rounds: int
    summaries: _containers.RepeatedCompositeFieldContainer[_job_pb2.RoundSummary]
    round_seconds: float
    late_clusters: _containers.RepeatedScalarFieldContainer[int]
    privacy_loss: PrivacyLoss
    def __init__(self, num_rounds: _Optional[int] = ..., summaries: _Optional[_Iterable[_Union[_job_pb2.RoundSummary, _Mapping]]] = ..., round_seconds: _Optional[float] = ..., late_clusters: _Optional[_Iterable[int]] = ..., privacy_loss: _Optional[_Union[PrivacyLoss, _Mapping]] = ...) -> None: ...

class ListJobsRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListJobsResponse(_message.Message):
    __slots__ = ("jobs",)
    JOBS_FIELD_NUMBER: _ClassVar[int]
    jobs: _containers.RepeatedCompositeFieldContainer[JobStatus]
    def __init__(self, jobs: _Optional[_Iterable[_Union[JobStatus, _Mapping]]] = ...) -> None: ...

class CancelJobRequest(_message.Message):
    __slots__ = ("job_id",)
    JOB_ID_FIELD_NUMBER: _ClassVar[int]
    job_id: str
    def __init__(self, job_id: _Optional[str] = ...) -> None: ...

class CancelJobResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class RollBackJobRequest(_message.Message):
    __slots__ = ("job_id", "num_rounds")
    JOB_ID_FIELD_NUMBER: _ClassVar[int]
    NUM_ROUNDS_FIELD_NUMBER: _ClassVar[int]
    job_id: str
    num_rounds: int
    def __init__(self, job_id: _Optional[str] = ..., num_rounds: _Optional[int] = ...) -> None: ...

class RollBackJobResponse(_message.Message):
    __slots__ = ("job", "begins_anew")
    JOB_FIELD_NUMBER: _ClassVar[int]
    BEGINS_ANEW_FIELD_NUMBER: _ClassVar[int]
    job: JobStatus
    begins_anew: bool
    def __init__(self, job: _Optional[_Union[JobStatus, _Mapping]] = ..., begins_anew: bool = ...) -> None: ...

class DeleteJobRequest(_message.Message):
    __slots__ = ("job_id",)
    JOB_ID_FIELD_NUMBER: _ClassVar[int]
    job_id: str
    def __init__(self, job_id: _Optional[str] = ...) -> None: ...

class DeleteJobResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetPlansRequest(_message.Message):
    __slots__ = ("job_id", "round_index")
    JOB_ID_FIELD_NUMBER: _ClassVar[int]
    ROUND_INDEX_FIELD_NUMBER: _ClassVar[int]
    job_id: str
    round_index: int
    def __init__(self, job_id: _Optional[str] = ..., round_index: _Optional[int] = ...) -> None: ...

class GetPlansResponse(_message.Message):
    __slots__ = ("plans",)
    PLANS_FIELD_NUMBER: _ClassVar[int]
    plans: _containers.RepeatedCompositeFieldContainer[_plan_pb2.Plan]
    def __init__(self, plans: _Optional[_Iterable[_Union[_plan_pb2.Plan, _Mapping]]] = ...) -> None: ...

class ExplainDecisionRequest(_message.Message):
    __slots__ = ("job_id", "round_index")
    JOB_ID_FIELD_NUMBER: _ClassVar[int]
    ROUND_INDEX_FIELD_NUMBER: _ClassVar[int]
    job_id: str
    round_index: int
    def __init__(self, job_id: _Optional[str] = ..., round_index: _Optional[int] = ...) -> None: ...

class ExplainDecisionResponse(_message.Message):
    __slots__ = ("explanation", "decision_json", "committed", "idle")
    class IdleEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    EXPLANATION_FIELD_NUMBER: _ClassVar[int]
    DECISION_JSON_FIELD_NUMBER: _ClassVar[int]
    COMMITTED_FIELD_NUMBER: _ClassVar[int]
    IDLE_FIELD_NUMBER: _ClassVar[int]
    explanation: str
    decision_json: str
    committed: RoundCommitted
    idle: _containers.ScalarMap[str, str]
    def __init__(self, explanation: _Optional[str] = ..., decision_json: _Optional[str] = ..., committed: _Optional[_Union[RoundCommitted, _Mapping]] = ..., idle: _Optional[_Mapping[str, str]] = ...) -> None: ...

class ReplayDecisionRequest(_message.Message):
    __slots__ = ("job_id", "round_index")
    JOB_ID_FIELD_NUMBER: _ClassVar[int]
    ROUND_INDEX_FIELD_NUMBER: _ClassVar[int]
    job_id: str
    round_index: int
    def __init__(self, job_id: _Optional[str] = ..., round_index: _Optional[int] = ...) -> None: ...

class ReplayDecisionResponse(_message.Message):
    __slots__ = ("recorded", "replayed")
    RECORDED_FIELD_NUMBER: _ClassVar[int]
    REPLAYED_FIELD_NUMBER: _ClassVar[int]
    recorded: _containers.RepeatedCompositeFieldContainer[_plan_pb2.Plan]
    replayed: _containers.RepeatedCompositeFieldContainer[_plan_pb2.Plan]
    def __init__(self, recorded: _Optional[_Iterable[_Union[_plan_pb2.Plan, _Mapping]]] = ..., replayed: _Optional[_Iterable[_Union[_plan_pb2.Plan, _Mapping]]] = ...) -> None: ...

class GetRecordsRequest(_message.Message):
    __slots__ = ("job_id",)
    JOB_ID_FIELD_NUMBER: _ClassVar[int]
    job_id: str
    def __init__(self, job_id: _Optional[str] = ...) -> None: ...

class GetRecordsResponse(_message.Message):
    __slots__ = ("part_json",)
    PART_JSON_FIELD_NUMBER: _ClassVar[int]
    part_json: str
    def __init__(self, part_json: _Optional[str] = ...) -> None: ...

class DumpJobRequest(_message.Message):
    __slots__ = ("job_id",)
    JOB_ID_FIELD_NUMBER: _ClassVar[int]
    job_id: str
    def __init__(self, job_id: _Optional[str] = ...) -> None: ...

class DumpJobResponse(_message.Message):
    __slots__ = ("table", "round_index", "document_json", "host_id", "missing")
    TABLE_FIELD_NUMBER: _ClassVar[int]
    ROUND_INDEX_FIELD_NUMBER: _ClassVar[int]
    DOCUMENT_JSON_FIELD_NUMBER: _ClassVar[int]
    HOST_ID_FIELD_NUMBER: _ClassVar[int]
    MISSING_FIELD_NUMBER: _ClassVar[int]
    table: str
    round_index: int
    document_json: str
    host_id: str
    missing: str
    def __init__(self, table: _Optional[str] = ..., round_index: _Optional[int] = ..., document_json: _Optional[str] = ..., host_id: _Optional[str] = ..., missing: _Optional[str] = ...) -> None: ...

class GetTraceRequest(_message.Message):
    __slots__ = ("job_id", "round_index")
    JOB_ID_FIELD_NUMBER: _ClassVar[int]
    ROUND_INDEX_FIELD_NUMBER: _ClassVar[int]
    job_id: str
    round_index: int
    def __init__(self, job_id: _Optional[str] = ..., round_index: _Optional[int] = ...) -> None: ...

class GetTraceResponse(_message.Message):
    __slots__ = ("host_id", "clock_offset_seconds", "clock_uncertainty_seconds", "unix_offset_seconds", "spans", "missing")
    HOST_ID_FIELD_NUMBER: _ClassVar[int]
    CLOCK_OFFSET_SECONDS_FIELD_NUMBER: _ClassVar[int]
    CLOCK_UNCERTAINTY_SECONDS_FIELD_NUMBER: _ClassVar[int]
    UNIX_OFFSET_SECONDS_FIELD_NUMBER: _ClassVar[int]
    SPANS_FIELD_NUMBER: _ClassVar[int]
    MISSING_FIELD_NUMBER: _ClassVar[int]
    host_id: str
    clock_offset_seconds: float
    clock_uncertainty_seconds: float
    unix_offset_seconds: float
    spans: _containers.RepeatedCompositeFieldContainer[_trace_pb2.Span]
    missing: str
    def __init__(self, host_id: _Optional[str] = ..., clock_offset_seconds: _Optional[float] = ..., clock_uncertainty_seconds: _Optional[float] = ..., unix_offset_seconds: _Optional[float] = ..., spans: _Optional[_Iterable[_Union[_trace_pb2.Span, _Mapping]]] = ..., missing: _Optional[str] = ...) -> None: ...

class UseModelRequest(_message.Message):
    __slots__ = ("start", "chunk")
    START_FIELD_NUMBER: _ClassVar[int]
    CHUNK_FIELD_NUMBER: _ClassVar[int]
    start: UseModelStart
    chunk: bytes
    def __init__(self, start: _Optional[_Union[UseModelStart, _Mapping]] = ..., chunk: _Optional[bytes] = ...) -> None: ...

class UseModelStart(_message.Message):
    __slots__ = ("job_id", "use")
    JOB_ID_FIELD_NUMBER: _ClassVar[int]
    USE_FIELD_NUMBER: _ClassVar[int]
    job_id: str
    use: _model_use_pb2.ModelUse
    def __init__(self, job_id: _Optional[str] = ..., use: _Optional[_Union[_model_use_pb2.ModelUse, _Mapping]] = ...) -> None: ...

class UseModelResponse(_message.Message):
    __slots__ = ("output",)
    OUTPUT_FIELD_NUMBER: _ClassVar[int]
    output: _model_use_pb2.ModelOutput
    def __init__(self, output: _Optional[_Union[_model_use_pb2.ModelOutput, _Mapping]] = ...) -> None: ...
