"""Keeps blobs that jobs share, such as frozen weights, on disk across jobs."""

import os
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path

from collapipe.errors import CorruptDataError, NotFoundError
from collapipe.weights.blob_store import BlobStore, StoredBlob


class BlobCache:
    """A store of blobs from which those of earlier jobs are deleted, the longest unused first.

    Args:
        directory: `None` for a temporary directory, which ends with this process.
        limit_bytes: Disk that blobs of earlier jobs may take together with those in use; `None` for no limit.
    """

    def __init__(self, directory: Path | None = None, limit_bytes: int | None = None) -> None:
        self._directory = directory
        self._limit_bytes = limit_bytes
        self._lock = threading.Lock()
        self._temporary: tempfile.TemporaryDirectory[str] | None = None
        self._store: BlobStore | None = None
        self._checked: set[str] = set()

    @property
    def store(self) -> BlobStore:
        """The store. The first call makes its directory."""
        with self._lock:
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
            raise NotFoundError(f"blob {digest} is not kept here")
        return StoredBlob(self.store, digest)

    def file(self, digest: str, fetch: Callable[[BlobStore], None]) -> Path:
        """Returns the file of a blob, whose bytes this process has checked once.

        Args:
            fetch: Puts the blob into the store. Called if the blob is not there, or damaged.
        """
        store = self.store
        path = store.path(digest)
        if digest in store and digest not in self._checked:
            try:
                store.check(digest)
            except CorruptDataError:
                path.unlink(missing_ok=True)
        if digest not in store:
            fetch(store)
        self._checked.add(digest)
        os.utime(path)
        return path

    def make_room(self, in_use: set[str]) -> None:
        """Deletes blobs until the others fit into the limit. Keeps those in use."""
        if self._limit_bytes is None:
            return
        files = sorted(
            ((path, path.stat()) for path in self.store.files()),
            key=lambda entry: entry[1].st_mtime,
        )
        excess = sum(status.st_size for _, status in files) - self._limit_bytes
        for path, status in files:
            if excess > 0 and path.name not in in_use:
                path.unlink(missing_ok=True)
                excess -= status.st_size
