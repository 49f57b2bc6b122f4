"""The machine: its Python, its torch, its processor, memory and disk, its packages."""

import importlib.util
import json
import os
import shutil
import struct
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from collapipe_client.doctor.check import Check

_GB = 10**9
_TORCH_SECONDS = 120
_TORCH_QUESTION = """
import json, torch
name = torch.cuda.get_device_name(0) if torch.cuda.is_available() else ""
print(json.dumps({"version": torch.__version__, "cuda": torch.version.cuda or "", "device": name}))
"""
_STAGE_HOST = ["grpc", "grpc_health", "pydantic_settings", "prometheus_client", "safetensors"]
_PACKAGES = {
    "client": ("client", ["grpc", "pydantic", "typer", "rich"]),
    "scheduler": ("scheduler", ["grpc", "grpc_health", "pydantic_settings", "cvxpy", "httpx"]),
    "device-agent": ("device", [*_STAGE_HOST, "transformers", "torch"]),
    "control-unit": ("control", [*_STAGE_HOST, "transformers", "tokenizers", "torch"]),
    "edge-server": ("edge", [*_STAGE_HOST, "transformers", "tokenizers", "torch"]),
}
"""By role: the extra that installs it, and what it imports."""
_MACHINES = ("x86_64", "aarch64", "arm64", "AMD64")


def check_python(version: tuple[int, ...]) -> Check:
    """What every role needs."""
    found = ".".join(map(str, version))
    if version < (3, 10):
        return Check(
            "python", "fail", found, "use Python 3.10 or later: Debian 12 and JetPack 6 have one"
        )
    return Check("python", "ok", found)


def check_userland(pointer_bytes: int, machine: str) -> Check:
    """Torch and grpcio come for 64 bits only; a Raspberry Pi may run a 64-bit kernel under 32-bit programs."""
    found = f"{8 * pointer_bytes}-bit Python on {machine}"
    if pointer_bytes < 8:
        return Check(
            "userland",
            "fail",
            found,
            "write the 64-bit image of the system to the card (Raspberry Pi OS (64-bit)); a 64-bit kernel is not "
            "enough",
        )
    if machine not in _MACHINES:
        return Check(
            "userland", "warn", found, "x86-64 and arm64 are tested: others build their own torch"
        )
    return Check("userland", "ok", found)


@dataclass(frozen=True)
class TorchFacts:
    """What torch says of itself.

    Args:
        version: Its version.
        cuda: The CUDA that it is built for; empty for none.
        device: The first CUDA device that it finds; empty for none.
    """

    version: str
    cuda: str = ""
    device: str = ""


def ask_torch() -> TorchFacts | str | None:
    """Imports torch in a process of its own: it is large, and may crash.

    Returns:
        What it says; why it cannot be imported; or `None` when it is not installed.
    """
    if importlib.util.find_spec("torch") is None:
        return None
    try:
        answer = subprocess.run(
            [sys.executable, "-c", _TORCH_QUESTION],
            capture_output=True,
            text=True,
            timeout=_TORCH_SECONDS,
            check=True,
        )
    except subprocess.CalledProcessError as error:
        return str((error.stderr.strip().splitlines() or [f"exit code {error.returncode}"])[-1])
    except subprocess.TimeoutExpired:
        return f"its import takes longer than {_TORCH_SECONDS} s"
    says = json.loads(answer.stdout)
    return TorchFacts(says["version"], says["cuda"], says["device"])


def is_jetson(root: Path = Path("/")) -> bool:
    """Whether this is a Jetson, also from within a container on one."""
    model = _text(root / "proc/device-tree/model")
    return (root / "etc/nv_tegra_release").exists() or "jetson" in model.lower()


def check_torch(
    torch: TorchFacts | str | None, *, jetson: bool, wanted: str = "cpu", needed: bool = False
) -> Check:
    """Is there a torch that can be imported, and does it compute where it shall.

    Args:
        torch: As `ask_torch` answers.
        jetson: Whether this is a Jetson, which has a torch of its own.
        wanted: The `device` setting of the service: "cpu" or "cuda".
        needed: Whether the role that the machine has computes.
    """
    of_vendor = "run the container on the vendor's torch (deploy/jetson/README.md); install no other torch over it"
    if torch is None:
        remedy = "python -m pip install 'torch>=2.6' (on arm64 'torch>=2.6,<2.9'; else from PyTorch's CPU index)"
        if not needed:
            remedy = (
                f"none for a client or a scheduler; for all else: {of_vendor if jetson else remedy}"
            )
        return Check(
            "torch",
            "fail" if needed else "warn",
            "not installed",
            of_vendor if jetson and needed else remedy,
        )
    if isinstance(torch, str):
        remedy = of_vendor if jetson else "python -m pip install --force-reinstall torch"
        return Check("torch", "fail", torch, remedy)
    found = f"{torch.version} on {torch.device or 'cpu'}"
    if jetson and not torch.cuda:
        return Check(
            "torch",
            "fail" if wanted == "cuda" else "warn",
            f"{found}: a build without CUDA lies over that of JetPack",
            f"python -m pip uninstall torch, then {of_vendor}",
        )
    if wanted == "cuda" and not torch.device:
        return Check(
            "torch",
            "fail",
            f"{found}, but the settings say device = cuda",
            'see whether `nvidia-smi` (Jetson: `tegrastats`) shows it, or set device = "cpu"',
        )
    return Check("torch", "ok", found)


