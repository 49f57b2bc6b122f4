"""`collapipe doctor`: looks at this machine before a job has to.

Torch is asked in a process of its own.
"""

import importlib.util
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from collapipe.errors import CollapipeError
from collapipe_client.client import CollaPipeClient

_GB = 10**9
_TORCH_QUESTION = """
import json, torch
device = torch.cuda.get_device_name(0) if torch.cuda.is_available() else "cpu"
print(json.dumps({"version": torch.__version__, "device": device}))
"""
_STAGE_HOST = ["grpc", "grpc_health", "pydantic_settings", "prometheus_client", "safetensors"]
_ROLES = {
    "client": ["grpc", "pydantic", "typer", "rich"],
    "scheduler": ["grpc", "grpc_health", "pydantic_settings", "prometheus_client"],
    "device": [*_STAGE_HOST, "transformers", "torch"],
    "control": [*_STAGE_HOST, "transformers", "tokenizers", "torch"],
    "edge": [*_STAGE_HOST, "transformers", "tokenizers", "torch"],
}


@dataclass(frozen=True)
class Check:
    """One finding.

    Args:
        name: What was looked at.
        result: ok; warn: works, with a limit; fail: will not work.
        found: What is there.
        remedy: What to do; empty when ok.
    """

    name: str
    result: Literal["ok", "warn", "fail"]
    found: str
    remedy: str = ""


def examine(workspace: Path, client: CollaPipeClient | None) -> list[Check]:
    """Runs all checks; that of the scheduler only when there is one to reach."""
    checks = [
        check_python(sys.version_info[:3]),
        check_torch(),
        check_cores(
            len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
        ),
        check_memory(_available_memory_bytes()),
        check_workspace(workspace),
        check_disk(workspace),
        check_loopback(),
        *(check_packages(role) for role in _ROLES),
    ]
    if client is not None:
        checks.append(check_scheduler(client))
    return checks


def check_python(version: tuple[int, ...]) -> Check:
    """Python 3.11 reads job files; devices also run on 3.10."""
    found = ".".join(map(str, version))
    if version < (3, 11):
        return Check(
            "python", "fail", found, "use Python 3.11 or later here (a device needs only 3.10)"
        )
    return Check("python", "ok", found)


def check_torch() -> Check:
    """Is there a torch that can be imported, and what does it compute on."""
    if importlib.util.find_spec("torch") is None:
        return Check(
            "torch",
            "warn",
            "not installed",
            "a client and a scheduler need none; for all else: pip install torch --index-url "
            "https://download.pytorch.org/whl/cpu (on a Jetson, the one of JetPack)",
        )
    try:
        answer = subprocess.run(
            [sys.executable, "-c", _TORCH_QUESTION],
            capture_output=True,
            text=True,
            timeout=120,
            check=True,
        )
    except subprocess.CalledProcessError as error:
        last = (error.stderr.strip().splitlines() or ["no message"])[-1]
        return Check(
            "torch", "fail", last, "install torch anew: pip install --force-reinstall torch"
        )
    except subprocess.TimeoutExpired:
        return Check(
            "torch", "warn", "import takes longer than 120 s", "look at disk and memory load"
        )
    facts = json.loads(answer.stdout)
    return Check("torch", "ok", f"{facts['version']} on {facts['device']}")


def check_cores(cores: int | None) -> Check:
    """Each process of a testbed computes with one thread."""
    if cores is None:
        return Check("cores", "warn", "unknown", "none: jobs may be slow")
    if cores < 2:
        return Check(
            "cores", "warn", str(cores), "expect a local testbed to be slow: use fewer devices"
        )
    return Check("cores", "ok", str(cores))


def check_memory(available_bytes: int | None) -> Check:
    """A process with torch takes about 0.4 GB before it holds a model."""
    if available_bytes is None:
        return Check("memory", "warn", "unknown", "see that about 0.5 GB a process are free")
    found = f"{available_bytes / _GB:.1f} GB available"
    if available_bytes < _GB:
        return Check("memory", "fail", found, "free memory: a single device agent needs about 1 GB")
    if available_bytes < 6 * _GB:
        return Check(
            "memory",
            "warn",
            found,
            "the demo needs about 6 GB: use fewer devices, as in --devices 1",
        )
    return Check("memory", "ok", found)


def check_workspace(folder: Path) -> Check:
    """Can state be written."""
    existing = _existing_parent(folder)
    try:
        with tempfile.TemporaryFile(dir=existing):
            pass
    except OSError as error:
        return Check(
            "workspace",
            "fail",
            f"{existing}: {error.strerror}",
            "choose a folder that you may write, with --workspace DIR",
        )
    return Check("workspace", "ok", f"{folder.absolute()} can be written")


def check_disk(folder: Path) -> Check:
    """A commit keeps the model and each cluster's optimizer state, twice the weights."""
    free = shutil.disk_usage(_existing_parent(folder)).free
    found = f"{free / _GB:.1f} GB free"
    if free < _GB:
        return Check("disk", "fail", found, "free at least 1 GB, or use another --workspace DIR")
    if free < 5 * _GB:
        return Check(
            "disk", "warn", found, "commits of a model of 100 MB take about 1 GB: watch it"
        )
    return Check("disk", "ok", found)


def check_loopback() -> Check:
    """Can a port be opened and reached here."""
    try:
        with (
            socket.create_server(("127.0.0.1", 0)) as server,
            socket.create_connection(server.getsockname(), timeout=5),
        ):
            pass
    except OSError as error:
        return Check(
            "ports", "fail", f"127.0.0.1: {error.strerror}", "allow connections on loopback"
        )
    return Check("ports", "ok", "loopback ports can be opened and reached")


def check_packages(
    role: str,
    is_installed: Callable[[str], bool] = lambda name: importlib.util.find_spec(name) is not None,
) -> Check:
    """What a role needs installed."""
    missing = [name for name in _ROLES[role] if not is_installed(name)]
    if missing:
        return Check(
            f"packages: {role}",
            "warn",
            f"missing {', '.join(missing)}",
            f"to run this role here: pip install 'collapipe[{role}]'",
        )
    return Check(f"packages: {role}", "ok", "complete")


def check_scheduler(client: CollaPipeClient) -> Check:
    """Does the scheduler answer, and who is there."""
    try:
        hosts = client.hosts()
    except CollapipeError as error:
        return Check(
            "scheduler", "fail", f"{client.address}: {error}", "start it, or correct --scheduler"
        )
    silent = [status.host.host_id for status in hosts if not status.alive]
    found = f"{client.address}: {len(hosts) - len(silent)} hosts alive"
    if silent:
        return Check(
            "scheduler", "warn", f"{found}, silent: {', '.join(silent)}", "look into their logs"
        )
    return Check("scheduler", "ok", found)


def _existing_parent(folder: Path) -> Path:
    folder = folder.absolute()
    while not folder.exists():
        folder = folder.parent
    return folder


def _available_memory_bytes() -> int | None:
    try:
        for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    if "SC_PHYS_PAGES" in os.sysconf_names:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return None
