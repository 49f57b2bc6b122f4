"""What one service keeps in one SQLite file, so that it survives a loss of power.

A transaction is on the disk as a whole when its block has ended. If anything fails before, nothing of it is stored.
"""

import errno
import os
import re
import shlex
import sqlite3
import threading
import weakref
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from collapipe.errors import CorruptDataError

NOT_STORED = (CorruptDataError, OSError)
"""The errors of a database that cannot be used."""

FILE_NAME = "state.db"
"""The file in the directory of a service."""


class Database:
    """A database that only this process uses. It is thread-safe: one thread at a time reads or writes.

    Args:
        path: The file. It is made if it does not exist.
        service: The kind of service that it belongs to.
        version: Number of the schema, from 1. Increase it when an older file cannot be read.
        schema: The statements that make the tables.
        remedy: A further sentence about what helps if the file is damaged.

    Raises:
        CorruptDataError: The file is damaged, has another version, or belongs to another kind of service.
        OSError: The disk is full, or does not work.
    """

    def __init__(
        self, path: Path, service: str, version: int, schema: str, remedy: str = ""
    ) -> None:
        self.path = path
        self._remedy = remedy
        self._service = service
        self._version = version
        self.lock = threading.RLock()
        """Held during each transaction. A caller may use it for what it keeps in memory beside the rows."""
        self._is_open = False
        self._failure: Exception | None = None
        """Why a statement of the present transaction failed."""
        self._reserve = path.with_name(f"{path.name}.reserve")
        path.parent.mkdir(parents=True, exist_ok=True)
        with self._explained():
            # Transactions begin where this class says, and not where Python guesses.
            self._connection = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
        self._close = weakref.finalize(self, self._connection.close)
        # So damaged text can be read. The caller checks it, and can name the damaged row.
        self._connection.text_factory = lambda data: data.decode("utf-8", "replace")
        try:
            try:
                self._open(version, schema)
            except OSError:  # A full disk has no room for the files beside the database.
                if not self.free_reserve():
                    raise
                self._open(version, schema)
            if (problem := self.execute("PRAGMA quick_check(1)")) != [("ok",)]:
                raise self._damaged(str(problem[0][0]))
        except BaseException:
            self._close()
            raise
        self._keep_reserve()

    def _open(self, version: int, schema: str) -> None:
        """Makes the tables of a new database. Raises the errors of this class."""
        # The first of these counts for a new file only. With `secure_delete`, SQLite would write deleted rows once more.
        for setting in (
            "auto_vacuum = INCREMENTAL",
            "journal_mode = WAL",
            "synchronous = FULL",
            "foreign_keys = ON",
            "secure_delete = OFF",
        ):
            self.execute(f"PRAGMA {setting}")
        own = zlib.crc32(f"CollaPipe {self._service}".encode()) >> 1
        [(found,)] = self.execute("PRAGMA user_version")
        [(owner,)] = self.execute("PRAGMA application_id")
        there = {name for (name,) in self.execute(_TABLES)}
        if found == owner == 0 and not there:
            with self.transaction():
                for statement in schema.split(";"):
                    self.execute(statement)
                self.execute(f"PRAGMA user_version = {version}")
        # Older versions did not say whose a database is.
        elif owner not in (0, own) or (owner == 0 and there != _tables_in(schema)):
            raise CorruptDataError(
                f"{self.path} does not belong to this {self._service}, but to another program: put back the file of this service"
            )
        elif found != version:
            raise CorruptDataError(
                f"{self.path} has format version {found}, but this service reads version {version}: use the version of CollaPipe that wrote it"
            )
        if owner == 0:
            self.execute(f"PRAGMA application_id = {own}")

    def close(self) -> None:
        """Closes the file. Later statements raise `OSError`."""
        with self.lock:
            self._close()

    def give_room_back(self) -> None:
        """Gives the room of deleted rows back to the disk. If the disk is too full to do so, later rows fill this room."""
        with suppress(*NOT_STORED):
            [(num_pages,)] = self.execute("PRAGMA freelist_count")
            for _ in range(0, num_pages, _PAGES_AT_ONCE):
                with self.lock, self._explained():
                    # `execute` would run this for one step only, and a step frees one page.
                    self._connection.executescript(f"PRAGMA incremental_vacuum({_PAGES_AT_ONCE})")
            self.execute("PRAGMA wal_checkpoint(PASSIVE)")
        self._keep_reserve()

    def free_reserve(self) -> bool:
        """Deletes the reserve, so that a change that frees more room can be made on a full disk. Returns whether there was a reserve."""
        with suppress(OSError):
            had_room = self._reserve.stat().st_size > 0
            self._reserve.unlink()
            return had_room
        return False

    def _keep_reserve(self) -> None:
        with self.lock, suppress(OSError):
            if self._reserve.exists() and self._reserve.stat().st_size in _RESERVE_BYTES:
                return
            for size in _RESERVE_BYTES:
                try:
                    with open(self._reserve, "wb") as file:
                        # A disk that compresses would keep no room for zeros.
                        file.write(os.urandom(size))
                        file.flush()
                        os.fsync(file.fileno())
                    return
                except OSError:
                    self.free_reserve()

    def execute(self, statement: str, *values: Any) -> list[tuple[Any, ...]]:
        """Runs a statement, and returns the rows that it finds. Outside of a transaction, the statement is a transaction of its own.

        Raises:
            CorruptDataError: The file is damaged.
            OSError: The disk is full, or does not work.
        """
        with self.lock:
            try:
                with self._explained():
                    return self._connection.execute(statement, values).fetchall()
            except Exception as error:
                self._failure = error
                raise

    def delete(self, statement: str, *values: Any) -> None:
        """Runs a statement that makes room, also on a full disk, and gives the room back to the disk. It is a transaction by itself, and
        no part of another one. Raises what `execute` raises."""
        with self.lock:
            assert not self._is_open
            try:
                self.execute(statement, *values)
            except OSError:
                if not self.free_reserve():
                    raise
                self.execute(statement, *values)
        self.give_room_back()

    @contextmanager
    def transaction(self) -> Iterator[None]:
        """Stores what the statements of the block change, all of it or nothing. An inner block is a part of the transaction of the
        outer block.

        If a statement failed in the block, and the block went on, its error is raised at the end.

        Raises:
            CorruptDataError: The file is damaged.
            OSError: The disk is full, or does not work.
        """
        with self.lock:
            if self._is_open:
                yield
                return
            self._failure = None
            self.execute("BEGIN IMMEDIATE")
            self._is_open = True
            try:
                yield
                if self._failure is not None:
                    raise self._failure
                self.execute("COMMIT")
            except BaseException:
                # After some errors, SQLite has ended the transaction itself.
                if self._connection.in_transaction:
                    with self._explained():
                        self._connection.execute("ROLLBACK")
                raise
            finally:
                self._is_open = False
            self._keep_reserve()

    @contextmanager
    def _explained(self) -> Iterator[None]:
        """Raises the errors of this class in place of those of SQLite."""
        try:
            yield
        except sqlite3.OperationalError as error:
            # Python 3.10 does not have the code.
            if getattr(error, "sqlite_errorcode", 0) == _SHORT_READ:
                raise self._damaged("its end is missing") from error
            number = errno.ENOSPC if "is full" in str(error) else errno.EIO
            raise OSError(number, str(error), str(self.path)) from error
        except sqlite3.Error as error:
            if type(error) is sqlite3.DatabaseError:
                raise self._damaged(str(error)) from error
            # It is closed, or a caller has broken a rule of the schema.
            raise OSError(errno.EINVAL, str(error), str(self.path)) from error

    def _damaged(self, problem: str) -> CorruptDataError:
        file = shlex.quote(str(self.path))
        return CorruptDataError(
            f"{self.path} is damaged ({problem}): stop the service. To save what can still be read, run `sqlite3 {file} .recover | sqlite3 "
            f"recovered.db` and `sqlite3 recovered.db 'PRAGMA user_version = {self._version}'`. Then remove {file}-wal and {file}-shm, and "
            f"put recovered.db or an earlier copy in the place of {self.path.name}. {self._remedy}".rstrip(
                ". "
            )
        )


_PAGES_AT_ONCE = 1000
"""As many as SQLite writes before it moves them from its log into the file."""

_RESERVE_BYTES = 1 << 19, 1 << 18
"""Sizes of the reserve, a file beside the database. When the disk is full, the reserve is deleted, because SQLite needs some room to
open a file or to delete rows. If there is no room for the first size, the second one is used."""

_SHORT_READ = 522
"""SQLITE_IOERR_SHORT_READ, https://www.sqlite.org/rescode.html. Python has a name for this number since 3.11."""

_TABLES = """SELECT name FROM sqlite_master WHERE type = 'table' AND name NOT LIKE 'sqlite%' AND name <> 'lost_and_found'"""
"""The second name is of a table that `.recover` makes."""


def _tables_in(schema: str) -> set[str]:
    """Returns the names of the tables that statements make."""
    return set(re.findall(r"CREATE TABLE (\w+)", schema))
