"""Reads and changes what a scheduler or an edge server has stored, from outside of it."""

import json
import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from collapipe.database import FILE_NAME
from collapipe.scheduler.job_store import JobStore
from collapipe.v1.plan_pb2 import Commit


@dataclass(frozen=True)
class StoredRow:
    """The document in a row of a table, with the methods of a file.

    Args:
        state: The state directory of the service.
        round_index: `None` for a table without rounds.
    """

    state: Path
    table: str
    job_id: str
    round_index: int | None = None

    def read_text(self, encoding: str = "utf-8") -> str:
        return str(_rows(self.state, f"SELECT document {self._place}", *self._values)[0][0])

    def write_text(self, data: str, encoding: str = "utf-8") -> None:
        statement = (
            f"UPDATE {self.table} SET document = ? WHERE rowid IN (SELECT rowid {self._place})"
        )
        with closing(sqlite3.connect(self.state / FILE_NAME)) as database, database:
            assert database.execute(statement, (data, *self._values)).rowcount == 1

    def read(self) -> Any:
        return json.loads(self.read_text())

    def write(self, document: Any) -> None:
        self.write_text(json.dumps(document))

    @property
    def _place(self) -> str:
        of_round = "" if self.round_index is None else " AND round_index = ?"
        return f"FROM {self.table} WHERE job_id = ?{of_round}"

    @property
    def _values(self) -> tuple[Any, ...]:
        return (self.job_id,) if self.round_index is None else (self.job_id, self.round_index)


def stored_commit(state: Path, job_id: str) -> Commit:
    """Returns the last commit of a job, from the state directory of the edge server."""
    [commit] = _commits(state, job_id)
    return commit


def num_rounds_stored(state: Path, job_id: str) -> int:
    """Returns the number of committed rounds of a job, from the state directory of the edge server; 0 without a commit."""
    if not (state / FILE_NAME).exists():
        return 0
    return sum(commit.num_rounds for commit in _commits(state, job_id))


def _commits(state: Path, job_id: str) -> list[Commit]:
    rows = _rows(state, "SELECT message FROM last_commit WHERE job_id = ?", job_id)
    return [Commit.FromString(message) for (message,) in rows]


def write_message(state: Path, job_id: str, message: Any) -> None:
    """Replaces the last commit of a job by anything, in the state directory of the edge server."""
    statement = "UPDATE last_commit SET message = ? WHERE job_id = ?"
    with closing(sqlite3.connect(state / FILE_NAME)) as database, database:
        assert database.execute(statement, (message, job_id)).rowcount == 1


def stored_ids(state: Path, table: str = "job") -> list[str]:
    """Returns the ids of the jobs that have a row in a table."""
    return [job_id for (job_id,) in _rows(state, f"SELECT job_id FROM {table}")]


def _rows(state: Path, statement: str, *values: Any) -> list[Any]:
    # Whoever may write would also clean up what a killed service has left, which its next process has to do.
    uri = f"{(state / FILE_NAME).absolute().as_uri()}?mode=ro"
    with closing(sqlite3.connect(uri, uri=True)) as database:
        return database.execute(statement, values).fetchall()


@contextmanager
def refusing_writes(store: JobStore) -> Iterator[None]:
    """Makes the database of a store refuse each change, as a disk does that has become read-only."""
    store._database.execute("PRAGMA query_only = ON")
    try:
        yield
    finally:
        store._database.execute("PRAGMA query_only = OFF")
