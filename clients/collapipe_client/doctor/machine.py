"""Checks the machine: word size, torch, memory, swap, disk and Python packages."""

import importlib.util
import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from collapipe.installation import PACKAGES
from collapipe_client.doctor.check import Check
from collapipe_client.doctor.kernel import text_of
from collapipe_client.workspace import free_disk_bytes

_GB = 10**9
_TORCH_SECONDS = 120
_TORCH_QUESTION = """
import json, torch
device = torch.cuda.get_device_name(0) if torch.cuda.is_available() else ""
print(json.dumps({"version": torch.__version__, "cuda": torch.version.cuda or "", "device": device}))
"""
_TESTED_MACHINES = ("x86_64", "aarch64", "arm64", "AMD64")
_VENDOR_TORCH = "run the container with the vendor's torch (deploy/jetson/README.md), and install no other torch over it"
_INSTALL_TORCH = "python -m pip install 'torch>=2.6' (on arm64 'torch>=2.6,<2.9', elsewhere from PyTorch's CPU index)"


def check_userland(pointer_bytes: int, machine: str) -> Check:
    """Checks for a 64-bit Python, because torch and grpcio have no packages for 32 bits.

    A Raspberry Pi may run 32-bit programs on a 64-bit kernel.
    """
    found = f"{8 * pointer_bytes}-bit Python on {machine}"
    if pointer_bytes < 8:
        return Check.fail(
            "userland",
            found,
            "write a 64-bit image of the system to the card (Raspberry Pi OS (64-bit)); a 64-bit kernel alone is not "
            "enough",
        )
    if machine not in _TESTED_MACHINES:
        remedy = "only x86-64 and arm64 are tested: build torch yourself on this machine"
        return Check.warn("userland", found, remedy)
    return Check.ok("userland", found)


@dataclass(frozen=True)
class TorchFacts:
    """An installed torch.

    Args:
        cuda: The CUDA version of its build; empty for none.
        device: Name of the first CUDA device; empty for none.
    """

    version: str
    cuda: str = ""
    device: str = ""


def ask_torch() -> TorchFacts | str | None:
    """Imports torch in another process, because it is large and may crash.

    Returns:
        The facts; the error of the import; or `None` if torch is not installed.
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
        return f"the import takes longer than {_TORCH_SECONDS} s"
    return TorchFacts(**json.loads(answer.stdout))


def is_jetson(root: Path = Path("/")) -> bool:
    """Returns whether this machine is a Jetson, also in a container."""
    model = text_of(root / "proc/device-tree/model") or ""
    return (root / "etc/nv_tegra_release").exists() or "jetson" in model.lower()


def check_torch(
    torch: TorchFacts | str | None, *, jetson: bool, wanted: str = "cpu", needed: bool = False
) -> Check:
    """Checks that torch can be imported and finds the device of the settings.

    Args:
        torch: The result of `ask_torch`.
        jetson: Whether this machine is a Jetson, which needs the torch of its vendor.
        wanted: The setting `device` of the service: "cpu" or "cuda".
        needed: Whether the role of this machine needs torch.
    """
    if torch is None:
        remedy = _VENDOR_TORCH if jetson else _INSTALL_TORCH
        if needed:
            return Check.fail("torch", "not installed", remedy)
        remedy = f"a client or a scheduler does not need it; all other roles do: {remedy}"
        return Check.warn("torch", "not installed", remedy)
    if isinstance(torch, str):
        remedy = _VENDOR_TORCH if jetson else "python -m pip install --force-reinstall torch"
        return Check.fail("torch", torch, remedy)
    found = f"{torch.version} on {torch.device or 'cpu'}"
    if jetson and not torch.cuda:
        return Check(
            "torch",
            "fail" if wanted == "cuda" else "warn",
            f"{found}: a torch without CUDA was installed over that of JetPack",
            f"python -m pip uninstall torch, then {_VENDOR_TORCH}",
        )
    if wanted == "cuda" and not torch.device:
        return Check.fail(
            "torch",
            f"{found}, but the settings say device = cuda",
            'see whether `nvidia-smi` (Jetson: `tegrastats`) shows the GPU, or set device = "cpu"',
        )
    return Check.ok("torch", found)


def check_memory(available_bytes: int, *, of_box: bool = False) -> Check:
    """Checks the free memory. A process with torch takes about 0.4 GB before it loads a model.

    Args:
        of_box: Whether this machine runs one service instead of a testbed.
    """
    found = f"{available_bytes / _GB:.1f} GB available"
    if available_bytes < _GB:
        return Check(
            "memory",
            "warn" if of_box and available_bytes > 0.5 * _GB else "fail",
            found,
            "free memory: one device agent needs about 1 GB (`ps aux --sort -rss | head` shows the largest processes)",
        )
    if available_bytes < 6 * _GB and not of_box:
        remedy = "the demo needs about 6 GB: use fewer devices, for example --devices 1"
        return Check.warn("memory", found, remedy)
    return Check.ok("memory", found)


def check_swap(table: Path = Path("/proc/swaps")) -> Check:
    """Warns of swap on a disk or a card, which makes training far slower and wears the card out."""
    lines = (text_of(table) or "").splitlines()[1:]
    areas = [line.split()[0] for line in lines if line.strip()]
    if any("zram" not in area for area in areas):
        return Check.warn(
            "swap",
            ", ".join(areas),
            "a machine that trains must not swap to a card: sudo swapoff -a, and remove the swap from /etc/fstab "
            "(Raspberry Pi OS 12: sudo systemctl disable --now dphys-swapfile)",
        )
    return Check.ok("swap", f"{', '.join(areas)} (compressed memory)" if areas else "none")


def check_disk(folder: Path, *, keeps_state: bool = True) -> Check:
    """Checks the free disk space.

    A commit has the model, and for each cluster an optimizer state that is twice as large as the model.

    Args:
        keeps_state: False for a device agent, which stores no commits.
    """
    free_bytes = free_disk_bytes(folder)
    found = f"{free_bytes / _GB:.1f} GB free"
    if free_bytes < _GB:
        return Check.fail("disk", found, "free at least 1 GB, or use another --workspace DIR")
    if free_bytes < 5 * _GB and keeps_state:
        remedy = "commits of a model of 100 MB take about 1 GB: see that the disk does not fill up"
        return Check.warn("disk", found, remedy)
    return Check.ok("disk", found)


def check_packages(
    role: str,
    is_installed: Callable[[str], bool] = lambda name: importlib.util.find_spec(name) is not None,
    *,
    needed: bool = False,
) -> Check:
    """Checks that the Python packages of a role are installed.

    Args:
        role: A key of `PACKAGES`.
        needed: Whether this machine has the role.
    """
    missing = [name for name in PACKAGES[role] if not is_installed(name)]
    if not missing:
        return Check.ok(f"packages: {role}", "complete")
    return Check(
        f"packages: {role}",
        "fail" if needed else "warn",
        f"missing {', '.join(missing)}",
        f"to run this role here, in the folder of the repository: python3 deploy/install.py {role}",
    )
