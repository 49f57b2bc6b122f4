"""What the scheduler stores about jobs, their rounds and their events: the documents in the rows of its database."""

from typing import Annotated, Any, Literal, NamedTuple

from google.protobuf import json_format
from google.protobuf.message import Message
from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    FiniteFloat,
    PlainSerializer,
    PlainValidator,
    PrivateAttr,
)

from collapipe.data.rows import READING_VERSION
from collapipe.job import JobConfig
from collapipe.rpc.stored_messages import message_from_json
from collapipe.scheduler.privacy_account import PrivacyAccount
from collapipe.v1 import job_pb2, plan_pb2, scheduler_pb2

_UNFINISHED = (
    scheduler_pb2.JOB_STATE_QUEUED,
    scheduler_pb2.JOB_STATE_PREPARING,
    scheduler_pb2.JOB_STATE_RUNNING,
)


def _parse_as(kind: type[Message]) -> PlainValidator:
    """Returns a validator that accepts a message of this kind, or its JSON form."""

    def parse(value: Any) -> Message:
        return value if isinstance(value, kind) else message_from_json(value, kind)

    return PlainValidator(parse)


def _state_from_name(value: int | str) -> int:
    return scheduler_pb2.JobState.Value(value) if isinstance(value, str) else value


_MESSAGE_TO_JSON = PlainSerializer(
    lambda message: json_format.MessageToDict(message, preserving_proto_field_name=True)
)
_State = Annotated[
    int, BeforeValidator(_state_from_name), PlainSerializer(scheduler_pb2.JobState.Name)
]
_Evaluation = Annotated[job_pb2.Evaluation, _parse_as(job_pb2.Evaluation), _MESSAGE_TO_JSON]
_Trouble = Annotated[scheduler_pb2.JobTrouble, _parse_as(scheduler_pb2.JobTrouble)]
_Plan = Annotated[plan_pb2.Plan, _parse_as(plan_pb2.Plan), _MESSAGE_TO_JSON]
_Committed = Annotated[
    scheduler_pb2.RoundCommitted, _parse_as(scheduler_pb2.RoundCommitted), _MESSAGE_TO_JSON
]


class _Document(BaseModel):
    model_config = ConfigDict(extra="forbid", ser_json_inf_nan="constants")


_Count = Annotated[int, Field(ge=0, lt=1 << 31)]
_LargeCount = Annotated[int, Field(ge=0, lt=1 << 62)]
_Time = Annotated[FiniteFloat, Field(ge=0, lt=1 << 37)]
"""Unix time. Messages can have no later year than 9999."""


class _Facts(NamedTuple):
    name: str
    num_rounds: int
    privacy_loss: scheduler_pb2.PrivacyLoss | None


