"""Runs the testbed of deploy/compose as a separate Compose project."""

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml

from containers.base_image import ensure_image
from containers.engine import CommandError, Engine, run
from containers.engine_images import ROOT, VERSION

FOLDER = ROOT / "deploy" / "compose"
LAYERS = (
    *("compose.yaml", "compose.tls.yaml", "compose.netem.yaml"),
    *("compose.observability.yaml", "compose.observability.tls.yaml"),
)
PROJECT = "collapipe-test"
CLIENT = "collapipe"
HEALTHY_SECONDS = 240.0
_DOWN_SECONDS = 180.0


class ComposeTestbed:
    """A testbed of containers.

    Args:
        directory: A folder of this machine. Its subfolder `data` is /data in the containers, and `out` gets
            the files that the client writes.
        layers: Names of compose files in deploy/compose.
        settings: Environment variables that override those of .env.
    """

    def __init__(
        self,
        engine: Engine,
        directory: Path,
        layers: Sequence[str] = LAYERS,
        settings: Mapping[str, str] | None = None,
    ) -> None:
        self.engine = engine
        self.data, self.out = directory / "data", directory / "out"
        for folder in (self.data, self.out):
            folder.mkdir()
            folder.chmod(0o777)  # the user of the containers has another id
        self.shaping = directory / "shaping"
        shutil.copytree(ROOT / "deploy/netem/state", self.shaping)
        self.environment = {
            **engine.environment,
            "COMPOSE_FILE": os.pathsep.join(str(FOLDER / layer) for layer in layers),
            "COMPOSE_PROJECT_NAME": PROJECT,
            "COLLAPIPE_VERSION": VERSION,
            "COLLAPIPE_DATA": str(self.data),
            "COLLAPIPE_TLS": str(directory / "tls"),
            "COLLAPIPE_SHAPING": str(self.shaping),
            # With port 0, Docker chooses a free port.
            **dict.fromkeys(("COLLAPIPE_SCHEDULER_PORT", "PROMETHEUS_PORT", "GRAFANA_PORT"), "0"),
            **(settings or {}),
        }

    def compose(self, *arguments: str, check: bool = True, timeout: float = 120.0) -> str:
        """Runs `docker-compose` and returns its output."""
        command = [*self.engine.compose, *arguments]
        return run(command, self.environment, check=check, timeout=timeout, cwd=FOLDER)

    def services(self) -> dict[str, dict[str, Any]]:
        """Returns the services that `up` starts. Grafana is left out if its image cannot be pulled."""
        document = yaml.safe_load(self.compose("config"))
        found = {}
        for name, service in document["services"].items():
            if "profiles" in service:  # `up` does not start it: users run it for single commands
                continue
            if ensure_image(self.engine, service["image"]):
                found[name] = service
            else:
                assert name == "grafana", (
                    f"the image of {name} cannot be pulled, and has no substitute"
                )
                print("grafana is left out: its image cannot be pulled here")
        return found

    def up(self) -> float:
        """Starts all services, and returns the seconds until all of them are healthy."""
        started = time.monotonic()
        names = sorted(self.services())
        try:
            self.compose("up", "--detach", "--no-build", *names, timeout=HEALTHY_SECONDS)
        except CommandError as error:
            logs = self.compose("logs", "--tail=20", check=False)
            raise CommandError(f"{error}\n{logs}") from None
        self.wait_until_healthy(names)
        return time.monotonic() - started

    def wait_until_healthy(self, services: Sequence[str]) -> None:
        """Waits until all of these services are healthy. On failure, shows the logs of the unhealthy ones."""
        deadline = time.monotonic() + HEALTHY_SECONDS
        while True:
            states = self.health()
            waiting = {name: states.get(name, "missing") for name in services}
            done = ("healthy", "exited:0")  # the service that issues certificates ends
            waiting = {name: state for name, state in waiting.items() if state not in done}
            if not waiting:
                return
            failed = any(state.startswith("exited") for state in waiting.values())
            if failed or time.monotonic() > deadline:
                logs = self.compose("logs", "--tail=20", *waiting, check=False)
                raise CommandError(f"not healthy: {waiting}\n{logs}")
            time.sleep(0.5)

    def health(self) -> dict[str, str]:
        """Returns the health of every service that has a container.

        The value is the state of the container if it does not run or has no health check.
        """
        template = (
            '{{if eq .State.Status "exited"}}exited:{{.State.ExitCode}}{{else if .State.Health}}'
            "{{.State.Health.Status}}{{else}}{{.State.Status}}{{end}}"
        )
        label = '{{index .Config.Labels "com.docker.compose.service"}}'
        ids = self.containers()
        if not ids:
            return {}
        lines = self.engine.run("inspect", "--format", f"{label} {template}", *ids).splitlines()
        return dict(line.split() for line in lines)

    def containers(self) -> list[str]:
        """Returns the ids of the project's containers, including stopped ones."""
        label = f"label=com.docker.compose.project={PROJECT}"
        return self.engine.run("ps", "--all", "--quiet", "--filter", label).split()

    def container(self, service: str) -> str:
        """Returns the id of the container of a service."""
        return self.compose("ps", "--quiet", service)

    def client(self, *arguments: str, timeout: float = 120.0, check: bool = True) -> str:
        """Runs the `collapipe` command in a container and returns its output. /out is the folder `out`."""
        return run(
            self._client_command(*arguments),
            self.environment,
            timeout=timeout,
            check=check,
            cwd=FOLDER,
        )

    @contextmanager
    def running_client(self, *arguments: str) -> Iterator["subprocess.Popen[str]"]:
        """Runs the `collapipe` command in the background. The caller reads its output from the process."""
        process = subprocess.Popen(
            self._client_command(*arguments),
            env=self.environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            cwd=FOLDER,
        )
        try:
            yield process
        finally:
            process.terminate()
            process.communicate()

    def _client_command(self, *arguments: str) -> list[str]:
        volume = f"--volume={self.out}:/out"
        return [*self.engine.compose, "run", "--rm", "-T", volume, CLIENT, *arguments]

    def exec(self, service: str, *command: str) -> str:
        """Runs a command in the container of a service, and returns its output."""
        return self.engine.run("exec", self.container(service), *command)

    def shape(self, link: str, profile: str) -> None:
        """Runs `collapipe testbed shape` on this machine, which waits until the shapers have applied it."""
        state = f"--state={self.shaping / 'links.json'}"
        command = [sys.executable, "-m", "collapipe_client", "testbed", "shape", link, profile]
        run([*command, state], timeout=60.0)

    def decisions(self, job: str, rounds: int) -> list[dict[str, Any]]:
        """Returns the scheduler's decision of each round of a job, with the estimates that it rests on."""
        loop = (
            'for n in $(seq "$2"); do collapipe plan explain "$n" --job "$1" --json || exit; done'
        )
        command = [*self.engine.compose, "run", "--rm", "-T", "--entrypoint=sh", CLIENT]
        command += ["-c", loop, "sh", job, str(rounds)]
        output = run(command, self.environment, timeout=30.0 + 10.0 * rounds, cwd=FOLDER)
        return [document["decision"] for document in json_lines(output)]

    def address(self, service: str, port: int) -> str:
        """Returns the address host:port at which this machine reaches a published port."""
        return self.compose("port", service, str(port))

    def down(self) -> None:
        """Stops all containers, and removes them with their volumes."""
        self.compose("down", "--volumes", "--remove-orphans", timeout=_DOWN_SECONDS)


def json_lines(text: str) -> list[dict[str, Any]]:
    """Returns the JSON documents that a command printed, one for each line. Ignores all other lines."""
    return [json.loads(line) for line in text.splitlines() if line.startswith("{")]
