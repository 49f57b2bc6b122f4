import os
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest

from collapipe.errors import NotFoundError
from collapipe.weights.blob_cache import BlobCache
from collapipe.weights.blob_store import BlobStore

OLD, NEW, USED, UNUSED = b"a" * 10, b"b" * 10, b"c" * 10, b"d" * 10


def put(cache: BlobCache, data: bytes) -> str:
    return cache.store.put_bytes(data)


def never(store: BlobStore) -> None:
    raise AssertionError("the blob was fetched again")


def test_blob_is_fetched_once_and_again_only_if_its_file_is_damaged(tmp_path: Path) -> None:
    first = BlobCache(tmp_path)
    digest = BlobStore(tmp_path / "elsewhere").put_bytes(NEW)
    assert digest not in first
    with pytest.raises(NotFoundError, match=digest):
        first.find(digest)
    path = first.file(digest, lambda store: store.put(digest, [NEW]))
    assert path.read_bytes() == NEW
    assert first.file(digest, never) == path
    assert b"".join(first.find(digest).read()) == NEW

    later = BlobCache(tmp_path)
    assert later.file(digest, never) == path
    path.write_bytes(OLD)
    later = BlobCache(tmp_path)
    later.file(digest, lambda store: store.put(digest, [NEW]))
    assert path.read_bytes() == NEW


@pytest.mark.parametrize(("limit", "free", "kept"), [(30, 10**12, 3), (29, 10**12, 2), (30, 0, 1)])
def test_room_is_made_by_the_longest_unused_blobs_that_no_job_uses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: int, free: int, kept: int
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=free))
    cache = BlobCache(tmp_path / "cache", limit)
    unused, old, used = (put(cache, data) for data in (UNUSED, OLD, USED))
    for age, digest in enumerate((used, unused, old)):
        os.utime(tmp_path / "cache" / digest, (0, age))
    cache.file(old, never)
    digest = BlobStore(tmp_path / "elsewhere").put_bytes(NEW)
    cache.file(digest, lambda store: store.put(digest, [NEW]), {used, digest})
    names = [used, old, unused][:kept]
    assert {path.name for path in (tmp_path / "cache").iterdir()} == {*names, digest}


def test_cache_without_a_limit_keeps_everything(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=0))
    cache = BlobCache(tmp_path / "cache")
    old = put(cache, OLD)
    digest = BlobStore(tmp_path / "elsewhere").put_bytes(NEW)
    cache.file(digest, lambda store: store.put(digest, [NEW]))
    assert old in cache


def test_cache_without_a_directory_makes_one_when_it_is_used() -> None:
    cache = BlobCache()
    digest = "0" * 64
    assert digest not in cache
    path = cache.file(put(cache, NEW), never)
    assert path.read_bytes() == NEW
    assert path.parent.name.startswith("collapipe-")