class JobDocument(_Document):
    """A job and its progress."""

    job_id: str
    number: _Count
    """Number of jobs that were submitted before this one."""
    config_json: str
    owner: str = ""
    """Role and name of the client that submitted it. Empty if anybody owns it."""
    state: _State = scheduler_pb2.JOB_STATE_QUEUED
    """A `scheduler_pb2.JobState`."""
    message: str = ""
    num_rounds_committed: _Count = 0
    num_rounds_reached: _Count = 0
    """The largest `num_rounds_committed` of all attempts. Earlier rounds are repetitions. It falls if a person goes back to a
    commit without its optimizer states."""
    attempt: _Count = 0
    """Number of the last attempt, from 0. A failure, a restart of the scheduler, `--resume`, `collapipe rollback` and each use
    of the model begin another one."""
    last_commit: tuple[_Count, _Count] = (0, 0)
    """Attempt and number of rounds of the last commit that the scheduler has seen."""
    num_rounds_restorable: _Count = 0
    """Rounds of the restore point of this commit. A resumed job repeats the later ones."""
    copied_candidate: tuple[int, int] | None = None
    """Attempt and number of rounds of the last candidate that all control units have copied."""
    labels: list[str] = Field(default_factory=list)
    vocabulary_digest: str = ""
    num_first_rows: list[_Count] = Field(default_factory=list)
    """Rows of each cluster's file when the job first read it. They decide which rows are held out."""
    reading_version: _Count = 0
    """The `READING_VERSION` that made the labels and the model. 0 if an older version of CollaPipe did, or none has yet."""
    evaluation: _Evaluation | None = None
    submitted_at: _Time = 0.0
    """Unix time. 0 if an older version took the job."""
    ended_at: _Time = 0.0
    """Unix time. 0 until the job has ended."""
    num_ended: _Count = 0
    """How many jobs had ended when it ended, itself included. So their order does not depend on the clock. 0 if an older version
    stored it."""
    stored_bytes: int = 0
    """Bytes of its weights and optimizer states on the edge server's disk, after the last commit."""
    privacy: PrivacyAccount = PrivacyAccount()
    """What its updates reveal, if they are private. A return to an earlier commit does not change it."""
    trouble: _Trouble = Field(default_factory=scheduler_pb2.JobTrouble, exclude=True)
    """What the job lacks at present. It is not stored: a restarted scheduler looks again."""
    _facts: tuple[str, PrivacyAccount, _Facts] | None = PrivateAttr(default=None)
    """What clients see of the job file and of the account, with both. A list of jobs would take seconds to read all job files."""

    @property
    def has_ended(self) -> bool:
        return self.state not in _UNFINISHED

    @property
    def is_of_other_reading(self) -> bool:
        """Whether the job has begun, and its files would now give other rows, labels or tokens."""
        return bool(self.vocabulary_digest) and self.reading_version != READING_VERSION

    @property
    def job(self) -> JobConfig:
        """The parsed job file."""
        return JobConfig.from_json(self.config_json)

    @property
    def privacy_loss(self) -> scheduler_pb2.PrivacyLoss | None:
        """What all rounds so far reveal. `None` if updates are not private."""
        return self._read_facts().privacy_loss

    def _read_facts(self) -> _Facts:
        known = self._facts
        if known is None or known[0] is not self.config_json or known[1] is not self.privacy:
            job = self.job
            loss = self.privacy.loss(job) if job.privacy.is_on else None
            facts = _Facts(job.name, job.training.rounds, loss)
            known = self._facts = self.config_json, self.privacy, facts
        return known[2]

    def status(self) -> scheduler_pb2.JobStatus:
        """Returns the message that describes the job to clients."""
        facts = self._read_facts()
        status = scheduler_pb2.JobStatus(
            job_id=self.job_id,
            state=scheduler_pb2.JobState.Name(self.state),
            message=self.message,
            num_rounds_committed=self.num_rounds_committed,
            num_rounds=facts.num_rounds,
            name=facts.name,
            stored_bytes=self.stored_bytes,
            owner=self.owner,
            evaluation=self.evaluation,
            trouble=self.trouble if self.trouble.ByteSize() else None,
            privacy_loss=facts.privacy_loss,
        )
        for field, seconds in (
            (status.submitted_at, self.submitted_at),
            (status.ended_at, self.ended_at),
        ):
            if seconds:
                field.FromMilliseconds(int(seconds * 1000))
        return status


class RoundDocument(_Document):
    """The last attempt at a round, stored before the attempt begins."""

    version: Literal[4] = 4
    """Format version. Increase it when an older document, its plans or its decision cannot be read."""
    attempt: _Count
    plans: list[_Plan]
    """One for each cluster."""
    decision: dict[str, Any]
    """The document of `RoundDecision.to_json`."""
    total_steps: _LargeCount
    """Optimizer steps of the whole job, as the learning rate of this round takes them."""
    late_clusters: list[_Count] = Field(default_factory=list)
    """The clusters without which the round is committed, ascending. They are stored before the commit, so that a repeated
    round has the same clusters."""
    failed_clusters: list[_Count] = Field(default_factory=list)
    """Those of them that have failed, and so begin their next round with new optimizer states."""
    ended_early: dict[_Count, _Count] = Field(default_factory=dict)
    """Number of mini-batches of each cluster that trained fewer than the others, by its index. Stored like `late_clusters`."""
    total_samples: _LargeCount = 0
    """With `averaging.secure`, at least the rows of all clusters: a change is multiplied by the rows of its cluster, divided by
    this number. 0 without."""
    is_revealed: bool = False
    """Whether control units may have revealed what removes the masks. A later attempt then has the same clusters, because two
    sums that differ by one cluster tell what that cluster has trained. Stored before they are asked."""
    measured: _Committed | None = None
    """What the round has measured, stored before its commit. If the scheduler dies before it knows of the commit, this becomes the
    result."""


class RoundResult(_Document):
    """What a committed round has measured. People look at it; no later round depends on it."""

    version: Literal[1] = 1
    """Format version, as in `RoundDocument`."""
    committed: _Committed
    attempt: _Count | None = None
    """The attempt that committed the round. Older documents do not have it."""
    evaluation: _Evaluation | None = None
    """The evaluation of the model after this round, if there was one."""


class StoredEvent(_Document):
    """An event of a job in words.

    Args:
        number: Its place in the log of the job.
        at: When it happened, in Unix seconds.
        kind: Which event or code of `scheduler.proto` it is.
    """

    number: int
    at: FiniteFloat
    kind: str
    text: str


class JobEvents(_Document):
    """The last events of a job, in words, as the page shows them. People look at them; nothing depends on them."""

    version: Literal[1] = 1
    """Format version, as in `RoundDocument`."""
    events: list[StoredEvent]
