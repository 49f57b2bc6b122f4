from pathlib import Path

import pytest
from tokenizers import Tokenizer

from .edges import Edge


@pytest.fixture(scope="session")
def vocabulary(tokenizer: Tokenizer) -> bytes:
    return tokenizer.to_str().encode()


@pytest.fixture
def edge(tmp_path: Path, vocabulary: bytes) -> Edge:
    made = Edge(tmp_path / "job", vocabulary)
    made.prepare()
    return made
