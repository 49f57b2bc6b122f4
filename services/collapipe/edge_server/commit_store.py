"""Keeps the models and the last commits of all jobs in one database. The weights that they name are blobs beside it.

What is read is checked, so that a damaged row is named and nothing is computed from it.
"""

import math
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from google.protobuf import json_format
from google.protobuf.message import DecodeError
from pydantic import BaseModel, Field, ValidationError, field_validator

from collapipe.database import FILE_NAME, Database
from collapipe.documents import decode_json, read_document
from collapipe.edge_server.commits import Head
from collapipe.errors import CorruptDataError, NotFoundError
from collapipe.job import AveragingConfig
from collapipe.mistakes import first_mistake
from collapipe.rpc.stored_messages import message_from_json
from collapipe.storage_service import StoredRow
from collapipe.v1 import job_pb2, plan_pb2

_VERSION = 1
_SCHEMA = """
    CREATE TABLE job (job_id TEXT PRIMARY KEY, document TEXT NOT NULL);
    CREATE TABLE last_commit (
        job_id TEXT PRIMARY KEY REFERENCES job ON DELETE CASCADE, num_rounds INTEGER NOT NULL, attempt INTEGER NOT NULL,
        num_rounds_restorable INTEGER NOT NULL, message BLOB NOT NULL
    );
    CREATE TABLE unit (
        job_id TEXT REFERENCES last_commit ON DELETE CASCADE, unit_index INTEGER, weights_digest TEXT NOT NULL,
        restorable_digest TEXT NOT NULL, PRIMARY KEY (job_id, unit_index)
    )
"""

_REMEDY = "start a new job, or put back copies of all services of an earlier time"

_DIGEST = "^[0-9a-f]{64}$"


class Model(BaseModel):
    """The fields of a `ModelSpec`."""

    family: str
    task: str
    config_json: str
    pretrained: str


class JobDocument(BaseModel):
    """The model of a job, and what is needed to average and export it."""

    job_id: str
    model: Model
    num_blocks: int = Field(ge=1, lt=1 << 31)
    vocabulary_digest: Annotated[str, Field(pattern=_DIGEST)]
    max_length: int = Field(ge=1)
    adapter_base: str | None = None
    """The pretrained model to which an adapter can be added. `None` if there is none."""
    averaging: AveragingConfig = AveragingConfig()
    owner: str = ""
    """Who may export the model, such as "client:me". Empty if anybody may."""
    findings: list[Any] = []
    """What a person should know about the pretrained weights: each `Finding` in JSON."""

    @field_validator("findings")
    @classmethod
    def _check_findings(cls, findings: list[Any]) -> list[Any]:
        for each in findings:
            message_from_json(each, job_pb2.Finding)
        return findings


@dataclass(frozen=True)
class Unit:
    """Where a unit of the global model begins.

    Args:
        num_rounds: Committed rounds.
        weights_digest: Its weights in the last commit.
        restorable_digest: Its weights in the restore point.
    """

    num_rounds: int
    weights_digest: str
    restorable_digest: str


