"""Keeps how many rows of data each round of a job has used, in a database, so that a repeated round uses the same ones."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, Field, ValidationError

from collapipe.database import FILE_NAME, Database
from collapipe.documents import keep_older, read_document
from collapipe.errors import CorruptDataError
from collapipe.mistakes import first_mistake
from collapipe.storage_service import DumpedRow

_VERSION = 1
_SCHEMA = """
    CREATE TABLE round (
        job_id TEXT, round_index INTEGER, num_rows INTEGER NOT NULL CHECK (num_rows >= 0), anew_since INTEGER NOT NULL,
        PRIMARY KEY (job_id, round_index)
    )
"""

_REMEDY = "restore it, or delete it: a repeated round then takes the rows that are there"
_WITHOUT_DATABASE = (
    "Or put nothing there: a repeated round then takes the rows of data that it finds"
)


class RecordedRows:
    """How many rows of data each round of each job has used.

    `anew_since` is the field of that name in `Commit`. Rounds that were recorded under another value do not count.

    Args:
        directory: The state directory of the control unit.

    Raises:
        CorruptDataError, OSError: What `Database` raises, here and in all methods.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._database = Database(
            directory / FILE_NAME, "control unit", _VERSION, _SCHEMA, _WITHOUT_DATABASE
        )

    def find(self, job_id: str, round_index: int, anew_since: int) -> int | None:
        """Returns the number of rows of a round; `None` if it is not recorded."""
        statement = (
            "SELECT num_rows FROM round WHERE job_id = ? AND round_index = ? AND anew_since = ?"
        )
        self._take_over_file(job_id)
        rows = self._database.execute(statement, job_id, round_index, anew_since)
        return rows[0][0] if rows else None

    def record(
        self, job_id: str, round_index: int, num_rows: int, anew_since: int, first_round: int
    ) -> None:
        """Records the number of rows of a round. Forgets the rounds before `first_round`, which are not repeated any more."""
        with self._database.transaction():
            self._database.execute(
                "DELETE FROM round WHERE job_id = ? AND (round_index < ? OR anew_since <> ?)",
                *(job_id, first_round, anew_since),
            )
            self._insert(job_id, {round_index: num_rows}, anew_since)

    def delete(self, job_id: str) -> None:
        """Deletes what is recorded of a job, if there is anything."""
        self._database.delete("DELETE FROM round WHERE job_id = ?", job_id)

    def dump(self, job_id: str) -> Iterator[DumpedRow]:
        """Yields all that is recorded of a job."""
        statement = "SELECT round_index, num_rows, anew_since FROM round WHERE job_id = ? ORDER BY round_index"
        self._take_over_file(job_id)
        for round_index, num_rows, anew_since in self._database.execute(statement, job_id):
            text = json.dumps({"num_rows": num_rows, "anew_since": anew_since})
            yield DumpedRow("round", round_index, text)

    def _insert(self, job_id: str, num_rows: dict[int, int], anew_since: int) -> None:
        for round_index, number in num_rows.items():
            self._database.execute(
                "INSERT OR REPLACE INTO round VALUES (?, ?, ?, ?)",
                *(job_id, round_index, number, anew_since),
            )

    def _take_over_file(self, job_id: str) -> None:
        """Records what an older version kept of a job in a file, unless something is recorded already."""
        file = self._directory / "jobs" / job_id / "round.json"
        with self._database.lock:
            if self._database.execute("SELECT 1 FROM round WHERE job_id = ? LIMIT 1", job_id):
                return
            document = read_document(file, _REMEDY)
            if document is None:
                return
            try:
                found = _RoundFile.model_validate(document)
            except ValidationError as error:
                raise CorruptDataError(
                    f"{file} is damaged ({first_mistake(error)}): {_REMEDY}"
                ) from error
            with self._database.transaction():
                self._insert(job_id, found.num_rows, found.anew_since)
            keep_older(file)


class _RoundFile(BaseModel):
    num_rows: dict[Annotated[int, Field(ge=0, lt=1 << 31)], Annotated[int, Field(ge=0, lt=1 << 31)]]
    anew_since: Annotated[int, Field(ge=0, lt=1 << 31)] = 0
