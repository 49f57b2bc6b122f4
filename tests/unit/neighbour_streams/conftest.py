"""An emulation file that a test changes."""

import json
from pathlib import Path

import pytest

from collapipe.emulation.emulation_file import EmulationFile


class ChangingEmulation:
    """An emulation file, and the object through which a host reads it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.set()
        self.file = EmulationFile(path)

    def set(self, **sections: object) -> None:
        self.path.write_text(json.dumps(sections))


@pytest.fixture
def emulation(tmp_path: Path) -> ChangingEmulation:
    return ChangingEmulation(tmp_path / "emulation.json")
