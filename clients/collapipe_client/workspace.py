"""The folder of a local testbed, which has its state, its logs, and a record of its processes.

.collapipe/
  certificates/  the authority, and the certificate and key of each process and of the user
  emulation.json what the hosts emulate, if they emulate anything
  testbed.json   the processes that were started
  lock           locked by the command that starts or ends processes
  state/NAME/    state of a service; no command deletes it
  logs/NAME.log  log of a service
  run/NAME.json  addresses of a service; the service writes it when it is ready
  traces/        what `collapipe trace` has written
"""

import fcntl
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from pydantic import TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass

from collapipe.documents import read_document
from collapipe.errors import CorruptDataError, WrongStateError
from collapipe.mistakes import first_mistake
from collapipe_client.processes import ProcessRecord
from collapipe_client.testbed_certificates import LocalCertificates

DEFAULT_ROOT = Path(".collapipe")


def free_disk_bytes(folder: Path) -> int:
    """Returns the free space of the disk that has a folder, or will have it."""
    folder = folder.absolute()
    existing = next(path for path in (folder, *folder.parents) if path.exists())
    return shutil.disk_usage(existing).free


@dataclass(frozen=True)
class WorkspaceRecord:
    """The processes that were started in a workspace.

    Args:
        detached: Whether the processes outlive the command that started them, as for `collapipe up`.
        shape: The devices of each cluster as (memory_bytes, speed).
        processes: The scheduler comes first.
        insecure: Whether they speak plain text, as those of earlier versions do.
    """

    detached: bool
    shape: list[list[tuple[int, float]]]
    processes: tuple[ProcessRecord, ...] = ()
    insecure: bool = True

    def process(self, name: str) -> ProcessRecord | None:
        """Finds a process."""
        return next((process for process in self.processes if process.name == name), None)

    def with_process(self, process: ProcessRecord) -> "WorkspaceRecord":
        """Returns a record with this process, which replaces one of the same name."""
        by_name = {known.name: known for known in self.processes} | {process.name: process}
        return replace(self, processes=tuple(by_name.values()))

    @property
    def alive(self) -> list[ProcessRecord]:
        """The processes that are still alive."""
        return [process for process in self.processes if process.alive]


_RECORD = TypeAdapter(WorkspaceRecord)


class Workspace:
    """The folder of a local testbed, which is created when a command first needs it."""

    def __init__(self, root: Path = DEFAULT_ROOT) -> None:
        self.root = root.absolute()
        self.logs = self.root / "logs"
        self.run = self.root / "run"
        self.state = self.root / "state"
        self.traces = self.root / "traces"
        self.emulation_file = self.root / "emulation.json"
        self.certificates = LocalCertificates(self.root / "certificates")
        self._record_file = self.root / "testbed.json"

    def create(self) -> None:
        """Creates the folders, with a .gitignore that hides them from git."""
        try:
            for folder in (self.logs, self.run, self.state):
                folder.mkdir(parents=True, exist_ok=True)
            if self.root.stat().st_uid != os.getuid():
                raise WrongStateError(
                    f"the workspace {self.root} belongs to somebody else, who could read and change what is in it: choose another with "
                    "--workspace DIR"
                )
            self.root.chmod(0o700)  # It has weights, optimizer states and logs.
            (self.root / ".gitignore").write_text("*\n", encoding="utf-8")
        except OSError as error:
            raise WrongStateError(
                f"the workspace {self.root} cannot be written: {error.strerror}: choose another "
                "with --workspace DIR"
            ) from error

    def log_file(self, name: str) -> Path:
        """Returns the path of a service's log."""
        return self.logs / f"{name}.log"

    def ready_file(self, name: str) -> Path:
        """Returns the path of the file that a service writes when it is ready."""
        return self.run / f"{name}.json"

    def state_dir(self, name: str) -> Path:
        """Returns the folder for a service's state."""
        return self.state / name

    def page_link(self) -> str:
        """Returns the present link of the page in the browser; empty if the scheduler serves none. It works once."""
        page = read_document(self.state_dir("scheduler") / "page.json") or {}
        return str(page.get("link", ""))

    def read_record(self) -> WorkspaceRecord | None:
        """Reads the record; `None` if nothing was started or everything was ended."""
        try:
            return _RECORD.validate_json(self._record_file.read_bytes())
        except FileNotFoundError:
            return None
        except OSError as error:
            raise WrongStateError(
                f"the workspace {self.root} cannot be read: {error.strerror}: choose another with --workspace DIR"
            ) from error
        except ValidationError as error:
            raise CorruptDataError(
                f"{self._record_file} is damaged ({first_mistake(error)}): end the processes that it lists by hand, and "
                "delete it"
            ) from error

    def write_record(self, record: WorkspaceRecord | None) -> None:
        """Replaces the record atomically; `None` removes it."""
        if record is None:
            self._record_file.unlink(missing_ok=True)
        else:
            replace_text(self._record_file, _RECORD.dump_json(record, indent=1).decode())

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Locks the workspace, so that no other command starts or ends processes in it.

        The kernel releases the lock when this process ends, even if it is killed.

        Raises:
            WrongStateError: Another command has the lock.
        """
        self.create()
        with open(self.root / "lock", "a+", encoding="utf-8") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                file.seek(0)
                owner = file.read().strip() or "unknown"
                raise WrongStateError(
                    f"another collapipe command (pid {owner}) is working in {self.root}: wait for "
                    "it, end it, or use another folder with --workspace DIR"
                ) from None
            file.truncate(0)
            file.write(str(os.getpid()))
            file.flush()
            yield


def replace_text(path: Path, text: str) -> None:
    """Replaces a file atomically: a reader sees the old text or the new text."""
    temporary = path.with_suffix(f".{os.getpid()}.tmp")
    temporary.write_text(text, encoding="utf-8")
    os.replace(temporary, path)
