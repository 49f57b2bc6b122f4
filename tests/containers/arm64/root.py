"""Unpacks Debian packages for arm64 into a folder, for programs under user-mode emulation.

This needs no root rights, no chroot and no binfmt_misc: the emulator searches every file first in the folder,
and then on this machine.
"""

import hashlib
import shutil
import tempfile
from pathlib import Path

import pytest

from containers.base_image import debian_mirror
from containers.engine import cache_directory, run

_SUITE = "bookworm"
"""The Debian release with Python 3.11, on which Raspberry Pi OS is based."""
_PACKAGES = ("libstdc++6", "python3-pip-whl", "python3.11")
_KEYRING = Path("/usr/share/keyrings/debian-archive-keyring.gpg")
_LIMIT_SECONDS = 300.0


def emulator() -> str:
    """Finds the emulator. Skips the test if it is not installed."""
    for name in ("qemu-aarch64", "qemu-aarch64-static"):
        if found := shutil.which(name):
            return found
    pytest.skip("no qemu-aarch64 on this machine: apt-get install qemu-user")


def ensure_root() -> Path:
    """Makes the folder, or finds it in the cache. Skips the test on a machine without Debian's apt."""
    if shutil.which("apt-get") is None or not _KEYRING.is_file():
        pytest.skip(f"packages for arm64 need a Debian, with apt-get and {_KEYRING}")
    source = f"deb [arch=arm64 signed-by={_KEYRING}] {debian_mirror()} {_SUITE} main\n"
    key = hashlib.sha256("\0".join([source, *_PACKAGES]).encode()).hexdigest()[:16]
    root = cache_directory() / f"arm64-root-{key}"
    if not root.is_dir():
        with tempfile.TemporaryDirectory(dir=root.parent, prefix="arm64-") as name:
            made = Path(name) / "root"
            made.mkdir()
            for archive in _download(Path(name), source):
                run(["dpkg-deb", "--extract", str(archive), str(made)])
            put_in_place(made, root)
    return root


def put_in_place(made: Path, place: Path) -> None:
    """Moves a finished folder to its final place, unless another process has already put one there."""
    try:
        made.rename(place)
    except OSError:
        if not place.is_dir():
            raise


def _download(folder: Path, source: str) -> list[Path]:
    """Downloads the packages and their dependencies. apt ignores the packages of this machine."""
    lists, archives = folder / "state/lists/partial", folder / "cache/archives/partial"
    for directory in (lists, archives):
        directory.mkdir(parents=True)
    (folder / "sources.list").write_text(source, encoding="utf-8")
    status = folder / "state/status"
    status.touch()
    options = {
        "APT::Architecture": "arm64",
        "APT::Architectures": "arm64",
        "APT::Install-Recommends": "false",
        "APT::Sandbox::User": "",  # the default user may not write to this folder
        "Acquire::Languages": "none",
        "Dir::Cache": f"{folder}/cache",
        "Dir::Etc::sourcelist": f"{folder}/sources.list",
        "Dir::Etc::sourceparts": "-",
        "Dir::State": f"{folder}/state",
        "Dir::State::status": str(status),
    }
    apt = ["apt-get", "-qq", *(part for item in options.items() for part in ("-o", "=".join(item)))]
    run([*apt, "update"], timeout=_LIMIT_SECONDS)
    run([*apt, "install", "--yes", "--download-only", *_PACKAGES], timeout=_LIMIT_SECONDS)
    return sorted(archives.parent.glob("*.deb"))
