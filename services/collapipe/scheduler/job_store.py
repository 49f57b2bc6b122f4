"""Stores jobs, so that they survive a restart of the scheduler: in one database, with a document in JSON for each row."""

import logging
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from typing import Any, TypeVar

from pydantic import (
    BaseModel,
    ValidationError,
)

from collapipe.data.rows import READING_VERSION
from collapipe.database import FILE_NAME, NOT_STORED, Database
from collapipe.documents import decode_json
from collapipe.errors import CorruptDataError, InvalidInputError, NotFoundError, WrongStateError
from collapipe.job import JobConfig
from collapipe.mistakes import first_mistake
from collapipe.planning.planner_state import PlannerState
from collapipe.scheduler.grant_numbers import GrantNumbers
from collapipe.scheduler.job_documents import JobDocument, JobEvents, RoundDocument, RoundResult
from collapipe.scheduler.older_documents import take_over_documents
from collapipe.storage_service import DumpedRow
from collapipe.v1 import plan_pb2, scheduler_pb2

logger = logging.getLogger(__name__)

_D = TypeVar("_D", bound=BaseModel)

SERVICE = "scheduler"
_VERSION = 1
SCHEMA = """
    CREATE TABLE job (job_id TEXT PRIMARY KEY, document TEXT NOT NULL);
    CREATE TABLE round (
        job_id TEXT REFERENCES job ON DELETE CASCADE, round_index INTEGER, document TEXT NOT NULL, PRIMARY KEY (job_id, round_index)
    );
    CREATE TABLE result (
        job_id TEXT REFERENCES job ON DELETE CASCADE, round_index INTEGER, document TEXT NOT NULL, PRIMARY KEY (job_id, round_index)
    );
    CREATE TABLE planner (job_id TEXT PRIMARY KEY REFERENCES job ON DELETE CASCADE, document TEXT NOT NULL);
    CREATE TABLE events (job_id TEXT PRIMARY KEY REFERENCES job ON DELETE CASCADE, document TEXT NOT NULL);
    CREATE TABLE deletion (number INTEGER PRIMARY KEY AUTOINCREMENT, job_id TEXT UNIQUE NOT NULL);
    CREATE TABLE grant_number (reserved INTEGER NOT NULL);
    INSERT INTO grant_number VALUES (0)
"""

_REMEDY = "start a new job, or put back copies of all services of an earlier time"

_REMEMBERED = 1000
"""Deleted jobs that are remembered. A host that was away during more deletions keeps what it has of the older ones."""


