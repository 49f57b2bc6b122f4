"""A transaction is on the disk as a whole or not at all, whenever the process is killed and whatever the disk does."""

import errno
import os
import shutil
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from pathlib import Path

import pytest

from collapipe.control_unit.recorded_rows import RecordedRows
from collapipe.database import Database
from collapipe.edge_server.commit_store import CommitStore
from collapipe.errors import CorruptDataError
from collapipe.scheduler.job_store import JobStore

_SCHEMA = "CREATE TABLE one (number INTEGER); CREATE TABLE other (number INTEGER)"

_WRITER = """
import sys
from pathlib import Path
from collapipe.control_unit.recorded_rows import RecordedRows
from collapipe.database import Database
from collapipe.edge_server.commit_store import CommitStore

database = Database(Path(sys.argv[1]), "test", 1, sys.argv[2])
[(number,)] = database.execute("SELECT count(*) FROM one")
while True:
    number += 1
    with database.transaction():
        database.execute("INSERT INTO one VALUES (?)", number)
        database.execute("INSERT INTO other VALUES (?)", number)
    print(number, flush=True)
"""


def open_database(path: Path) -> Database:
    return Database(path, "test", 1, _SCHEMA)


@pytest.fixture
def database(tmp_path: Path) -> Iterator[Database]:
    database = open_database(tmp_path / "state.db")
    yield database
    database.close()


def numbers(database: Database) -> tuple[list[int], list[int]]:
    """Returns what the two tables have."""
    one, other = (
        [number for (number,) in database.execute(f"SELECT number FROM {table} ORDER BY number")]
        for table in ("one", "other")
    )
    return one, other


def test_each_transaction_that_was_told_survives_a_kill_as_a_whole(tmp_path: Path) -> None:
    path, told = tmp_path / "state.db", 0
    for num_lines in (1, 7, 30):
        line = [sys.executable, "-c", _WRITER, str(path), _SCHEMA]
        with subprocess.Popen(line, stdout=subprocess.PIPE, text=True) as writer:
            assert writer.stdout is not None
            for _ in range(num_lines):
                told = int(writer.stdout.readline())
            os.kill(writer.pid, signal.SIGKILL)
            for rest in writer.stdout:
                told = int(rest)
        database = open_database(path)
        one, other = numbers(database)
        database.close()
        assert one == other and one == list(range(1, len(one) + 1)) and len(one) >= told


def test_power_that_is_lost_between_two_statements_leaves_the_state_before(
    database: Database, tmp_path: Path
) -> None:
    """The files are copied between the statements, as a disk would have them."""
    found = []

    def look() -> None:
        copy = tmp_path / f"copy-{len(found)}"
        copy.mkdir()
        for file in tmp_path.glob("state.db*"):
            if not file.name.endswith("-shm"):  # This memory is lost.
                shutil.copy(file, copy)
        found.append(numbers(open_database(copy / "state.db")))

    with database.transaction():
        database.execute("INSERT INTO one VALUES (1)")
        look()
        database.execute("INSERT INTO other VALUES (1)")
        look()
    look()
    assert found == [([], []), ([], []), ([1], [1])]
    # Only with these does the disk have what a copy has here.
    assert database.execute("PRAGMA synchronous") == [(2,)]
    assert database.execute("PRAGMA journal_mode") == [("wal",)]


def test_error_in_the_block_takes_all_of_it_back(database: Database) -> None:
    with suppress(KeyError), database.transaction():
        database.execute("INSERT INTO one VALUES (1)")
        with database.transaction():  # It belongs to the one around it.
            database.execute("INSERT INTO other VALUES (1)")
        raise KeyError
    assert numbers(database) == ([], [])
    database.execute("INSERT INTO one VALUES (2)")
    assert numbers(database) == ([2], [])


