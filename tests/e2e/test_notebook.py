"""The notebook of the documents runs from its first cell to its last one."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

NOTEBOOK = Path(__file__).parent.parent.parent / "docs" / "notebook.ipynb"
pytestmark = pytest.mark.timeout(600)


def test_notebook_trains_and_shows_curve_plan_and_answer(tmp_path: Path) -> None:
    cells = json.loads(NOTEBOOK.read_text("utf-8"))["cells"]
    code = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    script = tmp_path / "notebook.py"
    script.write_text("\n".join([*code, 'figure.savefig("curve.png")']), "utf-8")
    done = subprocess.run(
        [sys.executable, script],
        cwd=tmp_path,
        env={**os.environ, "MPLBACKEND": "agg"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count(" accuracy ") >= 3
    # The embedding is on the control unit, the head on the edge server, and 6 blocks are on the two devices.
    for units in ("control-unit-0  units 0 to 0", "device-0-0 ", "device-0-1 ", "edge-server "):
        assert units in done.stdout
    assert (tmp_path / "curve.png").stat().st_size > 10_000
    assert (tmp_path / "model" / "model.safetensors").is_file()
