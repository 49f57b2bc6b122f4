"""What only a process of a service shows: what it imports, and that it ends with its parent."""

import json
import os
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import psutil
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
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("[]\n", "")


@pytest.mark.parametrize(
    ("module", "package", "role"),
    [
        ("collapipe.scheduler", "dp_accounting", "scheduler"),
        ("collapipe.edge_server", "Crypto", "edge-server"),
        ("collapipe.control_unit", "Crypto", "control-unit"),
        ("collapipe.device_agent", "transformers", "device-agent"),
        ("collapipe.authority", "pydantic", "client"),
        ("collapipe_client", "typer", "client"),
    ],
)
def test_program_without_one_of_its_packages_says_in_one_line_what_installs_it(
    module: str, package: str, role: str
) -> None:
    code = (
        f"import runpy, sys; sys.modules[{package!r}] = None; "
        f"runpy.run_module({module!r}, run_name='__main__', alter_sys=True)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (2, "")
    assert f"package {package} is not installed" in done.stderr
    assert f"deploy/install.py {role}`" in done.stderr and done.stderr.count("\n") == 1


SERVICE = """
from pathlib import Path
from collapipe.service_process import Running, ServiceSettings, run_service

def start(settings, metrics_address):
    drain = settings.ready_file.with_name("drained").touch
    return Running("somewhere:1", drain)

run_service("tester", ServiceSettings, start)
"""
PARENT = """
import os, subprocess, sys
command = [sys.executable, "-c", sys.argv[1], "--ready-file", sys.argv[2], "--insecure"]
subprocess.run([*command, "--exit-with-parent", str(os.getpid())])
"""


def test_process_drains_and_ends_when_its_parent_is_killed(tmp_path: Path) -> None:
    ready_file = tmp_path / "ready.json"
    parent = subprocess.Popen([sys.executable, "-c", PARENT, SERVICE, str(ready_file)])
    child = None
    try:
        while not ready_file.exists():
            assert parent.poll() is None
            time.sleep(0.02)
        child = psutil.Process(json.loads(ready_file.read_text())["pid"])
        assert child.ppid() == parent.pid
        parent.kill()
        parent.wait(60)
        psutil.wait_procs([child], timeout=60)
        assert not child.is_running() or child.status() == psutil.STATUS_ZOMBIE
        assert (tmp_path / "drained").exists()
    finally:
        parent.kill()
        if child is not None:
            with suppress(ProcessLookupError):
                os.kill(child.pid, 9)