class JobStore:
    """The jobs of a scheduler, which it keeps in its state directory.

    Raises:
        CorruptDataError: The database is damaged, or is one of another version.
        OSError: The disk is full, or does not work.
    """

    def __init__(self, directory: Path) -> None:
        self._database = Database(directory / FILE_NAME, SERVICE, _VERSION, SCHEMA)
        take_over_documents(self._database, directory)
        self._lock = self._database.lock
        self._jobs: dict[str, JobDocument] = {}
        self._unsaved: set[str] = set()
        """Ids of the jobs whose last change could not be stored."""
        self._unreadable: dict[str, str] = {}
        """What is wrong with the document of each job that is left out, by its id."""
        self.grants = GrantNumbers(self._database)
        self._deletions = self._read_deletions()
        for job_id, text in self._database.execute("SELECT job_id, document FROM job"):
            try:
                document = self._parse(f"job {job_id}", text, JobDocument)
                document.status()  # refuses a job file of another version
                if document.job_id != job_id:
                    raise CorruptDataError(
                        f"{self._database.path}: the document of job {job_id} is that of job {document.job_id}: {_REMEDY}"
                    )
            except (CorruptDataError, InvalidInputError, ValueError) as error:
                logger.error("job %s is left out, the others are not: %s", job_id, error)
                if isinstance(error, CorruptDataError):
                    reason = str(error)
                else:
                    reason = f"its job file cannot be read ({error}): use the version of CollaPipe that wrote it"
                self._unreadable[job_id] = reason
                continue
            self._jobs[document.job_id] = document

    def transaction(self) -> AbstractContextManager[None]:
        """Stores what the block stores together: all of it or nothing. Raises the errors of `Database.transaction`."""
        return self._database.transaction()

    def close(self) -> None:
        """Closes the database. Nothing can be stored or read any more."""
        self._database.close()

    def take_over(self, *, abandon: bool) -> list[JobDocument]:
        """Queues the unfinished jobs of the last process of the scheduler for a next attempt, and returns them: first those
        that had begun, so that they go on first.

        Args:
            abandon: Mark them as failed instead, and return none.

        Jobs whose data another version has read are marked as failed, too.
        """
        unfinished = [document for document in self.all() if not document.has_ended]
        unfinished.sort(key=lambda document: document.state == scheduler_pb2.JOB_STATE_QUEUED)
        for document in unfinished:
            if document.is_of_other_reading:
                document.state = scheduler_pb2.JOB_STATE_FAILED
                document.message = _say_other_reading(document)
                self.note_end(document)
            elif abandon:
                document.state = scheduler_pb2.JOB_STATE_FAILED
                document.message = "the scheduler ended while the job ran: resume it"
                self.note_end(document)
            else:
                document.state = scheduler_pb2.JOB_STATE_QUEUED
                document.message = "the scheduler was started again"
                document.attempt += 1
            try:
                self.save(document)
            except NOT_STORED:  # The next change of the job stores it, too.
                logger.exception("the state of job %s could not be stored", document.job_id)
        return [document for document in unfinished if not document.has_ended]

    def note_end(self, document: JobDocument) -> None:
        """Notes in the document of a job that the job has ended now."""
        document.ended_at = time.time()
        document.num_ended = 1 + max((job.num_ended for job in self.all()), default=0)

    def create(self, config: JobConfig, owner: str = "") -> JobDocument:
        document = JobDocument(
            job_id=f"{config.name}-{uuid.uuid4().hex[:8]}",
            number=1 + max((job.number for job in self.all()), default=-1),
            config_json=config.to_json(),
            owner=owner,
            submitted_at=time.time(),
        )
        return self._add(document)

    def reopen(
        self,
        config: JobConfig,
        owner: str = "",
        may: Callable[[JobDocument], bool] = lambda document: True,
    ) -> JobDocument:
        """Queues again the job that `find_resumable` returns, so that it continues from its restore point.

        Raises:
            NotFoundError: There is no job of this name.
            InvalidInputError: The job still runs, another version has read its data, or a setting that must not change has changed.
        """
        with self._lock:
            document = self.find_resumable(config, owner, may)
            changes = {
                "config_json": config.to_json(),
                "state": scheduler_pb2.JOB_STATE_QUEUED,
                "message": "",
                "attempt": document.attempt + 1,
                "ended_at": 0.0,
            }
            return self._add(document.model_copy(update=changes))

    def find_resumable(
        self, config: JobConfig, owner: str, may: Callable[[JobDocument], bool]
    ) -> JobDocument:
        """Returns the job of this name that is resumed: the newest one of the caller, else the newest one that it may resume.

        Args:
            owner: The caller, whose own jobs are preferred.
            may: Says whether the caller may resume a job. Other jobs are ignored.

        Raises:
            NotFoundError: There is no job of this name.
            InvalidInputError: The job still runs, another version has read its data, or a setting that must not change has changed.
        """
        with self._lock:
            jobs = [
                document
                for document in self.all()
                if document.job.name == config.name and may(document)
            ]
            if not jobs:
                raise NotFoundError(
                    f"you have no job named {config.name!r} to resume: run it without --resume first"
                )
            document = next((job for job in reversed(jobs) if job.owner == owner), jobs[-1])
            if not document.has_ended:
                raise InvalidInputError(
                    f"job {document.job_id} is still running: wait for it or cancel it"
                )
            if document.is_of_other_reading:
                raise InvalidInputError(_say_other_reading(document))
            changed = _changed_settings(document.job, config)
            if changed:
                raise InvalidInputError(
                    f"job {document.job_id} cannot be resumed with other values of {', '.join(changed)}: use the old "
                    "values, or start a new job (only the schedule, the rounds and the evaluation may change)"
                )
            return document

    def begin_use(self, job_id: str) -> int:
        """Returns the number of an attempt that trains nothing: it uses the model, or goes back to an earlier commit. It is
        newer than all earlier ones, and is stored.

        A resumed job that is still queued gets a newer number.

        Raises:
            OSError: The number could not be stored. After a restart, a control unit would refuse it.
        """
        with self._lock:
            document = self.get(job_id)
            document.attempt += 1
            number = document.attempt
            if document.state == scheduler_pb2.JOB_STATE_QUEUED:
                document.attempt += 1
            self.save(document)
        return number

    def roll_back(self, job_id: str, commit: plan_pb2.Commit, stored_bytes: int = 0) -> JobDocument:
        """Stores that a person went back to a commit, and returns the job.

        A job whose rounds are not all committed any more counts as cancelled, unless it is queued again already.
        """
        with self._lock:
            document = self.get(job_id)
            num_rounds = document.num_rounds_committed = commit.num_rounds
            document.last_commit = commit.attempt, num_rounds
            document.num_rounds_restorable = commit.restore_point.num_rounds
            document.stored_bytes = stored_bytes
            if begins_anew(commit):
                document.num_rounds_reached = num_rounds
            if document.evaluation is not None and document.evaluation.num_rounds > num_rounds:
                document.evaluation = None
            if document.has_ended and num_rounds < document.job.training.rounds:
                document.state = scheduler_pb2.JOB_STATE_CANCELLED
                document.message = f"went back to {num_rounds} committed rounds: resume it"
            self.save(document)
            return document

    def _add(self, document: JobDocument) -> JobDocument:
        """Stores a queued job. Only a job that is on the disk counts."""
        self._write(document)
        with self._lock:
            self._jobs[document.job_id] = document
        return document

    def delete(self, job_id: str, reason: str) -> None:
        """Deletes a job that has ended.

        Args:
            reason: Who or what asks for it, for the log.

        Raises:
            NotFoundError: There is no such job.
            WrongStateError: The job has not ended.
        """
        with self._lock:
            self.check_has_ended(job_id)
            try:
                self._delete_rows(job_id)
            except OSError:  # On a full disk, this makes room.
                if not self._database.free_reserve():
                    raise
                self._delete_rows(job_id)
            del self._jobs[job_id]
            self._unsaved.discard(job_id)
            self._deletions = self._read_deletions()
        logger.info("job %s was deleted: %s", job_id, reason)

    def give_room_back(self) -> None:
        """Gives the room of deleted jobs back to the disk."""
        self._database.give_room_back()

    def _delete_rows(self, job_id: str) -> None:
        with self._database.transaction():
            self._database.execute("DELETE FROM job WHERE job_id = ?", job_id)
            self._database.execute("INSERT OR IGNORE INTO deletion (job_id) VALUES (?)", job_id)
            self._database.execute(
                "DELETE FROM deletion WHERE number <= (SELECT max(number) FROM deletion) - ?",
                _REMEMBERED,
            )

    def deletions_after(self, num_deletions: int) -> tuple[list[str], int]:
        """Returns the ids of the remembered jobs that were deleted after so many deletions, the oldest first, and the number of all
        deletions."""
        total, job_ids = self._deletions  # Another thread may replace it meanwhile.
        return job_ids[max(0, len(job_ids) - (total - num_deletions)) :], total

    def _read_deletions(self) -> tuple[int, list[str]]:
        """Returns the number of all deletions, and the ids of the last ones."""
        rows = self._database.execute("SELECT number, job_id FROM deletion ORDER BY number")
        return rows[-1][0] if rows else 0, [job_id for _, job_id in rows]

    def check_has_ended(self, job_id: str) -> None:
        """Raises the errors of `delete`."""
        document = self.get(job_id)
        if not document.has_ended:
            state = scheduler_pb2.JobState.Name(document.state).removeprefix("JOB_STATE_")
            raise WrongStateError(
                f"job {job_id} is {state.lower()}, and only a job that has ended can be deleted: cancel it first "
                f"(`collapipe jobs cancel {job_id}`), and wait until it has ended"
            )

    def all(self) -> list[JobDocument]:
        """Returns every job, oldest first."""
        with self._lock:
            return sorted(self._jobs.values(), key=lambda document: document.number)

    @property
    def num_unreadable(self) -> int:
        """Number of jobs whose documents cannot be read."""
        return len(self._unreadable)

    def statuses(self) -> list[scheduler_pb2.JobStatus]:
        """Returns the messages about all jobs, oldest first. Those that cannot be read come before all others."""
        unreadable = [
            scheduler_pb2.JobStatus(
                job_id=job_id, state=scheduler_pb2.JOB_STATE_UNREADABLE, message=reason
            )
            for job_id, reason in sorted(self._unreadable.items())
        ]
        return [*unreadable, *(document.status() for document in self.all())]

    def get(self, job_id: str) -> JobDocument:
        """Returns one job.

        Raises:
            NotFoundError: There is no such job.
            CorruptDataError: Its document cannot be read.
        """
        with self._lock:
            if job_id in self._unreadable:
                raise CorruptDataError(f"job {job_id} cannot be read: {self._unreadable[job_id]}")
            if job_id not in self._jobs:
                raise NotFoundError(
                    f"there is no job {job_id!r}: `collapipe jobs list` lists the jobs"
                )
            return self._jobs[job_id]

    def save(self, document: JobDocument) -> None:
        """Stores a job, unless it was deleted, or resumed: then it has a new document, and the old one counts no more."""
        with self._lock:
            if self._jobs.get(document.job_id) is document:
                self._unsaved.add(document.job_id)
                self._write(document)
                self._unsaved.discard(document.job_id)

    @property
    def has_unsaved_ends(self) -> bool:
        """Whether a job has ended, but a full disk prevented storing that. After a restart, it would go on."""
        with self._lock:
            return any(self._jobs[job_id].has_ended for job_id in self._unsaved)

    def save_ends(self) -> None:
        """Tries again to store the jobs of `has_unsaved_ends`."""
        with self._lock:
            for job_id in [each for each in self._unsaved if self._jobs[each].has_ended]:
                with suppress(*NOT_STORED):
                    self.save(self._jobs[job_id])

    def _write(self, document: JobDocument) -> None:
        self._database.execute(
            "INSERT INTO job VALUES (?, ?) ON CONFLICT (job_id) DO UPDATE SET document = excluded.document",
            document.job_id,
            _to_json(document),
        )

    def find_round(self, job_id: str, round_index: int) -> RoundDocument | None:
        """Returns the last attempt at a round, or `None` if the round was never planned."""
        return self._find_of_round("round", job_id, round_index, RoundDocument)

    def round(self, job_id: str, round_index: int) -> RoundDocument:
        """Returns the last attempt at a round; raises `NotFoundError` if there is no such job or round."""
        self.get(job_id)
        document = self.find_round(job_id, round_index)
        if document is None:
            raise NotFoundError(
                f"round {round_index + 1} of job {job_id} was not planned yet: rounds are counted from 1, and "
                "`collapipe jobs show` tells how many there are"
            )
        return document

    def save_round(self, job_id: str, round_index: int, document: RoundDocument) -> None:
        """Stores an attempt at a round. It replaces the previous attempt. The result of the last commit stays."""
        # A large document takes a while, in which others may use the database.
        self._put_of_round("round", job_id, round_index, _to_json(document))

    def find_result(
        self, job_id: str, round_index: int, attempt: int | None = None
    ) -> RoundResult | None:
        """Returns what a committed round has measured; `None` if an older version committed it, or it is not committed.

        Args:
            attempt: Only a result of this attempt is wanted.
        """
        result = self._find_of_round("result", job_id, round_index, RoundResult)
        is_other = (
            result is not None and attempt is not None and result.attempt not in (None, attempt)
        )
        return None if is_other else result

    def save_result(self, job_id: str, round_index: int, result: RoundResult) -> None:
        """Stores the result of a round. It replaces that of an earlier attempt."""
        self._put_of_round("result", job_id, round_index, _to_json(result))

    def find_events(self, job_id: str) -> list[dict[str, Any]] | None:
        """Returns the events that were stored when the job was last over; `None` if there are none.

        Raises:
            CorruptDataError: They are damaged.
        """
        found = self._find_of_job("events", job_id, JobEvents)
        return None if found is None else [event.model_dump() for event in found.events]

    def save_events(self, job_id: str, events: list[dict[str, Any]]) -> None:
        """Stores the last events of a job, unless it was deleted."""
        with self._lock:
            if job_id in self._jobs:
                self._put_of_job("events", job_id, JobEvents.model_validate({"events": events}))

    def planner_state(self, job_id: str) -> PlannerState | None:
        """Returns the stored state of a job's planner; `None` if there is no state that can be used."""
        try:
            return self._find_of_job("planner", job_id, PlannerState)
        except CorruptDataError as error:
            logger.warning("the hosts of job %s are profiled again: %s", job_id, error)
            return None

    def save_planner_state(self, job_id: str, state: PlannerState) -> None:
        self._put_of_job("planner", job_id, state)

    def host_clusters(self, job_id: str) -> Sequence[int] | None:
        """Returns the clusters of the deployment that a job has; `None` if its document cannot be read. Raises `NotFoundError`."""
        if job_id in self._unreadable:
            return None
        return JobConfig.from_json(self.get(job_id).config_json).host_clusters

    def dump(self, job_id: str) -> Iterator[DumpedRow]:
        """Yields all that is stored of a job; raises `NotFoundError`."""
        if job_id not in self._unreadable:
            self.get(job_id)
        for table in ("job", "planner", "events"):
            statement = f"SELECT document FROM {table} WHERE job_id = ?"
            for (text,) in self._read(statement, job_id):
                yield DumpedRow(table, None, text)
        for table in ("round", "result"):
            statement = f"SELECT round_index FROM {table} WHERE job_id = ? ORDER BY round_index"
            for (round_index,) in self._read(statement, job_id):
                for text in self._texts_of_round(table, job_id, round_index):
                    yield DumpedRow(table, round_index, text)

    def _find_of_job(self, table: str, job_id: str, schema: type[_D]) -> _D | None:
        rows = self._read(f"SELECT document FROM {table} WHERE job_id = ?", job_id)
        what = f"the row of job {job_id} in table {table}"
        return self._parse(what, rows[0][0], schema) if rows else None

    def _find_of_round(
        self, table: str, job_id: str, round_index: int, schema: type[_D]
    ) -> _D | None:
        texts = self._texts_of_round(table, job_id, round_index)
        what = f"the row of round {round_index + 1} of job {job_id} in table {table}"
        return self._parse(what, texts[0], schema) if texts else None

    def _texts_of_round(self, table: str, job_id: str, round_index: int) -> list[str]:
        statement = f"SELECT document FROM {table} WHERE job_id = ? AND round_index = ?"
        return [text for (text,) in self._read(statement, job_id, round_index)]

    def _read(self, statement: str, *values: Any) -> list[tuple[Any, ...]]:
        """Returns the rows that a statement finds; raises `CorruptDataError` if the disk does not give them."""
        try:
            return self._database.execute(statement, *values)
        except OSError as error:
            raise CorruptDataError(
                f"{self._database.path} cannot be read ({error}): mend its permissions or its disk"
            ) from error

    def _put_of_job(self, table: str, job_id: str, document: BaseModel) -> None:
        self._database.execute(
            f"INSERT OR REPLACE INTO {table} VALUES (?, ?)", job_id, _to_json(document)
        )

    def _put_of_round(self, table: str, job_id: str, round_index: int, text: str) -> None:
        self._database.execute(
            f"INSERT OR REPLACE INTO {table} VALUES (?, ?, ?)", job_id, round_index, text
        )

    def _parse(self, what: str, text: str, schema: type[_D]) -> _D:
        """Reads a document; raises `CorruptDataError` if it is damaged, or of another version."""
        name = f"{self._database.path}: {what}"
        try:
            document = decode_json(text)
        except ValueError as error:
            raise CorruptDataError(f"{name} is damaged ({error}): {_REMEDY}") from error
        if not isinstance(document, dict):
            raise CorruptDataError(f"{name} is damaged (not an object): {_REMEDY}")
        found, known = document.get("version", 1), schema.model_fields.get("version")
        if known is not None and found != known.default:
            raise CorruptDataError(
                f"{name} has format version {found}, but this scheduler reads version {known.default}: use the version "
                "of CollaPipe that wrote it, or start a new job"
            )
        try:
            return schema.model_validate(document)
        except ValidationError as error:
            raise CorruptDataError(
                f"{name} is damaged ({first_mistake(error)}): {_REMEDY}"
            ) from error


