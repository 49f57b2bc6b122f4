"""A damaged document of a job on the edge server is named, and nothing is computed from it."""

import shutil
from itertools import chain
from pathlib import Path

import pytest
from damaged_files import damage, damage_values

from collapipe.errors import CorruptDataError
from collapipe.v1.plan_pb2 import Attempt

from .edges import Edge


def use(edge: Edge) -> None:
    """Reads whatever the rounds and the export of a job read from its documents."""
    model = edge.model
    commit = model.commit()
    following = Attempt(job_id="job", round_index=commit.num_rounds, attempt=commit.attempt + 1)
    model.check_is_next(following)
    model.weights_before(following, 0)
    model.unit_bytes()
    model.model_spec()
    model.averaging()
    model.owner()
    model.findings()


@pytest.mark.parametrize("name", ["commit.json", "job.json"])
def test_damaged_document_is_named(edge: Edge, name: str) -> None:
    edge.run_round(is_candidate=True)
    path, num_refused = edge.directory / name, 0
    for how in chain(damage(path), damage_values(path)):
        try:
            use(edge)
        except CorruptDataError as error:
            num_refused += 1
            assert name in str(error), how
    assert num_refused > 100
    use(edge)


def test_document_of_another_job_is_refused(edge: Edge, tmp_path: Path) -> None:
    other = Edge(shutil.copytree(edge.directory, tmp_path / "other"), b"")
    with pytest.raises(CorruptDataError, match=r"other/commit\.json .*'job'"):
        other.model.commit()
    with pytest.raises(CorruptDataError, match=r"other/job\.json .* job"):
        other.model.model_spec()


def test_lost_document_of_the_model_is_written_again_when_the_job_is_resumed(edge: Edge) -> None:
    committed = edge.run_round()
    path = edge.directory / "job.json"
    before = path.read_text()
    path.unlink()
    assert edge.prepare() == committed
    assert path.read_text() == before
    assert edge.run_round(round_index=1).num_rounds == 2


def test_damaged_document_of_the_model_keeps_the_vocabulary(edge: Edge) -> None:
    path, blobs = edge.directory / "job.json", edge.blobs()
    path.write_text(path.read_text().replace('"vocabulary_digest": "', '"vocabulary_digest": "x'))
    with pytest.raises(CorruptDataError, match="job.json.*vocabulary_digest"):
        edge.run_round()
    assert blobs <= edge.blobs()
