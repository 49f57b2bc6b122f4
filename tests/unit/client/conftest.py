from collections.abc import Iterator
from pathlib import Path

import pytest

from .fake_services import FakeServices, serve_fake
from .pretended_processes import PretendedProcesses, pretended_processes


@pytest.fixture
def in_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs commands in `tmp_path`, which also has the contexts of the user."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))


@pytest.fixture
def fake() -> Iterator[FakeServices]:
    with serve_fake() as services:
        yield services


@pytest.fixture
def processes(monkeypatch: pytest.MonkeyPatch) -> Iterator[PretendedProcesses]:
    """Replaces every process of a testbed by one that only exists in a table."""
    with pretended_processes(monkeypatch) as table:
        yield table
