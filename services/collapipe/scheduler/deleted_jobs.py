"""Removes the files of deleted jobs, and remembers their ids for the hosts that keep files of them.

A job is deleted as soon as its directory has moved to the folder `deleted`. The rest may be cut short at any moment, and
goes on at the next start. `deleted.json` has the ids.
"""

import logging
import os
import shutil
import threading
from pathlib import Path

from collapipe.documents import read_document, sync_directory, write_document
from collapipe.errors import CorruptDataError

logger = logging.getLogger(__name__)

_REMEMBERED = 1000
"""Ids that are remembered. A host that was away during more deletions keeps what it has of the older ones."""

_REMEDY = (
    "restore it, or delete it. Hosts that were away during earlier deletions then keep their files of those jobs, in the folder jobs of "
    "their --state-dir, until somebody deletes them there"
)


class DeletedJobs:
    """The last deletions of a scheduler. `directory` is its state directory."""

    def __init__(self, directory: Path) -> None:
        self._folder = directory / "deleted"
        self._folder.mkdir(parents=True, exist_ok=True)
        self._path = directory / "deleted.json"
        self._lock = threading.Lock()
        types = {"num_deletions": int, "job_ids": list}
        self._document = read_document(self._path, _REMEDY, types) or {
            "num_deletions": 0,
            "job_ids": [],
        }
        """Replaced as a whole, so that heartbeats need not wait for the disk."""
        # Every answer to a heartbeat has them, so no host could go on with others.
        for job_id in self._document["job_ids"]:
            if not isinstance(job_id, str):
                raise CorruptDataError(
                    f"{self._path} is damaged ({job_id!r:.80} is no id): {_REMEDY}"
                )
        if not 0 <= self._document["num_deletions"] < 1 << 62:
            number = self._document["num_deletions"]
            raise CorruptDataError(
                f"{self._path} is damaged (num_deletions is {number}): {_REMEDY}"
            )
        self.finish()

    def take(self, directory: Path) -> None:
        """Deletes the job in a directory for good. `finish` removes its files."""
        os.replace(directory, self._folder / directory.name)
        sync_directory(self._folder)
        sync_directory(directory.parent)

    def finish(self) -> None:
        """Removes the files of all jobs that were taken, and remembers their ids."""
        with self._lock:
            for path in self._folder.iterdir():
                try:
                    # On a full disk, this makes room for the document.
                    shutil.rmtree(path / "rounds", ignore_errors=True)
                    self._remember(path.name)
                    shutil.rmtree(path)
                except OSError:
                    logger.exception("the next start removes the rest of job %s", path.name)

    def after(self, num_deletions: int) -> tuple[list[str], int]:
        """Returns the remembered ids after so many deletions, the oldest first, and the number of all deletions."""
        document = self._document  # Another thread may replace it meanwhile.
        total, job_ids = document["num_deletions"], document["job_ids"]
        return job_ids[max(0, len(job_ids) - (total - num_deletions)) :], total

    def _remember(self, job_id: str) -> None:
        total, job_ids = self._document["num_deletions"], self._document["job_ids"]
        if job_id in job_ids:
            return
        document = {
            "num_deletions": total + 1,
            "job_ids": [*job_ids, job_id][-_REMEMBERED:],
        }
        write_document(self._path, document)
        self._document = document