class CommitStore:
    """The models and the last commits of all jobs. What it stores is on the disk as a whole when the call returns.

    A row names the commits that a job keeps in one message, because they change together. The numbers and digests that every push
    asks for have columns of their own.

    Args:
        directory: The state directory of the edge server.

    Raises:
        CorruptDataError: The database is damaged, or is one of another version. All methods raise this, too.
        OSError: The disk is full, or does not work. All methods raise this, too.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._database = Database(directory / FILE_NAME, _VERSION, _SCHEMA)

    def add(self, job: JobDocument, initial: plan_pb2.Commit) -> None:
        """Stores the model of a new job, and its first commit."""
        with self._database.transaction():
            self._database.execute(
                "INSERT INTO job VALUES (?, ?)", job.job_id, job.model_dump_json()
            )
            self.replace_commit(initial)

    def replace_commit(self, commit: plan_pb2.Commit) -> None:
        """Replaces the last commit of a job, and what it keeps of earlier ones."""
        job_id, restorable = commit.job_id, commit.restore_point
        numbers = commit.num_rounds, commit.attempt, restorable.num_rounds
        message = commit.SerializeToString(deterministic=True)
        with self._database.transaction():
            self._database.execute("DELETE FROM last_commit WHERE job_id = ?", job_id)
            self._database.execute(
                "INSERT INTO last_commit VALUES (?, ?, ?, ?, ?)", job_id, *numbers, message
            )
            for last, kept in zip(commit.global_units, restorable.global_units, strict=True):
                self._database.execute(
                    "INSERT INTO unit VALUES (?, ?, ?, ?)",
                    *(job_id, last.unit_index, last.weights_digest, kept.weights_digest),
                )

    def delete(self, job_id: str) -> None:
        """Deletes what is stored of a job, if there is anything."""
        self._database.delete("DELETE FROM job WHERE job_id = ?", job_id)

    def has(self, job_id: str) -> bool:
        """Returns whether a job has a model and a commit."""
        return bool(self._rows("SELECT 1 FROM last_commit WHERE job_id = ?", job_id))

    def job(self, job_id: str) -> JobDocument:
        """Returns the model of a job; raises `NotFoundError`."""
        [(text,)] = self._found("SELECT document FROM job WHERE job_id = ?", job_id)
        with _named(f"{self._database.path}: the model of job {job_id}"):
            return _checked_job(decode_json(text), job_id)

    def commit(self, job_id: str) -> plan_pb2.Commit:
        """Returns the last commit of a job; raises `NotFoundError`."""
        [(message,)] = self._found("SELECT message FROM last_commit WHERE job_id = ?", job_id)
        with _named(f"{self._database.path}: the last commit of job {job_id}"):
            return _checked_commit(plan_pb2.Commit.FromString(message), job_id)

    def head(self, job_id: str) -> Head:
        """Returns the numbers of the last commit of a job; raises `NotFoundError`."""
        statement = (
            "SELECT num_rounds, attempt, num_rounds_restorable FROM last_commit WHERE job_id = ?"
        )
        return Head(*self._found(statement, job_id)[0])

    def unit(self, job_id: str, unit_index: int) -> Unit:
        """Returns where a unit begins; raises `NotFoundError`."""
        statement = (
            "SELECT num_rounds, weights_digest, restorable_digest FROM unit JOIN last_commit USING (job_id) "
            "WHERE job_id = ? AND unit_index = ?"
        )
        return Unit(*self._found(statement, job_id, unit_index)[0])

    def dump(self, job_id: str) -> Iterator[StoredRow]:
        """Yields all that is stored of a job; raises `NotFoundError`. The columns beside a message repeat parts of it."""
        yield StoredRow("job", None, self.job(job_id).model_dump_json())
        commit = json_format.MessageToJson(
            self.commit(job_id), preserving_proto_field_name=True, indent=None
        )
        yield StoredRow("last_commit", None, commit)

    def _found(self, statement: str, job_id: str, *values: Any) -> list[tuple[Any, ...]]:
        rows = self._rows(statement, job_id, *values)
        if not rows:
            raise NotFoundError(
                f"the edge server has no model of job {job_id}: `collapipe jobs list` lists the jobs; if it is among them, resume it"
            )
        return rows

    def _rows(self, statement: str, job_id: str, *values: Any) -> list[tuple[Any, ...]]:
        rows = self._database.execute(statement, job_id, *values)
        if not rows and self._take_over_files(job_id):
            rows = self._database.execute(statement, job_id, *values)
        return rows

    def _take_over_files(self, job_id: str) -> bool:
        """Stores what an older version kept of a job in two files; returns whether it did so."""
        job_file, commit_file = (
            self._directory / "jobs" / job_id / name for name in ("job.json", "commit.json")
        )
        with self._database.transaction():
            is_known = self._database.execute("SELECT 1 FROM job WHERE job_id = ?", job_id)
            if is_known or not commit_file.exists():
                return False
            with _named(str(job_file)):
                job = read_document(job_file, _REMEDY)
                if job is None:
                    raise ValueError("it is missing")
                document = _checked_job({**job, "job_id": job.get("job_id") or job_id}, job_id)
            with _named(str(commit_file)):
                found = read_document(commit_file, _REMEDY)
                commit = _checked_commit(message_from_json(found, plan_pb2.Commit), job_id)
            self.add(document, commit)
        for file in (job_file, commit_file):
            file.unlink()
        return True


@contextmanager
def _named(what: str) -> Iterator[None]:
    """Raises `CorruptDataError` with the name of what is damaged."""
    try:
        yield
    except (ValueError, DecodeError, TypeError) as error:
        mistake = first_mistake(error) if isinstance(error, ValidationError) else str(error)
        raise CorruptDataError(f"{what} is damaged ({mistake}): {_REMEDY}") from error


def _checked_job(document: Any, job_id: str) -> JobDocument:
    """Returns the model of a job; raises `ValueError` if it is damaged or that of another job."""
    found = JobDocument.model_validate(document)
    if found.job_id != job_id:
        raise ValueError(f"it is that of job {found.job_id!r:.80}")
    return found


def _checked_commit(commit: plan_pb2.Commit, job_id: str) -> plan_pb2.Commit:
    """Returns a commit; raises `ValueError` if it is of another job, or if its parts do not fit together."""
    if not commit.global_units or not commit.clusters or not commit.HasField("restore_point"):
        raise ValueError("it has no units, no clusters or no restore point")
    candidates = [commit.candidate] if commit.HasField("candidate") else []
    units, clusters = range(len(commit.global_units)), range(len(commit.clusters))
    for each in (commit, commit.restore_point, *candidates, *commit.history):
        if each.job_id != job_id:
            raise ValueError(f"it is of job {each.job_id!r:.80}")
        when = f"after {each.num_rounds} rounds"
        if [unit.unit_index for unit in each.global_units] != [*units]:
            raise ValueError(f"{when}, its units are not 0 to {units[-1]}")
        if [cluster.cluster_index for cluster in each.clusters] != [*clusters]:
            raise ValueError(f"{when}, its clusters are not 0 to {clusters[-1]}")
        for unit in each.global_units:
            if not re.fullmatch(_DIGEST, unit.weights_digest):
                raise ValueError(
                    f"unit {unit.unit_index} has the digest {unit.weights_digest!r:.80}"
                )
            if not 0 <= unit.largest_change < math.inf:
                raise ValueError(f"unit {unit.unit_index} changed by {unit.largest_change}")
    return commit
