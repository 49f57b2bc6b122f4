import hashlib
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from collapipe.errors import CorruptDataError, InvalidInputError, NotFoundError
from collapipe.weights.blob_store import BlobStore, JobStores

DATA = bytes(range(256)) * 9000  # more than two pieces
DIGEST = hashlib.sha256(DATA).hexdigest()


@pytest.fixture
def store(tmp_path: Path) -> BlobStore:
    return BlobStore(tmp_path / "blobs")


def files(store: BlobStore) -> list[str]:
    return sorted(path.name for path in store.path(DIGEST).parent.iterdir())


def test_blob_comes_back_from_any_offset(store: BlobStore) -> None:
    store.put(DIGEST, [DATA[:100], memoryview(DATA)[100:]])
    assert DIGEST in store
    assert store.total_bytes(DIGEST) == len(DATA)
    assert store.read_checked(DIGEST) == store.path(DIGEST).read_bytes() == DATA
    for offset in (0, 1, 1 << 20, len(DATA) - 1, len(DATA)):
        assert b"".join(store.read(DIGEST, offset)) == DATA[offset:]


def test_blob_is_stored_once_under_its_digest(store: BlobStore, tmp_path: Path) -> None:
    assert store.put_bytes(DATA) == DIGEST
    with pytest.raises(CorruptDataError):
        store.put(DIGEST, [b"other"])
    store.put(DIGEST, [DATA])
    arrived, new = tmp_path / "arrived", hashlib.sha256(b"new").hexdigest()
    store.path(DIGEST).write_bytes(b"damaged")  # What arrives was checked, so it is better.
    for digest, data in ((DIGEST, DATA), (new, b"new")):
        arrived.write_bytes(data)
        store.adopt(digest, arrived)
        assert not arrived.exists()
    assert files(store) == sorted([DIGEST, new])
    assert b"".join(store.read(DIGEST)) == DATA


def test_blob_whose_file_has_changed_is_refused_with_its_path(store: BlobStore) -> None:
    store.put_bytes(DATA)
    store.path(DIGEST).write_bytes(DATA[:-1] + b"x")
    with pytest.raises(CorruptDataError, match=str(store.path(DIGEST))):
        store.read_checked(DIGEST)


def test_transfer_that_breaks_off_or_brings_another_digest_stores_nothing(store: BlobStore) -> None:
    def pieces() -> Iterator[bytes]:
        yield DATA[:100]
        assert DIGEST not in store, "the blob is visible before it is complete"
        raise ConnectionError("broken")

    with pytest.raises(ConnectionError):
        store.put(DIGEST, pieces())
    with pytest.raises(CorruptDataError, match=DIGEST):
        store.put(DIGEST, [DATA[:-1]])
    assert files(store) == []


def test_partial_files_of_a_killed_process_are_removed_at_start(store: BlobStore) -> None:
    store.put_bytes(DATA)
    (store.path(DIGEST).parent / f"{'0' * 64}.1234.partial").write_bytes(b"half")
    BlobStore(store.path(DIGEST).parent)
    assert files(store) == [DIGEST]


def test_keep_only_deletes_every_other_blob_and_disturbs_no_transfer(store: BlobStore) -> None:
    kept = store.put_bytes(b"kept")
    store.put_bytes(b"lost")

    def pieces() -> Iterator[bytes]:
        yield DATA[:100]
        store.keep_only({kept, "0" * 64})
        yield DATA[100:]

    store.put(DIGEST, pieces())
    assert files(store) == sorted([kept, DIGEST])
    assert b"".join(store.read(DIGEST)) == DATA


def test_absent_blob_is_not_found(store: BlobStore) -> None:
    for ask in (store.total_bytes, store.read_checked, lambda digest: next(store.read(digest))):
        with pytest.raises(NotFoundError, match=DIGEST):
            ask(DIGEST)


@pytest.mark.parametrize(
    "name", ["", "../commit.json", DIGEST.upper(), DIGEST[:-1], "/" + DIGEST[1:]]
)
def test_name_that_is_no_digest_is_not_found(store: BlobStore, name: str) -> None:
    with pytest.raises(NotFoundError, match="SHA-256"):
        store.path(name)


# --- one store for each job