def check_cores(cores: int | None, *, of_box: bool = False) -> Check:
    """Each process of a testbed computes with one thread; a box runs one process."""
    if cores is None:
        return Check("cores", "warn", "unknown", "none: jobs may be slow")
    if cores < 2 and not of_box:
        return Check(
            "cores", "warn", str(cores), "expect a local testbed to be slow: use fewer devices"
        )
    return Check("cores", "ok", str(cores))


def check_memory(available_bytes: int | None, *, of_box: bool = False) -> Check:
    """A process with torch takes about 0.4 GB before it holds a model.

    Args:
        available_bytes: What is left.
        of_box: Whether one service is to run here, not a whole testbed.
    """
    if available_bytes is None:
        return Check("memory", "warn", "unknown", "see that about 0.5 GB a process are free")
    found = f"{available_bytes / _GB:.1f} GB available"
    if available_bytes < _GB:
        return Check(
            "memory",
            "warn" if of_box and available_bytes > 0.5 * _GB else "fail",
            found,
            "free memory: a single device agent needs about 1 GB (`ps aux --sort -rss | head`)",
        )
    if available_bytes < 6 * _GB and not of_box:
        return Check(
            "memory",
            "warn",
            found,
            "the demo needs about 6 GB: use fewer devices, as in --devices 1",
        )
    return Check("memory", "ok", found)


def check_swap(areas: list[str]) -> Check:
    """Training that reaches into a swap file on a card takes a hundred times as long, and wears it out.

    Args:
        areas: Names of what is swapped to: first column of /proc/swaps.
    """
    slow = [area for area in areas if "zram" not in area]
    if slow:
        return Check(
            "swap",
            "warn",
            ", ".join(areas),
            "a box that trains shall not swap to a card: sudo swapoff -a, and remove it from /etc/fstab (Raspberry "
            "Pi OS 12: sudo systemctl disable --now dphys-swapfile)",
        )
    if areas:
        return Check("swap", "ok", f"{', '.join(areas)} (compressed memory)")
    return Check("swap", "ok", "none")


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


def check_disk(folder: Path, *, keeps_state: bool = True) -> Check:
    """A commit keeps the model and each cluster's optimizer state, twice the weights; a device keeps nothing."""
    free = shutil.disk_usage(_existing_parent(folder)).free
    found = f"{free / _GB:.1f} GB free"
    if free < _GB:
        return Check("disk", "fail", found, "free at least 1 GB, or use another --workspace DIR")
    if free < 5 * _GB and keeps_state:
        return Check(
            "disk", "warn", found, "commits of a model of 100 MB take about 1 GB: watch it"
        )
    return Check("disk", "ok", found)


def check_packages(
    role: str,
    is_installed: Callable[[str], bool] = lambda name: importlib.util.find_spec(name) is not None,
    *,
    needed: bool = False,
) -> Check:
    """What a role needs installed.

    Args:
        role: As `python -m collapipe.<role>` has it, or "client".
        is_installed: Whether a package can be imported.
        needed: Whether this machine is to have the role.
    """
    extra, packages = _PACKAGES[role]
    missing = [name for name in packages if not is_installed(name)]
    if missing:
        return Check(
            f"packages: {role}",
            "fail" if needed else "warn",
            f"missing {', '.join(missing)}",
            f"to run this role here: pip install 'collapipe[{extra}]'",
        )
    return Check(f"packages: {role}", "ok", "complete")


def all_roles() -> list[str]:
    """The roles that `check_packages` knows."""
    return list(_PACKAGES)


def available_cores() -> int | None:
    """Processors that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()


def available_memory_bytes() -> int | None:
    """Memory that can be had without swapping."""
    for line in _text(Path("/proc/meminfo")).splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    if "SC_PHYS_PAGES" in os.sysconf_names:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return None


def swap_areas(table: Path = Path("/proc/swaps")) -> list[str]:
    """What this machine swaps to."""
    return [line.split()[0] for line in _text(table).splitlines()[1:] if line.strip()]


def pointer_bytes() -> int:
    """8 for a 64-bit Python."""
    return struct.calcsize("P")


def _existing_parent(folder: Path) -> Path:
    folder = folder.absolute()
    while not folder.exists():
        folder = folder.parent
    return folder


def _text(path: Path) -> str:
    """A file of /proc or /sys; empty where there is none."""
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
