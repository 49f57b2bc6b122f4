"""The documents of a job on the edge server's disk: `job.json` (the model) and `commit.json` (the last commit).

They are checked when they are read, so that a damaged one is named and nothing is computed from it.
"""

import math
import os
import re
import threading
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any

from google.protobuf import json_format
from pydantic import BaseModel, Field, ValidationError

from collapipe.documents import read_document, write_document
from collapipe.errors import CorruptDataError
from collapipe.job import AveragingConfig
from collapipe.mistakes import first_mistake
from collapipe.rpc.stored_messages import message_from_json
from collapipe.v1 import plan_pb2

_JOB_REMEDY = "restore it, or delete it and resume the job, which writes it again"
_COMMIT_REMEDY = (
    "restore it, or start a new job: without it, nothing says which weights the job has"
)

_DIGEST = "^[0-9a-f]{64}$"


class Model(BaseModel):
    """The fields of a `ModelSpec`."""

    family: str
    task: str
    config_json: str
    pretrained: str


class JobDocument(BaseModel):
    """The model of a job, and what is needed to average and export it."""

    job_id: str = ""
    """Empty if an older version wrote it."""
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
    """What a person should know about the pretrained weights."""


def read_job(directory: Path) -> JobDocument | None:
    """Returns the model in the directory of a job; `None` if there is none. Raises `CorruptDataError`."""
    path = directory / "job.json"
    found = read_document(path, _JOB_REMEDY)
    if found is None:
        return None
    try:
        document = JobDocument.model_validate(found)
    except ValidationError as error:
        raise CorruptDataError(
            f"{path} is damaged ({first_mistake(error)}): {_JOB_REMEDY}"
        ) from error
    if document.job_id not in ("", directory.name):
        raise CorruptDataError(f"{path} is that of job {document.job_id}: {_JOB_REMEDY}")
    return document


def read_commit(directory: Path) -> plan_pb2.Commit | None:
    """Returns the last commit in the directory of a job; `None` if there is none. Raises `CorruptDataError`."""
    path = directory / "commit.json"
    document = read_document(path, _COMMIT_REMEDY)
    if document is None:
        return None
    try:
        commit = message_from_json(document, plan_pb2.Commit)
        mistake = find_mistake(commit, directory.name)
    except ValueError as error:
        mistake = str(error)
    if mistake:
        raise CorruptDataError(f"{path} is damaged ({mistake}): {_COMMIT_REMEDY}")
    return commit


@dataclass(frozen=True)
class CommitHead:
    """What every push needs to know of the last commit.

    Args:
        num_rounds: Committed rounds.
        attempt: The attempt that committed the last one.
        num_rounds_restorable: Rounds of the restore point.
        weights: Digest of the weights of each unit.
        restorable_weights: The same of the restore point.
    """

    num_rounds: int
    attempt: int
    num_rounds_restorable: int
    weights: tuple[str, ...]
    restorable_weights: tuple[str, ...]


def read_head(directory: Path) -> CommitHead | None:
    """Does what `read_commit` does for a part of the last commit, and reads each commit once. With 100 clusters, reading one takes
    43 ms."""
    try:
        found = os.stat(directory / "commit.json")
    except FileNotFoundError:
        return None
    # Another commit is another file. Of pushes that come together, one reads it.
    with _one_reads:
        return _read_head(directory, found.st_ino, found.st_mtime_ns, found.st_size)


_one_reads = threading.Lock()


@lru_cache(maxsize=256)
def _read_head(directory: Path, *file: int) -> CommitHead | None:
    commit = read_commit(directory)
    if commit is None:
        return None
    restorable = commit.restore_point
    return CommitHead(
        commit.num_rounds,
        commit.attempt,
        restorable.num_rounds,
        tuple(unit.weights_digest for unit in commit.global_units),
        tuple(unit.weights_digest for unit in restorable.global_units),
    )


def write_commit(directory: Path, commit: plan_pb2.Commit) -> None:
    """Replaces the last commit."""
    document = json_format.MessageToDict(commit, preserving_proto_field_name=True)
    write_document(directory / "commit.json", document)


def find_mistake(commit: plan_pb2.Commit, job_id: str) -> str:
    """Says why a commit is of another job, or which of its parts do not fit together; empty if it can be used."""
    if not commit.global_units or not commit.clusters or not commit.HasField("restore_point"):
        return "it has no units, no clusters or no restore point"
    candidates = [commit.candidate] if commit.HasField("candidate") else []
    units, clusters = list(range(len(commit.global_units))), list(range(len(commit.clusters)))
    for each in (commit, commit.restore_point, *candidates, *commit.history):
        if each.job_id != job_id:
            return f"it is of job {each.job_id!r:.80}"
        if [unit.unit_index for unit in each.global_units] != units:
            return f"after {each.num_rounds} rounds, its units are not {units[0]} to {units[-1]}"
        if [cluster.cluster_index for cluster in each.clusters] != clusters:
            return f"after {each.num_rounds} rounds, its clusters are not {clusters[0]} to {clusters[-1]}"
        for unit in each.global_units:
            if not re.fullmatch(_DIGEST, unit.weights_digest):
                return f"unit {unit.unit_index} has the digest {unit.weights_digest!r:.80}"
            if not 0 <= unit.largest_change < math.inf:
                return f"unit {unit.unit_index} changed by {unit.largest_change}"
    return ""
