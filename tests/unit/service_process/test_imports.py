"""A process imports only packages that its machine has. The scheduler has no torch, a device no client."""

import subprocess
import sys

import pytest


@pytest.mark.parametrize(
    ("module", "absent"),
    [
        ("collapipe.scheduler.app", ["torch", "transformers", "safetensors"]),
        ("collapipe_client.cli", ["torch", "transformers"]),
        ("collapipe.device_agent.app", ["typer", "rich", "sacrebleu", "seqeval", "cvxpy"]),
    ],
)
def test_process_does_not_import_what_its_machine_lacks(module: str, absent: list[str]) -> None:
    code = f"import sys, {module}; print([name for name in {absent} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert (done.stdout, done.stderr) == ("[]\n", "")
