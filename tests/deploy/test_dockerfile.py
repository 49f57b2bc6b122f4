"""The Dockerfile installs requirements that exist. Building its images is a heavy test (tests/containers)."""

import re
import subprocess
import sys
from pathlib import Path

_CHECKOUT = Path(__file__).parents[2]


def test_installs_requirements_of_existing_extras(tmp_path: Path) -> None:
    docker = _CHECKOUT / "deploy" / "docker"
    text = (docker / "Dockerfile").read_text(encoding="utf-8")
    installed = set(re.findall(r"-r /requirements/([\w-]+\.txt)", text))
    subprocess.run(
        [sys.executable, docker / "requirements.py", _CHECKOUT / "pyproject.toml", tmp_path],
        check=True,
    )
    assert installed
    assert installed <= {path.name for path in tmp_path.iterdir()}
