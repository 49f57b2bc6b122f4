import shutil
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from .edges import Edge


@pytest.fixture(scope="session")
def vocabulary(tokenizer: Tokenizer) -> bytes:
    return tokenizer.to_str().encode()


@pytest.fixture(scope="session")
def prepared_state(tmp_path_factory: pytest.TempPathFactory, vocabulary: bytes) -> Path:
    """The state directory of an edge server with the initial model of a job. Tests copy it."""
    edge = Edge(tmp_path_factory.mktemp("prepared"), vocabulary)
    edge.prepare()
    return edge.state


@pytest.fixture
def edge(tmp_path: Path, prepared_state: Path, vocabulary: bytes) -> Edge:
    return Edge(shutil.copytree(prepared_state, tmp_path / "edge"), vocabulary)