def test_block_that_goes_on_after_an_error_of_the_disk_stores_nothing(database: Database) -> None:
    with pytest.raises(OSError), database.transaction():
        database.execute("INSERT INTO one VALUES (1)")
        with suppress(OSError):
            database.execute("INSERT INTO missing VALUES (1)")
        database.execute("INSERT INTO other VALUES (1)")
    assert numbers(database) == ([], [])


def test_full_disk_is_named_and_takes_nothing_that_was_stored(
    database: Database, tmp_path: Path
) -> None:
    database.execute("INSERT INTO one VALUES (1)")
    database.execute("PRAGMA max_page_count = 8")
    with pytest.raises(OSError, match="state.db") as full, database.transaction():
        database.execute("INSERT INTO one VALUES (2)")
        database.execute("INSERT INTO other VALUES (?)", "x" * 100_000)
    assert full.value.errno == errno.ENOSPC
    database.execute("PRAGMA max_page_count = 1000")
    database.execute("INSERT INTO other VALUES (1)")
    assert numbers(open_database(tmp_path / "state.db")) == ([1], [1])


def test_threads_do_not_see_each_others_unfinished_transactions(database: Database) -> None:
    with ThreadPoolExecutor(1) as another, database.transaction():
        database.execute("INSERT INTO one VALUES (1)")
        assert not another.submit(database.lock.acquire, blocking=False).result(60)
        seen = another.submit(numbers, database)
        database.execute("INSERT INTO other VALUES (1)")
    assert seen.result(60) == ([1], [1])


def test_reserve_makes_room_once_and_is_made_again(tmp_path: Path, database: Database) -> None:
    reserve = tmp_path / "state.db.reserve"
    assert reserve.stat().st_size > 100_000
    assert database.free_reserve() and not reserve.exists()
    assert not database.free_reserve()
    with database.transaction():
        database.execute("INSERT INTO one VALUES (1)")
    assert reserve.exists()
    reserve.write_bytes(b"")  # as after a loss of power
    assert not database.free_reserve()
    with database.transaction():
        database.execute("INSERT INTO one VALUES (1)")
    assert reserve.stat().st_size > 100_000


def test_text_that_is_no_utf_8_is_given_to_its_reader(database: Database) -> None:
    database.execute("INSERT INTO one VALUES (CAST(x'61ff62' AS TEXT))")
    assert database.execute("SELECT number FROM one") == [("a\ufffdb",)]


def test_closed_database_is_not_called_damaged(database: Database) -> None:
    database.close()
    with pytest.raises(OSError, match="closed"):
        numbers(database)


@pytest.mark.parametrize("kind", ["folder", "text"])
def test_what_is_no_database_is_named(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "state.db"
    if kind == "folder":
        path.mkdir()
    else:
        path.write_text("no database " * 1000)
    with pytest.raises((CorruptDataError, OSError), match="state.db"):
        open_database(path)


def test_database_of_another_kind_of_service_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "state.db"
    open_database(path).close()
    with pytest.raises(CorruptDataError, match="does not belong to this edge server"):
        Database(path, "edge server", 1, _SCHEMA)


def test_database_of_an_older_version_belongs_to_the_service_that_has_its_tables(
    tmp_path: Path,
) -> None:
    path = tmp_path / "state.db"
    JobStore(tmp_path).close()
    with closing(sqlite3.connect(path)) as raw:
        raw.execute("PRAGMA application_id = 0")
    for other in (CommitStore, RecordedRows):
        with pytest.raises(CorruptDataError, match="does not belong to this"):
            other(tmp_path)
    JobStore(tmp_path).close()
    for other in (CommitStore, RecordedRows):
        with pytest.raises(CorruptDataError, match="does not belong to this"):
            other(tmp_path)


def test_file_with_tables_and_no_version_is_left_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "state.db"
    with closing(sqlite3.connect(path)) as raw:
        raw.execute("CREATE TABLE of_somebody_else (number INTEGER)")
    with pytest.raises(CorruptDataError, match="another program"):
        open_database(path)
    with closing(sqlite3.connect(path)) as raw:
        assert raw.execute("PRAGMA application_id").fetchone() == (0,)
