"""The compose testbed in a guest whose kernel has netem: the files and images of this checkout.

The guest has one processor, on which everything takes many times as long: so health is hardly ever asked for, no container
has a quota, and TLS, Grafana and the client are left out.
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
_QUIET = "quiet.yaml"
_PROJECT = "testbed"
_CPUS = ("SCHEDULER", "EDGE_SERVER", "CONTROL_UNIT", "LAPTOP", "RASPBERRY_PI_5", "RASPBERRY_PI_4")
_LEAVE_OUT = ("grafana", "collapipe")
_PORT = 5001


class GuestTestbed:
    """The testbed, up.

    Args:
        guest: With dockerd.
        hosts: The stage hosts.
    """

    def __init__(self, guest: Guest, hosts: list[str]) -> None:
        self.guest = guest
        self.hosts = hosts

    @property
    def shared(self) -> Path:
        """The folder of this machine that is `SHARED` in the guest."""
        return self.guest.shared

    def shape(self, *arguments: str) -> dict[str, Any]:
        """Runs `collapipe testbed shape` on this machine, and returns when the shapers have done it."""
        state = f"--state={self.shared}/shaping/links.json"
        command = [sys.executable, "-m", "collapipe_client", "testbed", "shape"]
        told: dict[str, Any] = json.loads(
            run([*command, *arguments, state, "--json", "--wait=60"], timeout=90.0)
        )
        return told

    def applied(self, sender: str) -> Mapping[str, Any]:
        """What the shaper of a host has in force, by receiver."""
        file = self.shared / "shaping" / "applied" / f"{sender}.json"
        links: Mapping[str, Any] = json.loads(file.read_text())["links"]
        return links

    def query(self, expression: str) -> list[dict[str, Any]]:
        """What Prometheus answers: each series with its labels and its value."""
        container = f"{_PROJECT}_prometheus_1"
        line = f"docker exec {container} promtool query instant -o json http://127.0.0.1:9090"
        answer = json.loads(self.guest.run(f"{line} '{expression}'"))
        rows = answer if isinstance(answer, list) else answer["data"]["result"]
        return [{**row["metric"], "value": float(row["value"][1])} for row in rows]

    def start_job(self, file: str, log: str) -> None:
        """Starts `collapipe train` in a container; its events are in `events(log)`."""
        client = "docker-compose run --rm -T collapipe train"
        self.guest.start(log, f"{client} /data/{file} --output /work/{log} --json")

    def events(self, log: str) -> list[dict[str, Any]]:
        """What a job has told so far."""
        lines = self.guest.log(log).splitlines()
        return [json.loads(line) for line in lines if line.startswith("{") and line.endswith("}")]

    def wait_for_rounds(self, log: str, rounds: int, timeout: float) -> None:
        """Waits until a job has committed so many rounds; fails with the end of its log when it ends before."""
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
        """The rate at which a plain connection brings frames from one container to another."""

        def inside(host: str, arguments: str) -> str:
            container = f"{_PROJECT}_{host}_1"
            return f'sh -c "docker exec -i {container} python - {arguments} < {_TRAFFIC}"'

        self.guest.start("frames", inside(receiver, f"receive-frames {_PORT} {frame_bytes}"))
        self.guest.wait_for("frames", "ready")
        self.guest.run(inside(sender, f"send-frames {receiver} {_PORT} {frame_bytes} {count}"), 120)
        told = self.guest.wait_for("frames", "}").splitlines()[-1]
        return float(json.loads(told)["rate_bps"])


@contextmanager
def guest_testbed(shared: Path, disk: Path) -> Iterator[GuestTestbed]:
    """Boots a guest and starts the testbed in it; returns when Prometheus has seen every host.

    Args:
        shared: Becomes `SHARED` in the guest; `data` in it is /data in the containers.
        disk: With the images; it is changed.
    """
    shutil.copytree(ROOT / "deploy/netem/state", shared / "shaping")
    with Guest(shared, memory="6G", disk=disk) as guest:
        settings = {
            "COMPOSE_FILE": os.pathsep.join(
                [*(str(_FOLDER / layer) for layer in LAYERS), f"{SHARED}/{_QUIET}"]
            ),
            "COMPOSE_PROJECT_NAME": _PROJECT,
            "COMPOSE_HTTP_TIMEOUT": "600",
            "COLLAPIPE_VERSION": VERSION,
            "COLLAPIPE_DATA": f"{SHARED}/data",
            "COLLAPIPE_SHAPING": f"{SHARED}/shaping",
            # one processor for all: a share of it would be throttled in the middle of a frame
            **{f"{kind}_CPUS": "1" for kind in _CPUS},
        }
        guest.run("; ".join(f"export {name}={value}" for name, value in settings.items()))
        services = _services()
        (shared / _QUIET).write_text(yaml.safe_dump({"services": _quiet(services)}))
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


def _quiet(services: list[str]) -> dict[str, Any]:
    """Health checks that cost nothing: where a process takes a second of the only processor, twenty would take it all."""
    open_port = "import socket; socket.create_connection(('127.0.0.1', 7100), 5)"
    checks: dict[str, Any] = {name: {"healthcheck": {"interval": "1h"}} for name in services}
    checks["scheduler"]["healthcheck"] = {
        "test": ["CMD", "python", "-c", open_port],
        "interval": "5s",
    }
    return checks
