"""Keeps blobs on disk, as files that are named by their SHA-256.

A file gets its name only when the blob is complete and its digest is checked. So the store is consistent even
after a crash. Blobs that no commit refers to are deleted later, by `BlobStore.keep_only`.
"""

import hashlib
import logging
import os
import re
import shutil
import threading
import uuid
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from collapipe.documents import name_full_disk, sync_directory
from collapipe.errors import CorruptDataError, InvalidInputError, NotFoundError

logger = logging.getLogger(__name__)

Buffer = bytes | memoryview


class BlobStore:
    """A directory of blobs. The constructor makes it if it does not exist."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        directory.mkdir(parents=True, exist_ok=True)
        for leftover in directory.glob("*.partial"):
            leftover.unlink()

    def __contains__(self, digest: str) -> bool:
        return self.path(digest).is_file()

    def path(self, digest: str) -> Path:
        """Returns the path of a blob, stored or not; raises `NotFoundError` for a bad digest."""
        if len(digest) != 64 or not set(digest) <= set("0123456789abcdef"):
            raise NotFoundError(
                f"{digest!r} is not a SHA-256 digest: give its 64 hexadecimal digits"
            )
        return self.directory / digest

    def put(self, digest: str, pieces: Iterable[Buffer], *, is_checked: bool = False) -> None:
        """Stores a blob and checks its digest. A blob that is already stored is replaced by the same bytes.

        Args:
            is_checked: Whether the caller has hashed the pieces, so that this is not done again.

        Raises:
            CorruptDataError: The pieces do not have that digest. Nothing is stored.
        """
        target = self.path(digest)
        checksum = hashlib.sha256()
        temporary = self.directory / f"{digest}.{uuid.uuid4().hex}.partial"
        try:
            with name_full_disk(temporary), open(temporary, "wb") as file:
                for piece in pieces:
                    if not is_checked:
                        checksum.update(piece)
                    file.write(piece)
                if not is_checked and checksum.hexdigest() != digest:
                    raise CorruptDataError(
                        f"a blob arrived with SHA-256 {checksum.hexdigest()} instead of {digest}: "
                        "the transfer or the sender's disk garbles data; run the round again"
                    )
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, target)
            sync_directory(self.directory)  # a document may refer to the blob from now on
        finally:
            temporary.unlink(missing_ok=True)

    def adopt(self, digest: str, path: Path) -> None:
        """Moves a file of the same file system into the store. The caller has checked its digest, and synced it.

        The blob survives a crash of the machine after `sync`.
        """
        if path.exists() or digest not in self:  # Units with equal averages share a file.
            os.replace(path, self.path(digest))

    def sync(self) -> None:
        """Makes blobs that were adopted survive a crash of the machine."""
        sync_directory(self.directory)

    def put_bytes(self, data: bytes) -> str:
        """Stores bytes as a blob and returns the digest."""
        digest = hashlib.sha256(data).hexdigest()
        if digest not in self:
            self.put(digest, [data])
        return digest

    def total_bytes(self, digest: str) -> int:
        """Returns the size of a blob; raises `NotFoundError`."""
        try:
            return self.path(digest).stat().st_size
        except FileNotFoundError:
            raise NotFoundError(f"blob {digest} is not stored here") from None

    def read(self, digest: str, offset: int = 0) -> Iterator[bytes]:
        """Yields the bytes from an offset on, in pieces of at most 1 MiB; raises `NotFoundError`."""
        self.total_bytes(digest)
        with open(self.path(digest), "rb") as file:
            file.seek(offset)
            while piece := file.read(1 << 20):
                yield piece

    def read_checked(self, digest: str) -> bytes:
        """Returns a whole blob.

        Raises:
            NotFoundError: The blob is not stored here.
            CorruptDataError: The file has changed since it was stored.
        """
        data = b"".join(self.read(digest))
        check_digest(self.path(digest), hashlib.sha256(data))
        return data

    def check(self, digest: str) -> None:
        """Reads a whole blob, piece by piece. Raises the errors of `read_checked`."""
        self.total_bytes(digest)
        check_file(self.path(digest))

    def keep_only(self, digests: set[str]) -> None:
        for path in self.files():
            if path.name not in digests:
                path.unlink(missing_ok=True)

    def files(self) -> list[Path]:
        """Returns the files of all blobs."""
        return [path for path in self.directory.iterdir() if path.suffix != ".partial"]


def check_file(path: Path) -> None:
    """Reads the file of a blob, piece by piece; raises `CorruptDataError` if it has changed since it was stored."""
    checksum = hashlib.sha256()
    with open(path, "rb") as file:
        while piece := file.read(1 << 20):
            checksum.update(piece)
    check_digest(path, checksum)


def check_digest(path: Path, checksum: "hashlib._Hash") -> None:
    """Refuses the file of a blob that has another digest than its name; raises `CorruptDataError`."""
    if checksum.hexdigest() != path.name:
        raise CorruptDataError(
            f"{path} is damaged: its bytes do not have the SHA-256 of its name; restore the file, or delete it and resume the job, "
            "which fetches it again if another host has it, or go back to an earlier commit with `collapipe rollback`"
        )


@dataclass(frozen=True)
class StoredBlob:
    """A blob in a store."""

    store: BlobStore
    digest: str

    @property
    def total_bytes(self) -> int:
        return self.store.total_bytes(self.digest)

    def read(self, offset: int = 0) -> Iterator[bytes]:
        return self.store.read(self.digest, offset)

    def check(self) -> None:
        """Reads the whole blob; raises `CorruptDataError` if it is damaged."""
        self.store.check(self.digest)


class JobStores:
    """The directories of all jobs of a service, and the blobs in them.

    Args:
        directory: The state directory of the service.
        forget: Deletes what else the service has stored of a job. It is called after the blobs are deleted.
    """

    def __init__(
        self, directory: Path, forget: Callable[[str], None] = lambda job_id: None
    ) -> None:
        self._directory = directory / "jobs"
        self._forget = forget
        self._stores: dict[str, BlobStore] = {}
        self._hidden: dict[str, str] = {}
        """The jobs that are hidden from hosts outside of the cluster, with the digest of what it may fetch nevertheless."""
        self._uses: Counter[str] = Counter()
        self._lock = threading.Lock()

    def directory(self, job_id: str) -> Path:
        """Returns the directory of a job; raises `InvalidInputError` for a name that is no safe path."""
        if not re.fullmatch(r"[A-Za-z0-9_.-]{1,128}", job_id) or job_id.startswith("."):
            raise InvalidInputError(
                f"{job_id!r} is no name of a job: use at most 128 letters, digits, '_', '-' and '.', "
                "and do not start with '.'"
            )
        return self._directory / job_id

    def delete(self, folder: str) -> None:
        """Deletes a folder of this name in the directory of every job."""
        for path in self._directory.glob(f"*/{folder}"):
            shutil.rmtree(path, ignore_errors=True)

    @contextmanager
    def using(self, job_id: str) -> Iterator[None]:
        """Keeps the directory of a job from being deleted meanwhile."""
        with self._lock:
            self._uses[job_id] += 1
        try:
            yield
        finally:
            with self._lock:
                self._uses[job_id] -= 1
                self._uses += Counter()  # Forgets jobs that nobody uses.

    def delete_job(self, job_id: str) -> bool:
        """Deletes the directory of a job and what else is stored of it, unless it is in use. Returns whether all is gone.

        Raises:
            InvalidInputError: The name is no safe path.
            CollapipeError, OSError: Something of it cannot be deleted. The next call goes on with that.
        """
        directory = self.directory(job_id)
        # No job has such a name. An earlier process may have died before it had removed all files.
        doomed = directory.with_name(f".{job_id}")
        shutil.rmtree(doomed, ignore_errors=True)
        with self._lock:
            if job_id in self._uses:
                return False
            self._stores.pop(job_id, None)
            self._hidden.pop(job_id, None)
            if directory.exists():
                os.replace(directory, doomed)
        if doomed.exists():
            shutil.rmtree(doomed)
            logger.info("deleted %s, because the scheduler has deleted its job", directory)
        with self._lock:
            if job_id in self._uses or directory.exists():
                return False
        self._forget(job_id)
        return not directory.exists()  # A late call may have made it anew.

    def store(self, job_id: str) -> BlobStore:
        """Returns the store of a job's blobs, and makes it on the first call."""
        with self._lock:
            if job_id not in self._stores:
                self._stores[job_id] = BlobStore(self.directory(job_id) / "blobs")
            return self._stores[job_id]

    def hide_from_outsiders(self, job_id: str, but_digest: str) -> None:
        """Hides the blobs of a job from hosts outside of the cluster, because optimizer states tell what a cluster has trained.

        Args:
            but_digest: The vocabulary, which other hosts need.
        """
        with self._lock:
            self._hidden[job_id] = but_digest

    def find(self, digest: str, *, for_outsider: bool = False) -> StoredBlob:
        """Finds a blob in any store that `store` has returned; raises `NotFoundError`.

        Args:
            for_outsider: Finds no blob that is hidden from hosts outside of the cluster.
        """
        with self._lock:
            stores, hidden = list(self._stores.items()), dict(self._hidden)
        for job_id, store in stores:
            if for_outsider and hidden.get(job_id, digest) != digest:
                continue
            if digest in store:
                return StoredBlob(store, digest)
        raise NotFoundError(f"blob {digest} is not stored here")
