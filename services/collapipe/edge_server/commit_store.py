"""Keeps the models and the last commits of all jobs in one database. The weights that they name are blobs beside it.

What is read is checked, so that a damaged row is named and nothing is computed from it.
"""

import math
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

from google.protobuf import json_format
from google.protobuf.message import DecodeError
from pydantic import BaseModel, Field, ValidationError

from collapipe.database import FILE_NAME, Database
from collapipe.documents import decode_json, keep_older, read_document
from collapipe.edge_server.commits import Head, head_of
from collapipe.errors import CorruptDataError, NotFoundError
from collapipe.job import AveragingConfig
from collapipe.mistakes import first_mistake
from collapipe.rpc.stored_messages import message_from_json
from collapipe.storage_service import DumpedRow
from collapipe.v1 import plan_pb2

_VERSION = 1
_SCHEMA = """
    CREATE TABLE job (job_id TEXT PRIMARY KEY, document TEXT NOT NULL);
    CREATE TABLE last_commit (job_id TEXT PRIMARY KEY REFERENCES job ON DELETE CASCADE, message BLOB NOT NULL)
"""

REMEDY = "start a new job, or put back copies of all services that were made at the same time"

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


class CommitStore:
    """The models and the last commits of all jobs. What it stores is on the disk as a whole when the call returns.

    One message has all commits that a job keeps, because they change together. The few numbers and digests that pushes ask for stay
    in memory.

    Args:
        directory: The state directory of the edge server.

    Raises:
        CorruptDataError, OSError: What `Database` raises, here and in all methods.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._database = Database(directory / FILE_NAME, "edge server", _VERSION, _SCHEMA)
        self._heads: dict[str, Head] = {}
        """What pushes ask for. It changes only while the database is locked."""

    def add(self, job: JobDocument, initial: plan_pb2.Commit) -> None:
        """Stores the model of a new job, and its first commit."""
        with self._database.transaction():
            # Only a person can have left the row of a job without a commit.
            statement = "INSERT OR REPLACE INTO job VALUES (?, ?)"
            self._database.execute(statement, job.job_id, job.model_dump_json())
            self.replace_commit(initial)

    def replace_commit(self, commit: plan_pb2.Commit) -> None:
        """Replaces the last commit of a job, and what it keeps of earlier ones."""
        statement = "INSERT OR REPLACE INTO last_commit VALUES (?, ?)"
        with self._database.lock:
            self._heads.pop(commit.job_id, None)
            self._database.execute(statement, commit.job_id, commit.SerializeToString())

    def delete(self, job_id: str) -> None:
        """Deletes what is stored of a job, if there is anything."""
        self._database.delete("DELETE FROM job WHERE job_id = ?", job_id)
        with self._database.lock:
            self._heads.pop(job_id, None)

    def has(self, job_id: str) -> bool:
        """Returns whether a job has a model and a commit."""
        return bool(self._rows("SELECT 1 FROM last_commit WHERE job_id = ?", job_id))

    def job(self, job_id: str) -> JobDocument:
        """Returns the document of a job: its model, and what is needed to average and export it. Raises `NotFoundError`."""
        text = self._found("SELECT document FROM job WHERE job_id = ?", job_id)
        with _named(f"{self._database.path}: the model of job {job_id}"):
            return _checked_job(decode_json(text), job_id)

    def commit(self, job_id: str) -> plan_pb2.Commit:
        """Returns the last commit of a job; raises `NotFoundError`."""
        message = self._found("SELECT message FROM last_commit WHERE job_id = ?", job_id)
        with _named(f"{self._database.path}: the last commit of job {job_id}"):
            return _checked_commit(plan_pb2.Commit.FromString(message), job_id)

    def head(self, job_id: str) -> Head:
        """Returns what pushes need to know of the last commit of a job; raises `NotFoundError`."""
        head = self._heads.get(job_id)
        if head is None:
            with self._database.lock:
                head = self._heads[job_id] = head_of(self.commit(job_id))
        return head

    def dump(self, job_id: str) -> Iterator[DumpedRow]:
        """Yields all that is stored of a job. A damaged commit is told as the text of its error."""
        for (document,) in self._rows("SELECT document FROM job WHERE job_id = ?", job_id):
            yield DumpedRow("job", None, document)
        if self.has(job_id):
            try:
                commit = self.commit(job_id)
                text = json_format.MessageToJson(
                    commit, preserving_proto_field_name=True, indent=None
                )
            except CorruptDataError as error:
                text = str(error)
            yield DumpedRow("last_commit", None, text)

    def _found(self, statement: str, job_id: str) -> Any:
        """Returns the value that a statement finds for a job."""
        rows = self._rows(statement, job_id)
        if not rows:
            raise NotFoundError(
                f"the edge server has no model of job {job_id}: `collapipe jobs list` lists the jobs; if it is among them, resume it"
            )
        return rows[0][0]

    def _rows(self, statement: str, job_id: str) -> list[tuple[Any, ...]]:
        rows = self._database.execute(statement, job_id)
        if not rows:
            self._take_over_files(job_id)
            rows = self._database.execute(statement, job_id)
        return rows

    def _take_over_files(self, job_id: str) -> None:
        """Stores what an older version kept of a job in two files, unless the job is known already."""
        job_file, commit_file = (
            self._directory / "jobs" / job_id / name for name in ("job.json", "commit.json")
        )
        with self._database.lock:
            known = self._database.execute("SELECT 1 FROM last_commit WHERE job_id = ?", job_id)
            found = None if known else read_document(commit_file, REMEDY)
            if found is None:
                return
            with _named(str(commit_file)):
                commit = _checked_commit(message_from_json(found, plan_pb2.Commit), job_id)
            with _named(str(job_file)):
                job = read_document(job_file, REMEDY)
                if job is None:
                    raise CorruptDataError(
                        f"{job_file} is missing: put it back from a copy, or resume the job once with the version that wrote "
                        f"{commit_file.name}"
                    )
                document = _checked_job({**job, "job_id": job.get("job_id") or job_id}, job_id)
            self.add(document, commit)
            keep_older(commit_file)
            keep_older(job_file)


class _DamagedError(Exception):
    """Says what is wrong with a row or a file. `_named` adds its name and the remedy."""


@contextmanager
def _named(what: str) -> Iterator[None]:
    """Raises `CorruptDataError` with the name of what is damaged."""
    try:
        yield
    except (_DamagedError, ValueError, DecodeError, TypeError) as error:
        mistake = first_mistake(error) if isinstance(error, ValidationError) else str(error)
        raise CorruptDataError(f"{what} is damaged ({mistake}): {REMEDY}") from error


def _checked_job(document: Any, job_id: str) -> JobDocument:
    """Returns the model of a job; raises `_DamagedError` if it is damaged or that of another job."""
    found = JobDocument.model_validate(document)
    if found.job_id != job_id:
        raise _DamagedError(f"it is that of job {found.job_id!r:.80}")
    return found


def _checked_commit(commit: plan_pb2.Commit, job_id: str) -> plan_pb2.Commit:
    """Returns a commit; raises `_DamagedError` if it is of another job, or if its parts do not fit together."""
    if not commit.global_units or not commit.clusters or not commit.HasField("restore_point"):
        raise _DamagedError("it has no units, no clusters or no restore point")
    candidates = [commit.candidate] if commit.HasField("candidate") else []
    units, clusters = range(len(commit.global_units)), range(len(commit.clusters))
    for each in (commit, commit.restore_point, *candidates, *commit.history):
        if each.job_id != job_id:
            raise _DamagedError(f"it is of job {each.job_id!r:.80}")
        when = f"after {each.num_rounds} rounds"
        if [unit.unit_index for unit in each.global_units] != [*units]:
            raise _DamagedError(f"{when}, its units are not 0 to {units[-1]}")
        if [cluster.cluster_index for cluster in each.clusters] != [*clusters]:
            raise _DamagedError(f"{when}, its clusters are not 0 to {clusters[-1]}")
        for unit in each.global_units:
            if not re.fullmatch(_DIGEST, unit.weights_digest):
                raise _DamagedError(
                    f"unit {unit.unit_index} has the digest {unit.weights_digest!r:.80}"
                )
            if not 0 <= unit.largest_change < math.inf:
                raise _DamagedError(f"unit {unit.unit_index} changed by {unit.largest_change}")
    return commit
