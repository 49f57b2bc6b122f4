"""Installs the packages of a device agent as on a 64-bit Raspberry Pi OS, and runs them by emulation.

pip itself runs emulated, so that it evaluates the markers and tags of packages for aarch64. pip's option
--platform is not enough: it chooses wheels by tag, but evaluates markers such as `platform_machine` for this
machine.
"""

import hashlib
import json
import os
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from packaging.tags import Tag
from packaging.utils import parse_wheel_filename

from containers.arm64.root import emulator, ensure_root, put_in_place
from containers.base_image import pip_setting
from containers.engine import cache_directory, run

PROCESSORS = {"raspberry-pi-4": "cortex-a72", "raspberry-pi-5": "cortex-a76"}
"""The emulator's name of the processor of each device profile."""

_CHECKOUT = Path(__file__).parents[3]
_LOCKS = [_CHECKOUT / "requirements" / name for name in ("device.txt", "torch-arm64.txt")]
_PYTHON = "usr/bin/python3.11"
_PIP = "usr/share/python-wheels"
_LIMIT_SECONDS = 600.0
_WARM_UP = "import collapipe.device_agent.app, transformers.models.bert.modeling_bert"


@dataclass(frozen=True)
class Wheel:
    """An installed wheel.

    Args:
        file: The file name.
        size_bytes: The size of the downloaded file.
        sha256: The digest of the file, in hexadecimal.
    """

    file: str
    size_bytes: int
    sha256: str

    @property
    def name(self) -> str:
        """The name of the distribution."""
        return parse_wheel_filename(self.file)[0]

    @property
    def version(self) -> str:
        """The version of the distribution."""
        return str(parse_wheel_filename(self.file)[1])

    @property
    def tags(self) -> frozenset[Tag]:
        """The platforms and Python versions for which the wheel is built."""
        return parse_wheel_filename(self.file)[3]


@dataclass(frozen=True)
class Arm64:
    """An emulated aarch64 machine.

    Args:
        emulator: Path of the emulator.
        root: Folder with a Debian for arm64.
        site: Folder with installed packages, or None.
        wheels: The wheels that are installed in `site`.
    """

    emulator: str
    root: Path
    site: Path | None = None
    wheels: Sequence[Wheel] = ()

    def python(self, *arguments: str, device: str = "raspberry-pi-4") -> list[str]:
        """Returns the command line that runs Python on an emulated device."""
        emulated = [self.emulator, "-cpu", PROCESSORS[device], "-L", str(self.root)]
        return [*emulated, str(self.root / _PYTHON), "-s", *arguments]

    def environment(self) -> dict[str, str]:
        """Returns the environment variables of the emulated Python.

        It finds the services of this checkout, but no packages and no settings of this machine.
        """
        kept = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(("COLLAPIPE_", "PIP_", "PYTHON"))
        }
        kept["PIP_CONFIG_FILE"] = os.devnull
        if self.site is not None:
            kept["PYTHONPATH"] = os.pathsep.join([str(self.site), str(_CHECKOUT / "services")])
            # Keep the compiled modules: under emulation, compiling takes longer than importing.
            kept["PYTHONPYCACHEPREFIX"] = str(self.site.with_name("compiled"))
        return kept

    def run(self, *arguments: str, device: str = "raspberry-pi-4") -> str:
        """Runs the emulated Python and returns its output."""
        command = self.python(*arguments, device=device)
        return run(command, self.environment(), timeout=_LIMIT_SECONDS)


def ensure_arm64() -> Arm64:
    """Installs the packages of a device agent, or finds them in the cache."""
    bare = Arm64(emulator(), ensure_root())
    texts = [path.read_text(encoding="utf-8") for path in _LOCKS]
    key = hashlib.sha256("\0".join([bare.root.name, *texts]).encode()).hexdigest()[:16]
    place = cache_directory() / f"arm64-device-{key}"
    if not place.is_dir():
        with tempfile.TemporaryDirectory(dir=place.parent, prefix="arm64-") as name:
            made = Path(name) / "device"
            wheels = _install(bare, made / "site", Path(name) / "wheels")
            text = json.dumps([asdict(wheel) for wheel in wheels], indent=1)
            (made / "wheels.json").write_text(text, encoding="utf-8")
            put_in_place(made, place)
    wheels = [Wheel(**entry) for entry in json.loads((place / "wheels.json").read_bytes())]
    arm64 = Arm64(bare.emulator, bare.root, place / "site", wheels)
    arm64.run("-c", _WARM_UP)
    return arm64


def _install(arm64: Arm64, site: Path, wheels: Path) -> list[Wheel]:
    """Downloads and installs the locked wheels. Fails if a package has no wheel for aarch64."""
    (pip,) = (arm64.root / _PIP).glob("pip-*.whl")
    options = [str(pip / "pip"), "--disable-pip-version-check", "--quiet"]
    for name in ("cert", "proxy"):
        if value := pip_setting(name):
            options.append(f"--{name}={value}")
    index = ["--no-cache-dir"]
    if url := pip_setting("index-url"):
        index.append(f"--index-url={url}")
    folder = ["--only-binary=:all:", "--dest", str(wheels)]
    locks = ["--no-deps", "--require-hashes", *(f"--requirement={path}" for path in _LOCKS)]
    arm64.run(*options, "download", *index, *folder, *locks)
    files = sorted(wheels.iterdir())
    unpack = ["--no-index", "--no-deps", "--no-compile", "--target", str(site)]
    arm64.run(*options, "install", *unpack, *map(str, files))
    return [
        Wheel(file.name, file.stat().st_size, hashlib.sha256(file.read_bytes()).hexdigest())
        for file in files
    ]
