import os
from pathlib import Path

import pytest

from collapipe.errors import NotFoundError
from collapipe.weights.blob_cache import BlobCache
from collapipe.weights.blob_store import BlobStore

OLD, NEW, USED = b"a" * 10, b"b" * 10, b"c" * 10


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


def test_room_is_made_by_the_longest_unused_blobs_that_no_job_uses(tmp_path: Path) -> None:
    cache = BlobCache(tmp_path, limit_bytes=15)
    old, new, used = (put(cache, data) for data in (OLD, NEW, USED))
    for age, digest in enumerate((new, old, used)):
        os.utime(tmp_path / digest, (0, 3 - age))
    cache.file(old, never)  # a use, so that it is younger than the others
    cache.make_room({used})
    assert {path.name for path in tmp_path.iterdir()} == {used}

    unlimited = BlobCache(tmp_path)
    put(unlimited, OLD)
    unlimited.make_room(set())
    assert {path.name for path in tmp_path.iterdir()} == {used, old}


def test_older_blob_goes_first(tmp_path: Path) -> None:
    cache = BlobCache(tmp_path, limit_bytes=20)
    old, new, used = (put(cache, data) for data in (OLD, NEW, USED))
    for age, digest in enumerate((new, old, used)):
        os.utime(tmp_path / digest, (0, 3 - age))
    cache.file(old, never)
    cache.make_room({used})
    assert {path.name for path in tmp_path.iterdir()} == {used, old}


def test_cache_without_a_directory_makes_one_when_it_is_used() -> None:
    cache = BlobCache()
    digest = "0" * 64
    assert digest not in cache
    path = cache.file(put(cache, NEW), never)
    assert path.read_bytes() == NEW
    assert path.parent.name.startswith("collapipe-")
