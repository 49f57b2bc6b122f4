"""Runs federations of Flower (https://flower.ai), with which `benchmarks.averaging` compares.

Flower needs other versions of some packages than this project, so it is installed in a folder of its own, by hand:

    pip install --target DIR flwr

Its telemetry, its update check and its installation of packages are turned off. All processes use loopback.
"""

import json
import os
import socket
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path

APP = Path(__file__).parent / "flower_app"
_TIMEOUT_SECONDS = 600.0
_POLL_SECONDS = 0.2


class Flower:
    """A superlink with one supernode for each client.

    Args:
        installation: The folder in which `flwr` is installed.
        directory: Folder for the logs and the configuration.
    """

    def __init__(self, installation: Path, directory: Path, parameters: int, clients: int) -> None:
        self._bin = installation / "bin"
        if not (self._bin / "flower-superlink").is_file():
            raise SystemExit(
                f"{self._bin} has no flower-superlink: install Flower with pip install --target DIR flwr, and give DIR"
            )
        self._directory = directory
        self._config = {"parameters": parameters, "clients": clients}
        self._environment = os.environ | {
            "PATH": f"{self._bin.resolve()}{os.pathsep}{os.environ['PATH']}",
            "PYTHONPATH": str(installation.resolve()),
            "FLWR_HOME": str(directory / "flower"),
            "FLWR_TELEMETRY_ENABLED": "0",
            "FLWR_DISABLE_UPDATE_CHECK": "1",
            "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
        }
        self._processes: list[subprocess.Popen[bytes]] = []
        self._owned = ExitStack()

    def __enter__(self) -> "Flower":
        with ExitStack() as owned:
            address = f"127.0.0.1:{_free_port()}"
            host, port = address.split(":")
            home = self._directory / "flower"
            home.mkdir()
            (home / "config.toml").write_text(
                f'[superlink]\ndefault = "here"\n\n[superlink.here]\naddress = "{address}"\ninsecure = true\n'
            )
            self._start(owned, "flower-superlink", "--insecure", "--host", host, "--port", port)
            for _ in range(self._config["clients"]):
                own = ("--host", host, "--port", str(_free_port()))
                self._start(owned, "flower-supernode", "--insecure", "--superlink", address, *own)
            self._owned = owned.pop_all()
        return self

    def __exit__(self, *exception: object) -> None:
        self._owned.close()

    def round_seconds(self, rounds: int) -> list[float]:
        """Runs a federation, and returns the time of each round but the first."""
        times = self._directory / "flower" / "times.json"
        times.unlink(missing_ok=True)
        config = self._config | {"rounds": rounds, "times": str(times)}
        text = " ".join(f"{name}={json.dumps(value)}" for name, value in config.items())
        deadline = time.monotonic() + _TIMEOUT_SECONDS
        command = [sys.executable, self._bin / "flwr", "run", APP, "--run-config", text]
        # The superlink may not serve yet.
        while subprocess.run(command, env=self._environment, capture_output=True).returncode:
            self._wait(deadline)
        while not times.exists():
            self._wait(deadline)
        seconds: list[float] = json.loads(times.read_text())
        return seconds[1:]

    def _wait(self, deadline: float) -> None:
        has_ended = any(process.poll() is not None for process in self._processes)
        if has_ended or time.monotonic() > deadline:
            what = (
                "a process of Flower has ended"
                if has_ended
                else f"Flower did not end its rounds within {_TIMEOUT_SECONDS:g} s"
            )
            logs = "".join(path.read_text() for path in self._directory.glob("flower-*.log"))
            raise SystemExit(f"{what}:\n{logs[-2000:]}")
        time.sleep(_POLL_SECONDS)

    def _start(self, owned: ExitStack, name: str, *options: str) -> None:
        with open(self._directory / f"{name}.log", "ab") as log:
            process = subprocess.Popen(
                [sys.executable, self._bin / name, *options],
                stdout=log,
                stderr=log,
                env=self._environment,
            )
        self._processes.append(process)
        owned.callback(process.wait)
        owned.callback(process.terminate)


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])