def begins_anew(commit: plan_pb2.Commit) -> bool:
    """Returns whether a person went back to this commit, and its optimizer states were not kept."""
    return 0 < commit.anew_since == commit.attempt


def _to_json(document: BaseModel) -> str:
    return document.model_dump_json()


def _say_other_reading(document: JobDocument) -> str:
    return (
        f"job {document.job_id} was begun by a version of CollaPipe that reads data in another way (version {document.reading_version} of the "
        f"reading, and this one has {READING_VERSION}), so it would go on with other rows: start a new job without --resume, or use the version "
        "that began it (`collapipe export` and `collapipe predict` still work)"
    )


def _changed_settings(before: JobConfig, after: JobConfig) -> list[str]:
    """Returns the changed settings, without those that may change when a job is resumed."""
    old, new = _flatten(before.model_dump()), _flatten(after.model_dump())
    changed = [key for key in sorted(old.keys() | new.keys()) if old.get(key) != new.get(key)]
    kept = [key for key in changed if not _may_change(key, after)]
    if after.privacy.is_on and before.num_noise_shares != after.num_noise_shares:
        # The updates of a repeated round would have less noise than the account says.
        names = ("min_clusters", "late_clusters", "round_deadline_seconds")
        kept += [key for key in changed if key in {f"schedule.{name}" for name in names}]
    return kept


def _may_change(setting: str, job: JobConfig) -> bool:
    if setting == "schedule.num_micro_batches":
        # With an update for each micro-batch, another number of micro-batches would change the training.
        return job.training.update_per != "micro_batch"
    if setting == "data.max_held_out_rows":
        # Without a file of held-out rows, those above the limit train.
        return job.data.held_out is not None
    return setting.startswith("schedule.") or setting in (
        "training.rounds",
        "training.replicate_every",
        "training.keep_commits",
        "training.evaluate_every",
        "data.strict",
        "privacy.max_epsilon",
    )


def _flatten(section: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in section.items():
        if isinstance(value, dict):
            flat |= _flatten(value, f"{prefix}{key}.")
        else:
            flat[prefix + key] = value
    return flat
