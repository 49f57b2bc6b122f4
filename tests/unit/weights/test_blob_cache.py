import os
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest

from collapipe.errors import NotFoundError
from collapipe.weights.blob_cache import BlobCache
from collapipe.weights.blob_store import BlobStore

OLD, NEW, USED, UNUSED = b"a" * 10, b"b" * 10, b"c" * 10, b"d" * 10


def never(store: BlobStore) -> None:
    raise AssertionError("the blob was fetched again")


@pytest.fixture
def new_digest(tmp_path: Path) -> str:
    return BlobStore(tmp_path / "elsewhere").put_bytes(NEW)


def test_blob_is_fetched_once_and_again_only_if_its_file_is_damaged(
    tmp_path: Path, new_digest: str
) -> None:
    first = BlobCache(tmp_path)
    assert new_digest not in first
    with pytest.raises(NotFoundError, match=new_digest):
        first.find(new_digest)
    path = first.file(new_digest, lambda store: store.put(new_digest, [NEW]))
    assert path.read_bytes() == NEW
    assert b"".join(first.find(new_digest).read()) == NEW
    for cache in (first, BlobCache(tmp_path)):
        assert cache.file(new_digest, never) == path
    path.write_bytes(OLD)
    BlobCache(tmp_path).file(new_digest, lambda store: store.put(new_digest, [NEW]))
    assert path.read_bytes() == NEW


@pytest.mark.parametrize(
    ("limit", "free", "kept"), [(30, 10**12, 3), (29, 10**12, 2), (30, 0, 1), (None, 0, 3)]
)
def test_room_is_made_by_the_longest_unused_blobs_that_no_job_uses(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    new_digest: str,
    limit: int | None,
    free: int,
    kept: int,
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=free))
    cache = BlobCache(tmp_path / "cache", limit)
    unused, old, used = (cache.store.put_bytes(data) for data in (UNUSED, OLD, USED))
    for age, digest in enumerate((used, unused, old)):
        os.utime(tmp_path / "cache" / digest, (0, age))
    cache.file(old, never)
    cache.file(new_digest, lambda store: store.put(new_digest, [NEW]), {used, new_digest})
    names = [used, old, unused][:kept]
    assert {path.name for path in (tmp_path / "cache").iterdir()} == {*names, new_digest}


def test_cache_without_a_directory_makes_one_when_it_is_used() -> None:
    cache = BlobCache()
    assert "0" * 64 not in cache
    path = cache.file(cache.store.put_bytes(NEW), never)
    assert path.read_bytes() == NEW
    assert path.parent.name.startswith("collapipe-")
