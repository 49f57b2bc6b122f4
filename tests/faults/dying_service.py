"""Runs a service that kills itself before or after one of its writes: `DEATH_FILE=... python dying_service.py MODULE ARGUMENTS`.

While the file has a number above 0, each write counts it down, once before the write and once after it. When it reaches 0, the service
kills itself with SIGKILL. A write is a transaction of a database, or the replacement of a file. What the system has not synced to the
disk survives, unlike in a loss of power.
"""

import os
import runpy
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from collapipe.database import Database

NO_DEATH = 0
"""The number with which a service lives on."""
_CHANGES = ("COMMIT", "INSERT", "UPDATE", "DELETE", "REPLACE")
_lock = threading.Lock()
_replace = os.replace  # without counting


def _pass_a_point() -> None:
    file = Path(os.environ["DEATH_FILE"])
    with _lock:
        left = int(file.read_text()) if file.exists() else NO_DEATH
        if left > NO_DEATH:
            write_number(file, left - 1)
            if left - 1 == NO_DEATH:
                os.kill(os.getpid(), signal.SIGKILL)


def write_number(file: Path, number: int) -> None:
    """Writes how many points a service passes until it dies. The service reads the old or the new number."""
    new = file.with_suffix(".new")
    new.write_text(str(number))
    _replace(new, file)


def _between_points(write: Callable[..., Any]) -> Callable[..., Any]:
    def between(*arguments: Any, **options: Any) -> Any:
        _pass_a_point()
        result = write(*arguments, **options)
        _pass_a_point()
        return result

    return between


def _count_writes() -> None:
    execute = Database.execute
    changing = _between_points(execute)

    def counted(self: Database, statement: str, *values: Any) -> Any:
        is_commit = statement == "COMMIT"
        with self.lock:  # Another thread may be in a transaction.
            is_alone = not self._is_open and statement.lstrip().startswith(_CHANGES)
            return (changing if is_commit or is_alone else execute)(self, statement, *values)

    Database.execute = counted  # type: ignore[method-assign]
    for name in ("replace", "rename", "link"):
        setattr(os, name, _between_points(getattr(os, name)))


if __name__ == "__main__":
    del sys.argv[0]
    _count_writes()
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
