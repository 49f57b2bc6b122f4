import hashlib
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


def test_blob_comes_back(store: BlobStore) -> None:
    store.put(DIGEST, [DATA[:100], memoryview(DATA)[100:]])
    assert DIGEST in store
    assert b"".join(store.read(DIGEST)) == DATA
    assert store.total_bytes(DIGEST) == len(DATA)
    assert store.path(DIGEST).read_bytes() == DATA


def test_bytes_are_stored_under_their_digest(store: BlobStore) -> None:
    assert store.put_bytes(DATA) == DIGEST
    assert files(store) == [DIGEST]


@pytest.mark.parametrize("offset", [0, 1, 1 << 20, len(DATA) - 1, len(DATA)])
def test_reading_starts_at_an_offset(store: BlobStore, offset: int) -> None:
    store.put_bytes(DATA)
    assert b"".join(store.read(DIGEST, offset)) == DATA[offset:]


def test_blob_whose_file_has_changed_is_refused_with_its_path(store: BlobStore) -> None:
    store.put_bytes(DATA)
    assert store.read_checked(DIGEST) == DATA
    store.path(DIGEST).write_bytes(DATA[:-1] + b"x")
    with pytest.raises(CorruptDataError, match=f"{store.path(DIGEST)} is damaged"):
        store.read_checked(DIGEST)


def test_blob_with_another_digest_is_not_stored(store: BlobStore) -> None:
    with pytest.raises(CorruptDataError, match=f"instead of {DIGEST}"):
        store.put(DIGEST, [DATA[:-1]])
    assert DIGEST not in store
    assert files(store) == []


def test_transfer_that_breaks_off_stores_nothing(store: BlobStore) -> None:
    def pieces() -> Iterator[bytes]:
        yield DATA[:100]
        assert DIGEST not in store, "the blob is visible before it is complete"
        raise ConnectionError("broken")

    with pytest.raises(ConnectionError):
        store.put(DIGEST, pieces())
    assert files(store) == []


def test_storing_twice_keeps_the_blob(store: BlobStore) -> None:
    store.put(DIGEST, [DATA])
    with pytest.raises(CorruptDataError):
        store.put(DIGEST, [b"other"])
    store.put(DIGEST, [DATA])
    assert b"".join(store.read(DIGEST)) == DATA


def test_partial_files_of_a_killed_process_are_removed_at_start(store: BlobStore) -> None:
    store.put_bytes(DATA)
    (store.path(DIGEST).parent / f"{'0' * 64}.1234.partial").write_bytes(b"half")
    BlobStore(store.path(DIGEST).parent)
    assert files(store) == [DIGEST]


def test_keep_only_deletes_every_other_blob(store: BlobStore) -> None:
    kept = store.put_bytes(DATA)
    lost = store.put_bytes(b"twelve bytes")
    store.keep_only({kept, "0" * 64})
    assert kept in store
    assert lost not in store


def test_keep_only_does_not_disturb_a_transfer(store: BlobStore) -> None:
    def pieces() -> Iterator[bytes]:
        yield DATA[:100]
        store.keep_only(set())
        yield DATA[100:]

    store.put(DIGEST, pieces())
    assert b"".join(store.read(DIGEST)) == DATA


def test_absent_blob_is_not_found(store: BlobStore) -> None:
    with pytest.raises(NotFoundError, match=DIGEST):
        store.total_bytes(DIGEST)
    with pytest.raises(NotFoundError, match=DIGEST):
        next(store.read(DIGEST))


@pytest.mark.parametrize(
    "name", ["", "../commit.json", DIGEST.upper(), DIGEST[:-1], "/" + DIGEST[1:]]
)
def test_name_that_is_no_digest_is_not_found(store: BlobStore, name: str) -> None:
    with pytest.raises(NotFoundError, match="not a SHA-256 digest"):
        store.path(name)


# --- one store for each job


def test_edge_server_finds_only_the_vocabulary_of_a_hidden_job(tmp_path: Path) -> None:
    stores = JobStores(tmp_path)
    vocabulary, moments = (
        stores.store("hidden").put_bytes(data) for data in (b"words", b"moments")
    )
    shown = stores.store("shown").put_bytes(b"others")
    stores.hide_from_outsiders("hidden", vocabulary)
    for digest in (vocabulary, shown):
        assert stores.find(digest, for_outsider=True)
    assert stores.find(moments)
    with pytest.raises(NotFoundError, match="is not stored here"):
        stores.find(moments, for_outsider=True)


@pytest.mark.parametrize(
    "job_id", ["", "..", ".", ".hidden", "a/b", "/etc", "a\\b", "a\n", "a b", "x" * 129, "ü"]
)
def test_job_name_that_is_not_safe_in_a_path_is_refused(tmp_path: Path, job_id: str) -> None:
    stores = JobStores(tmp_path)
    with pytest.raises(InvalidInputError, match="is no name of a job"):
        stores.directory(job_id)
    with pytest.raises(InvalidInputError, match="is no name of a job"):
        stores.store(job_id)
    assert list(tmp_path.rglob("*")) == []


def test_jobs_do_not_share_blobs(tmp_path: Path) -> None:
    stores = JobStores(tmp_path)
    stores.store("one").put_bytes(DATA)
    assert DIGEST not in stores.store("two")
    assert stores.store("one") is stores.store("one")


def test_blob_of_any_open_job_is_found(tmp_path: Path) -> None:
    stores = JobStores(tmp_path)
    stores.store("one")
    stores.store("two").put_bytes(DATA)
    found = stores.find(DIGEST)
    assert found.total_bytes == len(DATA)
    assert b"".join(found.read(5)) == DATA[5:]
    with pytest.raises(NotFoundError, match="not stored here"):
        stores.find("0" * 64)


def test_store_survives_a_restart(tmp_path: Path) -> None:
    JobStores(tmp_path).store("one").put_bytes(DATA)
    assert b"".join(JobStores(tmp_path).store("one").read(DIGEST)) == DATA


def test_file_is_adopted_once(store: BlobStore, tmp_path: Path) -> None:
    for _ in range(2):
        (tmp_path / "arrived").write_bytes(DATA)
        store.adopt(DIGEST, tmp_path / "arrived")
        assert not (tmp_path / "arrived").exists()
    assert files(store) == [DIGEST]


def test_job_in_use_is_deleted_after_its_last_use(tmp_path: Path) -> None:
    stores = JobStores(tmp_path)
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


def test_deleting_a_job_leaves_the_others(tmp_path: Path) -> None:
    stores = JobStores(tmp_path)
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


@pytest.mark.parametrize("job_id", ["", ".", "..", "../other", "a/b", "/etc", ".hidden"])
def test_name_that_is_no_safe_path_deletes_nothing(tmp_path: Path, job_id: str) -> None:
    stores = JobStores(tmp_path / "state")
    stores.store("job").put_bytes(DATA)
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(InvalidInputError):
        stores.delete_job(job_id)
    assert sorted(tmp_path.rglob("*")) == before
