"""Keeps blobs that jobs share, which are frozen weights, on disk across jobs."""

import os
import shutil
import tempfile
import threading
from collections.abc import Callable, Collection
from pathlib import Path

from collapipe.errors import CorruptDataError, NotFoundError
from collapipe.weights.blob_store import BlobStore, StoredBlob

_LEAST_FREE_BYTES = 2_000_000_000
"""Blobs that are not in use are deleted until the disk has this much room."""


class _FrozenBlob(StoredBlob):
    """A blob of a cache. If it is damaged, `check` deletes it, and the next attempt at the job makes or fetches it again."""

    def check(self) -> None:
        try:
            super().check()
        except CorruptDataError:
            self.store.path(self.digest).unlink(missing_ok=True)
            raise


class BlobCache:
    """A store of blobs from which those that are not in use are deleted, the longest unused first.

    Args:
        directory: `None` for a temporary directory, which ends with this process.
        limit_bytes: Disk that blobs may take before others than those in use are deleted; `None` for no limit.
    """

    def __init__(self, directory: Path | None = None, limit_bytes: int | None = None) -> None:
        self._directory = directory
        self._limit_bytes = limit_bytes
        self._opening = threading.Lock()
        self._fetching = threading.Lock()
        self._temporary: tempfile.TemporaryDirectory[str] | None = None
        self._store: BlobStore | None = None
        self._checked: set[str] = set()

    @property
    def store(self) -> BlobStore:
        """The store. The first call makes its directory."""
        with self._opening:
            if self._store is None:
                if self._directory is None:
                    self._temporary = tempfile.TemporaryDirectory(prefix="collapipe-")
                    self._directory = Path(self._temporary.name)
                self._store = BlobStore(self._directory)
            return self._store

    def __contains__(self, digest: str) -> bool:
        return self._directory is not None and digest in self.store

    def find(self, digest: str) -> StoredBlob:
        """Finds a blob; raises `NotFoundError`."""
        if digest not in self:
            raise NotFoundError(
                f"the frozen weights {digest} are not kept here: restore the pretrained directory, and resume the job"
            )
        return _FrozenBlob(self.store, digest)

    def file(
        self, digest: str, fetch: Callable[[BlobStore], None], in_use: Collection[str] = ()
    ) -> Path:
        """Returns the file of a blob, whose bytes this process has checked once.

        Args:
            fetch: Puts the blob into the store. Called if the blob is not there, or damaged.
            in_use: Blobs that are not deleted to make room.
        """
        store = self.store
        path = store.path(digest)
        with self._fetching:  # An edge server configures the stages of several clusters at once.
            if digest in store and digest not in self._checked:
                try:
                    store.check(digest)
                except CorruptDataError:
                    path.unlink(missing_ok=True)
            if digest not in store:
                self._make_room(in_use)
                fetch(store)
            self._checked.add(digest)
            os.utime(path)
        return path

    def _make_room(self, in_use: Collection[str]) -> None:
        if self._limit_bytes is None:
            return
        files = sorted(
            ((path, path.stat()) for path in self.store.files()),
            key=lambda entry: entry[1].st_mtime,
        )
        excess = max(
            sum(status.st_size for _, status in files) - self._limit_bytes,
            _LEAST_FREE_BYTES - shutil.disk_usage(self.store.directory).free,
        )
        for path, status in files:
            if excess > 0 and path.name not in in_use:
                path.unlink(missing_ok=True)
                excess -= status.st_size
