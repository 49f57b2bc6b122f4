import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from collapipe.documents import hold_directory, read_document, write_document
from collapipe.errors import CorruptDataError, WrongStateError

_WRITER = """
import sys
from pathlib import Path
from collapipe.documents import write_document

number = int(sys.argv[2])
while True:
    number += 1
    write_document(Path(sys.argv[1]), {"number": number, "copy": [number] * 3000})
"""


def test_written_document_is_read_back(tmp_path: Path) -> None:
    document = {"a": [1, 2.5, None], "ü": {"b": "text"}}
    path = tmp_path / "folder" / "document.json"
    write_document(path, document)
    assert read_document(path) == document
    write_document(path, {})
    assert read_document(path) == {}


def test_absent_document_is_none(tmp_path: Path) -> None:
    assert read_document(tmp_path / "document.json") is None


@pytest.mark.parametrize("content", [b"", b'{"a": 1', b"[1]", b"null", b"\xff\xfe"])
def test_damaged_document_is_corrupt_and_named(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "document.json"
    path.write_bytes(content)
    with pytest.raises(CorruptDataError, match=r"document.json is damaged"):
        read_document(path)


def test_failed_write_keeps_the_old_document(tmp_path: Path) -> None:
    path = tmp_path / "document.json"
    write_document(path, {"number": 1})
    with pytest.raises(TypeError):
        write_document(path, {"number": 2, "unwritable": object()})
    assert read_document(path) == {"number": 1}


def test_document_is_complete_after_its_writer_was_killed(tmp_path: Path) -> None:
    path = tmp_path / "document.json"
    number = 0
    for delay in (0.0, 0.003, 0.011, 0.023):
        with subprocess.Popen([sys.executable, "-c", _WRITER, str(path), str(number)]) as writer:
            before = number
            deadline = time.monotonic() + 30
            while number == before:  # Until the writer has written again.
                assert time.monotonic() < deadline, "the writer writes nothing"
                time.sleep(0.001)
                document = read_document(path)
                number = document["number"] if document else 0
            time.sleep(delay)
            writer.kill()
        document = read_document(path)
        assert document is not None
        number = document["number"]
        assert document["copy"] == [number] * 3000
    leftovers = [other.name for other in tmp_path.iterdir() if other != path]
    assert len(leftovers) <= 1, "killed writers leave a file each"


def test_directory_can_be_held_by_one_process_at_a_time(tmp_path: Path) -> None:
    state = tmp_path / "state"
    held = hold_directory(state, 0.0)
    with pytest.raises(WrongStateError, match=rf"state is in use by process {os.getpid()}: end it"):
        hold_directory(state, 0.2)
    held.close()
    hold_directory(state, 0.0).close()


def test_waits_for_a_process_that_is_about_to_end(tmp_path: Path) -> None:
    held = hold_directory(tmp_path, 0.0)
    threading.Timer(0.3, held.close).start()
    hold_directory(tmp_path, 30.0).close()


def test_nothing_is_held_without_a_directory() -> None:
    hold_directory(None).close()
