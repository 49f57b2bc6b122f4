"""A directory of blobs named by their SHA-256.

A blob appears under its name only when it is complete and its digest was checked, so the store is
consistent at every moment; what is not referenced by a commit is collected later.
"""

import hashlib
import os
import re
import threading
import uuid
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from collapipe.documents import naming, sync_directory
from collapipe.errors import CorruptDataError, InvalidInputError, NotFoundError

Buffer = bytes | memoryview


class BlobStore:
    """Blobs on disk.

    Args:
        directory: Made when absent.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        directory.mkdir(parents=True, exist_ok=True)
        for leftover in directory.glob("*.partial"):
            leftover.unlink()

    def __contains__(self, digest: str) -> bool:
        return self.path(digest).is_file()

    def path(self, digest: str) -> Path:
        """Where a blob is, or would be."""
        if len(digest) != 64 or not set(digest) <= set("0123456789abcdef"):
            raise NotFoundError(f"{digest!r} is not a SHA-256 digest in hexadecimal")
        return self._directory / digest

    def put(self, digest: str, pieces: Iterable[Buffer]) -> None:
        """Stores a blob and checks it; storing it twice is harmless.

        Raises:
            CorruptDataError: The pieces do not have that digest; nothing is stored.
        """
        target = self.path(digest)
        checksum = hashlib.sha256()
        temporary = self._directory / f"{digest}.{uuid.uuid4().hex}.partial"
        try:
            with naming(temporary), open(temporary, "wb") as file:
                for piece in pieces:
                    checksum.update(piece)
                    file.write(piece)
                if checksum.hexdigest() != digest:
                    raise CorruptDataError(
                        f"a blob arrived with SHA-256 {checksum.hexdigest()} instead of {digest}: "
                        "the transfer or the sender's disk garbles data; run the round again"
                    )
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, target)
            sync_directory(self._directory)  # before a document names it
        finally:
            temporary.unlink(missing_ok=True)

    def put_bytes(self, data: bytes) -> str:
        """Stores bytes and returns their digest."""
        digest = hashlib.sha256(data).hexdigest()
        if digest not in self:
            self.put(digest, [data])
        return digest

    def total_bytes(self, digest: str) -> int:
        """Size of a blob; raises `NotFoundError`."""
        try:
            return self.path(digest).stat().st_size
        except FileNotFoundError:
            raise NotFoundError(f"blob {digest} is not stored here") from None

    def read(self, digest: str, offset: int = 0) -> Iterator[bytes]:
        """The bytes of a blob from an offset on, in pieces of 1 MiB; raises `NotFoundError`."""
        self.total_bytes(digest)
        with open(self.path(digest), "rb") as file:
            file.seek(offset)
            while piece := file.read(1 << 20):
                yield piece

    def collect(self, keep: set[str]) -> int:
        """Deletes every blob that is not to be kept; returns how many bytes that freed."""
        freed = 0
        for path in self._directory.iterdir():
            if path.suffix != ".partial" and path.name not in keep:
                freed += path.stat().st_size
                path.unlink(missing_ok=True)
        return freed


@dataclass(frozen=True)
class StoredBlob:
    """A blob of a store."""

    store: BlobStore
    digest: str

    @property
    def total_bytes(self) -> int:
        """Its size."""
        return self.store.total_bytes(self.digest)

    def read(self, offset: int = 0) -> Iterator[bytes]:
        """Its bytes from an offset on."""
        return self.store.read(self.digest, offset)


class JobStores:
    """The directory of each job, and the blobs in it.

    Args:
        directory: Of the service.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory / "jobs"
        self._stores: dict[str, BlobStore] = {}
        self._lock = threading.Lock()

    def directory(self, job_id: str) -> Path:
        """Where a job's documents are; raises `InvalidInputError` for an identity that is no plain name."""
        if not re.fullmatch(r"[A-Za-z0-9_.-]{1,128}", job_id) or job_id.startswith("."):
            raise InvalidInputError(
                f"{job_id!r} is not a job identity: it has letters, digits, '_', '-' and '.' only"
            )
        return self._directory / job_id

    def store(self, job_id: str) -> BlobStore:
        """The blobs of a job."""
        with self._lock:
            if job_id not in self._stores:
                self._stores[job_id] = BlobStore(self.directory(job_id) / "blobs")
            return self._stores[job_id]

    def find(self, digest: str) -> StoredBlob:
        """Finds a blob in any open job; raises `NotFoundError`."""
        with self._lock:
            stores = list(self._stores.values())
        for store in stores:
            if digest in store:
                return StoredBlob(store, digest)
        raise NotFoundError(f"blob {digest} is not stored here")
