"""The folder of a local testbed: state, logs, and a record of the processes that run.

.collapipe/
  emulation.json the world that the processes seem to be in, if it is not this machine
  testbed.json   which processes run, by pid and start; written before they are waited for
  lock           held by the command that owns the testbed
  state/NAME/    what a service keeps; survives everything
  logs/NAME.log  what a service says
  run/NAME.json  written by a service when it serves
"""

import fcntl
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from collapipe.errors import CorruptDataError, WrongStateError
from collapipe_client.processes import ProcessRecord

DEFAULT_ROOT = Path(".collapipe")


@dataclass(frozen=True)
class WorkspaceRecord:
    """What runs in a workspace.

    Args:
        detached: True for `collapipe up`: the processes outlive the command that started them.
        shape: Devices of each cluster as (memory_bytes, speed), to compare with what is asked for.
        processes: The processes, the scheduler first.
    """

    detached: bool
    shape: list[list[tuple[int, float]]]
    processes: tuple[ProcessRecord, ...] = ()

    def process(self, name: str) -> ProcessRecord | None:
        """Finds a process by its name."""
        return next((process for process in self.processes if process.name == name), None)

    def with_process(self, process: ProcessRecord) -> "WorkspaceRecord":
        """Adds a process, in the place of one of the same name."""
        names = [known.name for known in self.processes]
        if process.name not in names:
            return replace(self, processes=(*self.processes, process))
        return replace(
            self,
            processes=tuple(
                process if known.name == process.name else known for known in self.processes
            ),
        )

    @property
    def alive(self) -> list[ProcessRecord]:
        """The processes that still run."""
        return [process for process in self.processes if process.alive]


class Workspace:
    """The folder of a local testbed.

    Args:
        root: The folder; made when it is first written.
    """

    def __init__(self, root: Path = DEFAULT_ROOT) -> None:
        self.root = root.absolute()
        self.logs = self.root / "logs"
        self.run = self.root / "run"
        self.state = self.root / "state"
        self.emulation_file = self.root / "emulation.json"

    def create(self) -> None:
        """Makes the folders; they ignore themselves in git."""
        try:
            for folder in (self.logs, self.run, self.state):
                folder.mkdir(parents=True, exist_ok=True)
            (self.root / ".gitignore").write_text("*\n", encoding="utf-8")
        except OSError as error:
            raise WrongStateError(
                f"the workspace {self.root} cannot be written: {error.strerror}: choose another "
                "with --workspace DIR"
            ) from error

    def log_file(self, name: str) -> Path:
        """Where a service logs."""
        return self.logs / f"{name}.log"

    def ready_file(self, name: str) -> Path:
        """What a service writes when it serves."""
        return self.run / f"{name}.json"

    def state_dir(self, name: str) -> Path:
        """What a service keeps."""
        return self.state / name

    def read_record(self) -> WorkspaceRecord | None:
        """Reads what runs here; `None` when nothing was started, or all was ended in order."""
        document = read_json(self.root / "testbed.json")
        if document is None:
            return None
        try:
            return WorkspaceRecord(
                detached=document["detached"],
                shape=[
                    [(int(memory), float(speed)) for memory, speed in c] for c in document["shape"]
                ],
                processes=tuple(ProcessRecord(**process) for process in document["processes"]),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise CorruptDataError(
                f"{self.root / 'testbed.json'} is damaged ({error!r}): end what it lists by hand, "
                "and delete it"
            ) from error

    def write_record(self, record: WorkspaceRecord | None) -> None:
        """Replaces the record atomically; `None` removes it."""
        path = self.root / "testbed.json"
        if record is None:
            path.unlink(missing_ok=True)
            return
        replace_text(path, json.dumps(asdict(record), indent=1))

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Makes this the only command that starts or ends processes here.

        The lock goes with its process, so a killed command leaves none behind.

        Raises:
            WrongStateError: Another command has it.
        """
        self.create()
        with open(self.root / "lock", "a+", encoding="utf-8") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                file.seek(0)
                owner = file.read().strip() or "unknown"
                raise WrongStateError(
                    f"another collapipe command (pid {owner}) is at work in {self.root}: wait for "
                    "it, end it, or use another folder with --workspace DIR"
                ) from None
            file.truncate(0)
            file.write(str(os.getpid()))
            file.flush()
            yield


def replace_text(path: Path, text: str) -> None:
    """Replaces a file atomically: a reader finds the old text or the new."""
    temporary = path.with_suffix(f".{os.getpid()}.tmp")
    temporary.write_text(text, encoding="utf-8")
    os.replace(temporary, path)


def read_json(path: Path) -> dict[str, Any] | None:
    """Reads a JSON object; `None` when there is no file."""
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except ValueError as error:
        raise CorruptDataError(f"{path} is damaged ({error}): delete it") from error
    if not isinstance(document, dict):
        raise CorruptDataError(f"{path} is damaged (not an object): delete it")
    return document
