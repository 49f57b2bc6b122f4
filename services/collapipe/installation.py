"""Where an installed role lies, and what says that a package is missing.

`deploy/install.py` imports this module before any package is installed, so it imports only the standard library.
"""

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

LOCKS = {
    "scheduler": "scheduler",
    "edge-server": "edge",
    "control-unit": "control",
    "device-agent": "device",
    "client": "client",
}
"""By role, the lock in `requirements` with its packages."""
WITHOUT_TORCH = ("scheduler", "client")
_SERVICE = (
    "grpc",
    "grpc_health",
    "google.protobuf",
    "prometheus_client",
    "psutil",
    "pydantic_settings",
)
_STAGE_HOST = (*_SERVICE, "numpy", "torch", "transformers", "peft", "safetensors", "re2")
PACKAGES = {
    "client": ("grpc", "psutil", "pydantic", "typer", "rich", "perfetto"),
    "scheduler": (
        *(*_SERVICE, "numpy", "scipy", "cvxpy", "numba", "dp_accounting", "httpx", "sacrebleu"),
        *("starlette", "uvicorn"),
    ),
    "device-agent": _STAGE_HOST,
    "control-unit": (*_STAGE_HOST, "tokenizers", "Crypto", "jinja2", "sacrebleu", "seqeval"),
    "edge-server": (*_STAGE_HOST, "tokenizers", "Crypto"),
}
"""By role, the packages that it imports, some of them only when a job needs them."""


@dataclass(frozen=True)
class Places:
    """Where one service of a machine has its files. Root installs it for the system, and others for themselves.

    Args:
        name: Of the service on this machine. Usually it is the role.
        programs: The virtual environment, which all services of the same user share.
        folder: What `collapipe join` writes: the settings and the certificate.
        units: Where systemd looks for service files.
        command: The link that makes `collapipe` a command of the shell.
    """

    name: str
    is_of_system: bool
    programs: Path
    folder: Path
    state: Path
    units: Path
    command: Path

    @property
    def service(self) -> str:
        """The name of its service file."""
        return f"collapipe-{self.name}.service"

    @property
    def user(self) -> str:
        """The user that runs a service of the system."""
        return f"collapipe-{self.name}"

    def systemctl(self, *words: str) -> list[str]:
        """Returns a command for the systemd that runs the service."""
        return ["systemctl", *(() if self.is_of_system else ("--user",)), *words]


def places_of(name: str, *, is_root: bool, home: Path) -> Places:
    """Returns the places of a service that this user installs."""
    if is_root:
        return Places(
            name,
            is_of_system=True,
            programs=Path("/opt/collapipe"),
            folder=Path("/etc/collapipe") / name,
            state=Path("/var/lib/collapipe") / name,
            units=Path("/etc/systemd/system"),
            command=Path("/usr/local/bin/collapipe"),
        )
    box = home / ".collapipe-box"
    return Places(
        name,
        is_of_system=False,
        programs=box / "programs",
        folder=box / name,
        state=box / name / "state",
        units=home / ".config/systemd/user",
        command=home / ".local/bin/collapipe",
    )


def own_places(name: str) -> Places:
    """Returns the places of a service of the user of this process. Without a home folder, they are not absolute."""
    return places_of(name, is_root=os.geteuid() == 0, home=Path(os.path.expanduser("~")))


def runs_systemd(places: Places) -> bool:
    """Returns whether the systemd runs that would run the service. A user has one in a session of a login."""
    if places.is_of_system:
        return os.path.exists("/run/systemd/system")
    session = os.environ.get("XDG_RUNTIME_DIR", "")
    return session != "" and os.path.exists(os.path.join(session, "systemd"))


@contextmanager
def one_line_for_a_missing_package(role: str) -> Iterator[None]:
    """Ends the process with one line if a package of a role is not installed. Ctrl-C in the block ends it without a traceback."""
    handler = signal.getsignal(signal.SIGINT)
    if handler is signal.default_int_handler:  # Otherwise it is ignored, as in the background.
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        for package in PACKAGES[role]:
            if find_spec(package) is None:
                raise ModuleNotFoundError(name=package)
        yield
        signal.signal(signal.SIGINT, handler)
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package in ("collapipe", "collapipe_client", ""):
            raise  # This is a bug.
        print(
            f"{role}: the Python package {package} is not installed in {sys.prefix}: run `python3 deploy/install.py {role}` in the "
            f"folder of the repository, or install requirements/{LOCKS[role]}.txt here",
            file=sys.stderr,
        )
        # After status 2, systemd does not restart.
        sys.exit(2)
