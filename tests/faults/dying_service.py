"""Runs a service that ends itself at one of its writes, as a machine that loses power: `DEATH_FILE=... python dying_service.py MODULE
ARGUMENTS`.

While the file exists, each write counts down the number in it, once before the write and once after it. At 0, the service deletes the
file, and kills itself with SIGKILL. A write is a transaction of a database, or the replacement of a file.
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

_CHANGES = ("COMMIT", "INSERT", "UPDATE", "DELETE", "REPLACE")
_lock = threading.Lock()


def _pass_a_point() -> None:
    file = Path(os.environ["DEATH_FILE"])
    with _lock:
        if not file.exists():
            return
        left = int(file.read_text())
        if left > 0:
            file.write_text(str(left - 1))
            return
        file.unlink()
        os.kill(os.getpid(), signal.SIGKILL)


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
        is_alone = not self._is_open and statement.lstrip().startswith(_CHANGES)
        return (changing if is_commit or is_alone else execute)(self, statement, *values)

    Database.execute = counted  # type: ignore[method-assign]
    for name in ("replace", "rename", "link"):
        setattr(os, name, _between_points(getattr(os, name)))


if __name__ == "__main__":
    del sys.argv[0]
    _count_writes()
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
