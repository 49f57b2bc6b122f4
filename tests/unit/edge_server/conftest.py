import shutil
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from .edges import Edge


@pytest.fixture(scope="session")
def vocabulary(tokenizer: Tokenizer) -> bytes:
    return tokenizer.to_str().encode()


@pytest.fixture(scope="session")
def prepared_job(tmp_path_factory: pytest.TempPathFactory, vocabulary: bytes) -> Path:
    """The directory of a job with its initial model. Tests copy it."""
    edge = Edge(tmp_path_factory.mktemp("prepared") / "job", vocabulary)
    edge.prepare()
    return edge.directory


@pytest.fixture
def edge(tmp_path: Path, prepared_job: Path, vocabulary: bytes) -> Edge:
    return Edge(shutil.copytree(prepared_job, tmp_path / "job"), vocabulary)
