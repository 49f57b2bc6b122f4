"""A damaged row of a job on the edge server is named, and nothing is computed from it. Files of older versions are taken over."""

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from damaged_files import damage, damage_values
from google.protobuf import json_format
from stored_jobs import StoredRow, stored_commit, stored_ids, write_message

from collapipe.database import FILE_NAME
from collapipe.errors import CorruptDataError, NotFoundError
from collapipe.v1.plan_pb2 import Attempt, Commit

from .edges import Edge


def use(edge: Edge) -> None:
    """Reads whatever the rounds and the export of a job read of its rows."""
    model = edge.model
    commit = model.commit()
    following = Attempt(job_id="job", round_index=commit.num_rounds, attempt=commit.attempt + 1)
    model.check_is_next(following)
    model.weights_before(following, 0)
    model.unit_bytes()
    model.model_spec()
    model.averaging()
    model.owner()


def test_damaged_model_is_named(edge: Edge) -> None:
    edge.run_round()
    num_refused = 0
    for how in damage_values(StoredRow(edge.state, "job", "job")):
        try:
            use(edge)
        except CorruptDataError as error:
            num_refused += 1
            assert "the model of job job" in str(error), how
    assert num_refused > 100
    use(edge)


def damaged_messages(message: bytes) -> Iterator[Any]:
    for length in range(0, len(message), 97):
        yield message[:length]
        yield message[:length] + bytes(1) + message[length:]
        yield message[:length] + bytes([message[length] ^ 0xFF]) + message[length + 1 :]
    yield from (bytes(len(message)), b"\xff" * 9, "text", "\ud7ff", 7)


def test_damaged_commit_is_named(edge: Edge) -> None:
    committed = edge.run_round(is_candidate=True)
    message, num_refused = committed.SerializeToString(deterministic=True), 0
    for damaged in damaged_messages(message):
        write_message(edge.state, "job", damaged)
        try:
            use(edge)
        except CorruptDataError as error:
            num_refused += 1
            assert f"{FILE_NAME}: the last commit of job job" in str(error)
        except NotFoundError as error:  # The digest of a blob has changed into another one.
            assert "blob" in str(error)
    assert num_refused > 50
    dumped = {row.table: row.text for row in edge.commits.dump("job")}
    assert "is damaged" in dumped["last_commit"] and '"family"' in dumped["job"]
    write_message(edge.state, "job", message)
    assert edge.model.commit() == committed
    use(edge)
    rows = list(edge.commits.dump("job"))
    assert [row.table for row in rows] == ["job", "last_commit"]
    assert json_format.Parse(rows[1].text, Commit()) == committed
    assert list(edge.commits.dump("unknown")) == []


def test_rows_of_another_job_are_refused(edge: Edge) -> None:
    row = StoredRow(edge.state, "job", "job")
    row.write({**row.read(), "job_id": "other"})
    with pytest.raises(CorruptDataError, match="job job.*'other'"):
        edge.model.model_spec()
    commit = edge.model.commit()
    commit.job_id = "other"
    write_message(edge.state, "job", commit.SerializeToString())
    with pytest.raises(CorruptDataError, match="job job.*'other'"):
        edge.model.commit()


def test_damaged_finding_is_named(edge: Edge) -> None:
    row = StoredRow(edge.state, "job", "job")
    row.write({**row.read(), "findings": [{"what": "a note", "of_a_newer_version": 1}]})
    assert [finding.what for finding in edge.model.findings()] == ["a note"]
    for wrong in (1, {"what": 1}):
        row.write({**row.read(), "findings": [wrong]})
        with pytest.raises(CorruptDataError, match="findings of job job"):
            edge.model.findings()
        assert edge.model.owner() == "", "the job goes on"


def test_damaged_model_keeps_the_vocabulary(edge: Edge) -> None:
    blobs, row = edge.blobs(), StoredRow(edge.state, "job", "job")
    row.write({**row.read(), "vocabulary_digest": "x"})
    with pytest.raises(CorruptDataError, match="vocabulary_digest"):
        edge.run_round()
    assert blobs <= edge.blobs()


@pytest.fixture
def older(edge: Edge) -> Edge:
    """An edge server whose job is stored as an older version did: in two files, without a row."""
    commit = edge.run_round(is_candidate=True)
    files = older_files(edge)
    document = StoredRow(edge.state, "job", "job").read()
    del document["job_id"]  # The first versions wrote none.
    files["job.json"].write_text(json.dumps(document))
    written = json_format.MessageToJson(commit, preserving_proto_field_name=True)
    files["commit.json"].write_text(written)
    edge.commits.delete("job")
    edge.restart()
    return edge


def older_files(edge: Edge) -> dict[str, Path]:
    return {name: edge.state / "jobs" / "job" / name for name in ("job.json", "commit.json")}


def test_job_of_an_older_version_goes_on(older: Edge) -> None:
    texts = {file: file.read_text() for file in older_files(older).values()}
    before = json_format.Parse(older_files(older)["commit.json"].read_text(), Commit())
    with ThreadPoolExecutor(4) as threads:
        commits = list(threads.map(lambda _: older.model.commit(), range(4)))
    assert commits == [before] * 4
    assert stored_commit(older.state, "job") == before
    assert not any(file.exists() for file in texts)
    for file, text in texts.items():  # As if the process had ended before it renamed the files.
        file.write_text(text)
    older.restart()
    assert older.run_round(1).num_rounds == 2
    assert older.model.commit().num_rounds == 2
    for file in texts:
        file.unlink()
    older.commits.delete("job")
    with pytest.raises(NotFoundError, match="job job"):
        older.model.commit()


@pytest.mark.parametrize("name", ["job.json", "commit.json"])
def test_damaged_files_of_an_older_version_are_named_and_a_mended_one_is_taken_over(
    older: Edge, name: str
) -> None:
    num_refused = 0
    for how in damage(older_files(older)[name]):
        if how == "a flipped bit":  # It is in the text of a value.
            continue
        with pytest.raises(CorruptDataError, match=name):
            older.prepare()
        num_refused += 1
        assert stored_ids(older.state) == [], how
    assert num_refused == 4
    assert older.prepare().num_rounds == 1
