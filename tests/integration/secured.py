"""Runs services with mutual TLS, whose certificates and token come from `collapipe certs`."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

import httpx
import psutil
from typer.testing import CliRunner

from collapipe.rpc import Security
from collapipe_client import CollaPipeClient
from collapipe_client.cli import app

_LIMIT_SECONDS = 300.0
HOLDERS = (
    *("scheduler:scheduler", "edge-server:edge-server"),
    *("client:me", "client:other", "admin:root", "prometheus:prometheus"),
    *("control-unit:control-unit-0", "device-agent:device-0-0"),
)


class SecuredDeployment:
    """A deployment of a scheduler, an edge server, clusters and an authority.

    All hosts but one have issued certificates. device-0-1 gets its certificate by `collapipe join`. Other clusters than the first
    have one device.

    Args:
        folder: Folder for certificates, state and logs.
        num_clusters: Number of clusters.
    """

    def __init__(self, folder: Path, num_clusters: int = 1) -> None:
        self.folder = folder
        self._others = range(1, num_clusters)
        """Clusters other than the first."""
        self.authority = folder / "authority"
        self.addresses: dict[str, str] = {}
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._owned = ExitStack()

    def __enter__(self) -> "SecuredDeployment":
        with ExitStack() as owned:
            owned.callback(self._end)
            self._start()
            self._owned = owned.pop_all()
        return self

    def __exit__(self, *exception: object) -> None:
        self._owned.close()

    def security(self, name: str) -> Security:
        """Returns the certificate and key of a host or of a person."""
        tls = self.authority / "issued" / name
        if name == "device-0-1":
            tls = self.folder / "box" / "tls"
        return Security(tls / "ca.pem", tls / "cert.pem", tls / "key.pem")

    def renew(self) -> None:
        """Replaces the certificate of every process and person."""
        # Certificates that are not due yet are issued anew for other addresses only.
        collapipe("certs", "issue", str(self.authority), *HOLDERS, "--address", "127.0.0.9")
        collapipe("renew", "--now", "--folder", str(self.folder / "box"))

    def client(self, name: str = "me") -> CollaPipeClient:
        """Opens a client."""
        return CollaPipeClient(self.addresses["scheduler"], self.security(name))

    def log(self, name: str) -> str:
        """Returns the output of a process so far."""
        return (self.folder / f"{name}.log").read_text(encoding="utf-8")

    def metrics_page(self, name: str) -> str:
        """Returns the metrics of a process, as Prometheus reads them."""
        ready = json.loads((self.folder / f"{name}.ready").read_text(encoding="utf-8"))
        url = f"https://{ready['metrics_address']}/metrics"
        context = self.security("root").client_context()
        assert context is not None
        page = httpx.get(url, trust_env=False, verify=context)
        return page.raise_for_status().text

    def memory(self) -> dict[str, int]:
        """Returns the resident memory of each process that runs, in bytes, by its name.

        Without pages of files, which the kernel drops and reads again.
        """
        held = {
            name: psutil.Process(process.pid).memory_info()
            for name, process in self._processes.items()
            if process.poll() is None
        }
        return {name: each.rss - each.shared for name, each in held.items()}

    def start(self, name: str, module: str, *options: str) -> None:
        """Starts a service."""
        ready = self.folder / f"{name}.ready"
        own = ["--listen", "127.0.0.1:0", "--metrics-listen", "127.0.0.1:0"]
        self._spawn(name, [module, *own, "--ready-file", str(ready), *options])

    def _spawn(
        self, name: str, line: Sequence[str], environment: Mapping[str, str] | None = None
    ) -> None:
        with open(self.folder / f"{name}.log", "wb") as log:
            self._processes[name] = subprocess.Popen(
                [sys.executable, "-m", *line],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=os.environ | dict(environment or {}),
            )

    def wait(self, *names: str) -> None:
        """Waits until services accept calls."""
        deadline = time.monotonic() + _LIMIT_SECONDS
        for name in names:
            ready = self.folder / f"{name}.ready"
            while not ready.exists():
                assert self._processes[name].poll() is None, self.log(name)
                assert time.monotonic() < deadline, f"{name} accepts no calls: {self.log(name)}"
                time.sleep(0.05)
            self.addresses[name] = json.loads(ready.read_text())["address"]

    def files(self, name: str) -> Sequence[str]:
        """Returns the options that name the certificate files of a host."""
        tls = self.security(name)
        return [f"--tls-ca={tls.ca}", f"--tls-cert={tls.certificate}", f"--tls-key={tls.key}"]

    def _start(self) -> None:
        in_others = [
            f"{role}:{name}@{index}"
            for index in self._others
            for role, name in (
                ("control-unit", f"control-unit-{index}"),
                ("device-agent", f"device-{index}-0"),
            )
        ]
        collapipe("certs", "issue", str(self.authority), "--init", *HOLDERS, *in_others)
        self.start("authority", "collapipe.authority", "--dir", str(self.authority))
        state = str(self.folder / "scheduler-state")
        revoked = str(self.authority / "revoked.pb")
        self.start(
            *("scheduler", "collapipe.scheduler", "--state-dir", state),
            *("--tls-revoked", revoked, *self.files("scheduler")),
        )
        self.wait("authority", "scheduler")
        scheduler = ["--scheduler", self.addresses["scheduler"]]
        keepers = {f"control-unit-{index}": "control_unit" for index in (0, *self._others)}
        for name, module in {"edge-server": "edge_server", **keepers}.items():
            # The files of jobs are in other folders of the same test run.
            own = ["--state-dir", str(self.folder / "state" / name)]
            own += ["--data-root", str(self.folder.parent)]
            if module == "control_unit":
                own += ["--data-clients", "me", "--data-clients", "root"]
            self.start(name, f"collapipe.{module}", *scheduler, *own, *self.files(name))
        devices = [f"device-{index}-0" for index in (0, *self._others)]
        for name in devices:
            self.start(name, "collapipe.device_agent", *scheduler, *self.files(name))
        self._join(scheduler)
        self.wait("edge-server", *keepers, *devices, "device-0-1")

    def _join(self, scheduler: Sequence[str]) -> None:
        """Joins device-0-1 as on another machine, which gets only the token."""
        token = collapipe(
            *("certs", "token", str(self.authority), "device-agent:device-0-1", *scheduler),
            *("--authority", self.addresses["authority"]),
        )
        box, state = self.folder / "box", ["--state-dir", str(self.folder / "device-0-1-state")]
        # The command becomes the device agent. Settings that only this test needs are in the environment.
        ready = str(self.folder / "device-0-1.ready")
        environment = {
            "READY_FILE": ready,
            "LISTEN": "127.0.0.1:0",
            "METRICS_LISTEN": "127.0.0.1:0",
            "THREADS": "1",  # as the other processes of this machine, so that results are the same bits
        }
        self._spawn(
            "device-0-1",
            ["collapipe_client", "join", token, "--folder", str(box), "--run", *state],
            {f"COLLAPIPE_{name}": value for name, value in environment.items()}
            | {"COLLAPIPE_ADVERTISE": ""},
        )

    def _end(self) -> None:
        for process in self._processes.values():
            process.terminate()
        for process in self._processes.values():
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def collapipe(*arguments: str) -> str:
    """Runs a command of the client and returns its output."""
    result = CliRunner().invoke(app, list(arguments))
    assert result.exit_code == 0, result.output
    return result.stdout.strip()
