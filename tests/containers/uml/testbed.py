"""Runs the compose testbed of this checkout in a guest whose kernel has netem.

The guest has only one slow processor. Therefore health checks are rare, no container has a CPU quota, and the
testbed has no TLS, no Grafana and no client service.
"""

import json
import os
import shutil
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml

from containers.engine import run
from containers.engine_images import ROOT, VERSION
from containers.uml.guest import SHARED, Guest

LAYERS = ("compose.yaml", "compose.netem.yaml", "compose.observability.yaml")
_FOLDER = ROOT / "deploy" / "compose"
_TRAFFIC = Path(__file__).with_name("traffic.py")
_HEALTH_CHECKS = "health-checks.yaml"
_PROJECT = "testbed"
_CPUS = ("SCHEDULER", "EDGE_SERVER", "CONTROL_UNIT", "LAPTOP", "RASPBERRY_PI_5", "RASPBERRY_PI_4")
_LEAVE_OUT = ("grafana", "collapipe")
_PORT = 5001


class GuestTestbed:
    """A running testbed.

    Args:
        guest: A guest with dockerd.
        hosts: Names of the stage hosts.
    """

    def __init__(self, guest: Guest, hosts: list[str]) -> None:
        self.guest = guest
        self.hosts = hosts

    @property
    def shared(self) -> Path:
        """The folder of this machine that the guest sees as `SHARED`."""
        return self.guest.shared

    def shape(self, *arguments: str) -> dict[str, Any]:
        """Runs `collapipe testbed shape` on this machine, which waits until the shapers have applied it."""
        state = f"--state={self.shared}/shaping/links.json"
        command = [sys.executable, "-m", "collapipe_client", "testbed", "shape"]
        confirmed: dict[str, Any] = json.loads(
            run([*command, *arguments, state, "--json", "--wait=60"], timeout=90.0)
        )
        return confirmed

    def applied(self, sender: str) -> Mapping[str, Any]:
        """Returns the settings that the shaper of a host has applied, by receiver."""
        file = self.shared / "shaping" / "applied" / f"{sender}.json"
        links: Mapping[str, Any] = json.loads(file.read_text())["links"]
        return links

    def query(self, expression: str) -> list[dict[str, Any]]:
        """Queries Prometheus. Returns the labels and the value of each series."""
        container = f"{_PROJECT}_prometheus_1"
        line = f"docker exec {container} promtool query instant -o json http://127.0.0.1:9090"
        answer = json.loads(self.guest.run(f"{line} '{expression}'"))
        rows = answer if isinstance(answer, list) else answer["data"]["result"]
        return [{**row["metric"], "value": float(row["value"][1])} for row in rows]

    def start_job(self, file: str, log: str) -> None:
        """Starts `collapipe train` in a container. `events(log)` returns its events."""
        client = "docker-compose run --rm -T collapipe train"
        self.guest.start(log, f"{client} /data/{file} --output /work/{log} --json")

    def events(self, log: str) -> list[dict[str, Any]]:
        """Returns the events of a job so far."""
        lines = self.guest.log(log).splitlines()
        return [json.loads(line) for line in lines if line.startswith("{") and line.endswith("}")]

    def wait_for_rounds(self, log: str, rounds: int, timeout: float) -> None:
        """Waits until a job has committed `rounds` rounds. Fails with its log if the job ends before."""
        deadline = time.monotonic() + timeout
        while True:
            events = self.events(log)
            if sum(event["event"] == "round_committed" for event in events) >= rounds:
                return
            ended = [e for e in events if e["event"] == "error" or e.get("state") == "failed"]
            assert not ended and time.monotonic() < deadline, self.guest.log(log)[-2000:]
            time.sleep(0.5)

    def wait_for_end(self, log: str, timeout: float) -> None:
        """Waits until a job has succeeded."""
        deadline = time.monotonic() + timeout
        while not any(event["event"] == "exported" for event in self.events(log)):
            assert time.monotonic() < deadline, self.guest.log(log)[-2000:]
            time.sleep(0.5)

    def frames_bps(self, sender: str, receiver: str, frame_bytes: int, count: int) -> float:
        """Returns the rate in bit/s at which a plain TCP connection carries frames between two containers."""

        def inside(host: str, arguments: str) -> str:
            container = f"{_PROJECT}_{host}_1"
            return f'sh -c "docker exec -i {container} python - {arguments} < {_TRAFFIC}"'

        self.guest.start("frames", inside(receiver, f"receive-frames {_PORT} {frame_bytes}"))
        self.guest.wait_for("frames", "ready")
        self.guest.run(inside(sender, f"send-frames {receiver} {_PORT} {frame_bytes} {count}"), 120)
        report = self.guest.wait_for("frames", "}").splitlines()[-1]
        return float(json.loads(report)["rate_bps"])


@contextmanager
def guest_testbed(shared: Path, disk: Path) -> Iterator[GuestTestbed]:
    """Boots a guest, starts the testbed in it, and waits until Prometheus scrapes every host.

    Args:
        shared: Folder that becomes `SHARED` in the guest. Its subfolder `data` is /data in the containers.
        disk: Disk image with the Docker images. The guest changes it.
    """
    shutil.copytree(ROOT / "deploy/netem/state", shared / "shaping")
    with Guest(shared, memory="6G", disk=disk) as guest:
        settings = {
            "COMPOSE_FILE": os.pathsep.join(
                [*(str(_FOLDER / layer) for layer in LAYERS), f"{SHARED}/{_HEALTH_CHECKS}"]
            ),
            "COMPOSE_PROJECT_NAME": _PROJECT,
            "COMPOSE_HTTP_TIMEOUT": "600",
            "COLLAPIPE_VERSION": VERSION,
            "COLLAPIPE_DATA": f"{SHARED}/data",
            "COLLAPIPE_SHAPING": f"{SHARED}/shaping",
            # A smaller quota would interrupt a container in the middle of a frame.
            **{f"{kind}_CPUS": "1" for kind in _CPUS},
        }
        guest.run("; ".join(f"export {name}={value}" for name, value in settings.items()))
        services = _services()
        (shared / _HEALTH_CHECKS).write_text(
            yaml.safe_dump({"services": _cheap_health_checks(services)})
        )
        guest.start("dockerd", "dockerd")
        guest.wait_for("dockerd", "API listen on", 60)
        guest.run(f"docker-compose up --detach --no-build {' '.join(services)}", 300)
        hosts = [name.removeprefix("shape-") for name in services if name.startswith("shape-")]
        testbed = GuestTestbed(guest, hosts)
        deadline = time.monotonic() + 240
        while len(testbed.query('up{job="collapipe"} == 1')) < len(hosts) + 1:
            assert time.monotonic() < deadline, guest.run("docker-compose ps")
            time.sleep(3)
        yield testbed


def _services() -> list[str]:
    names: list[str] = []
    for layer in LAYERS:
        names += yaml.safe_load((_FOLDER / layer).read_text())["services"]
    return sorted(set(names) - set(_LEAVE_OUT))


def _cheap_health_checks(services: list[str]) -> dict[str, Any]:
    """Returns overrides that make health checks cheap.

    Starting a process takes a second of the only processor, so the usual checks would use all of its time.
    """
    open_port = "import socket; socket.create_connection(('127.0.0.1', 7100), 5)"
    checks: dict[str, Any] = {name: {"healthcheck": {"interval": "1h"}} for name in services}
    checks["scheduler"]["healthcheck"] = {
        "test": ["CMD", "python", "-c", open_port],
        "interval": "5s",
    }
    return checks