@pytest.fixture
def stores(tmp_path: Path) -> JobStores:
    return JobStores(tmp_path)


def test_edge_server_finds_only_the_vocabulary_of_a_hidden_job(stores: JobStores) -> None:
    hidden = stores.store("hidden")
    vocabulary, moments = hidden.put_bytes(b"words"), hidden.put_bytes(b"moments")
    shown = stores.store("shown").put_bytes(b"others")
    stores.hide_from_outsiders("hidden", vocabulary)
    for digest in (vocabulary, shown):
        assert stores.find(digest, for_outsider=True)
    assert stores.find(moments)
    with pytest.raises(NotFoundError, match=moments):
        stores.find(moments, for_outsider=True)


@pytest.mark.parametrize(
    "job_id",
    ["", "..", ".", ".hidden", "../x", "a/b", "/etc", "a\\b", "a\n", "a b", "x" * 129, "ü"],
)
def test_job_name_that_is_not_safe_in_a_path_is_refused(tmp_path: Path, job_id: str) -> None:
    stores = JobStores(tmp_path / "state")
    stores.store("job").put_bytes(DATA)
    before = sorted(tmp_path.rglob("*"))
    for ask in (stores.directory, stores.store, stores.delete_job):
        with pytest.raises(InvalidInputError, match=re.escape(repr(job_id))):
            ask(job_id)
    assert sorted(tmp_path.rglob("*")) == before


def test_blob_of_any_open_job_is_found_and_jobs_do_not_share_blobs(stores: JobStores) -> None:
    one, two = stores.store("one"), stores.store("two")
    two.put_bytes(DATA)
    assert DIGEST not in one
    assert stores.store("one") is one
    found = stores.find(DIGEST)
    assert found.total_bytes == len(DATA)
    assert b"".join(found.read(5)) == DATA[5:]
    with pytest.raises(NotFoundError, match="0" * 64):
        stores.find("0" * 64)


def test_store_survives_a_restart(stores: JobStores, tmp_path: Path) -> None:
    stores.store("one").put_bytes(DATA)
    assert b"".join(JobStores(tmp_path).store("one").read(DIGEST)) == DATA


def test_job_in_use_is_deleted_after_its_last_use(stores: JobStores, tmp_path: Path) -> None:
    stores.store("job").put_bytes(DATA)
    with stores.using("job"):
        with stores.using("job"):
            assert not stores.delete_job("job")
        assert not stores.delete_job("job")
        assert stores.find(DIGEST).total_bytes == len(DATA)
    assert stores.delete_job("job")
    assert list((tmp_path / "jobs").iterdir()) == []
    with pytest.raises(NotFoundError):
        stores.find(DIGEST)


def test_deleting_a_job_leaves_the_others(stores: JobStores, tmp_path: Path) -> None:
    for job_id in ("job", "job-2"):
        stores.store(job_id).put_bytes(DATA)
    with stores.using("job-2"):
        assert stores.delete_job("job")
    assert stores.delete_job("unknown")
    assert [path.name for path in (tmp_path / "jobs").iterdir()] == ["job-2"]
    assert b"".join(stores.find(DIGEST).read()) == DATA


def test_deletion_that_a_process_left_unfinished_is_finished(tmp_path: Path) -> None:
    blob = BlobStore(tmp_path / "jobs" / ".job" / "blobs").path(DIGEST)
    blob.write_bytes(DATA)
    JobStores(tmp_path).store("job").put_bytes(DATA)
    assert JobStores(tmp_path).delete_job("job")
    assert list((tmp_path / "jobs").iterdir()) == []


def test_what_else_is_stored_of_a_job_is_deleted_last_and_tried_again(tmp_path: Path) -> None:
    failures = [OSError("the disk is full")]
    forgotten: list[str] = []

    def forget(job_id: str) -> None:
        assert not (tmp_path / "jobs" / job_id).exists()
        if failures:
            raise failures.pop()
        forgotten.append(job_id)

    stores = JobStores(tmp_path, forget)
    stores.store("job").put_bytes(DATA)
    with pytest.raises(OSError, match="full"):
        stores.delete_job("job")
    assert stores.delete_job("job")
    assert forgotten == ["job"]
