"""Runs one cluster of this checkout in a guest whose kernel has netem.

Each service has a network namespace with the project's own shaper, and a bridge connects them. The guest has only
one slow processor, so there is no TLS.
"""

import json
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from collapipe.traffic_shaping.shaper_process.links_file import LinksFile
from containers.engine import run
from containers.engine_images import ROOT
from containers.uml.guest import SHARED, Guest

SCHEDULER, EDGE_SERVER = "scheduler", "edge-server"
_MODULES = {
    SCHEDULER: "scheduler",
    EDGE_SERVER: "edge_server",
    "control-unit-0": "control_unit",
    **dict.fromkeys(("device-0-0", "device-0-1", "device-0-2"), "device_agent"),
}
HOSTS = [name for name in _MODULES if name != SCHEDULER]
"""The hosts of stages. Only their links are shaped."""
_NETWORK = "10.91.0"
_GRPC_PORT, _METRICS_PORT, _PORT = 7100, 9100, 5001
_PROMETHEUS = f"http://{_NETWORK}.1:9090"
_SCRAPE_SECONDS = 2
_START_SECONDS = 240.0
_TRAFFIC = Path(__file__).with_name("traffic.py")


class GuestTestbed:
    """A running testbed in a guest."""

    def __init__(self, guest: Guest) -> None:
        self.guest = guest

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
        answer = self.guest.run(f"promtool query instant -o json {_PROMETHEUS} '{expression}'")
        return [{**row["metric"], "value": float(row["value"][1])} for row in json.loads(answer)]

    def start_job(self, file: str, log: str) -> None:
        """Starts `collapipe train` with a job file in the folder `data`. `events(log)` returns its events."""
        options = f"--json --insecure --scheduler {SCHEDULER}:{_GRPC_PORT} --output {SHARED}/{log}"
        self.guest.start(
            log, f"{sys.executable} -m collapipe_client train {SHARED}/data/{file} {options}"
        )

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
        """Returns the rate in bit/s at which a plain TCP connection carries frames between two hosts."""
        script = f"{sys.executable} {_TRAFFIC}"
        receive = f"{script} receive-frames {_PORT} {frame_bytes}"
        self.guest.start("frames", f"ip netns exec {receiver} {receive}")
        self.guest.wait_for("frames", "ready")
        send = f"{script} send-frames {receiver} {_PORT} {frame_bytes} {count}"
        self.guest.run(f"ip netns exec {sender} {send}", 120)
        report = self.guest.wait_for("frames", "}").splitlines()[-1]
        return float(json.loads(report)["rate_bps"])


@contextmanager
def guest_testbed(shared: Path) -> Iterator[GuestTestbed]:
    """Boots a guest, starts the testbed in it, and waits until Prometheus scrapes every service.

    The links begin with the settings of the compose testbed.

    Args:
        shared: Folder that becomes `SHARED` in the guest. Job files and their data are in its subfolder `data`.
    """
    (shared / "shaping").mkdir()
    compose = LinksFile.read(ROOT / "deploy/netem/state/links.json")
    links = {key: link for key, link in compose.links.items() if set(key.split(">")) & set(HOSTS)}
    initial = LinksFile.model_validate({"hosts": HOSTS, "links": links})
    (shared / "shaping" / "links.json").write_text(initial.text)
    with Guest(shared, memory="4G") as guest:
        _connect(guest)
        _start_prometheus(guest)
        for host in HOSTS:
            shaper = f"collapipe.traffic_shaping --host {host} --state {SHARED}/shaping/links.json"
            guest.start(f"shaper-{host}", f"ip netns exec {host} {sys.executable} -m {shaper}")
        for name in _MODULES:
            guest.start(name, f"ip netns exec {name} {_service(name)}")
            if name == SCHEDULER:
                _wait_until_ready(guest, [name])
        _wait_until_ready(guest, HOSTS)
        testbed = GuestTestbed(guest)
        deadline = time.monotonic() + _START_SECONDS
        while len(testbed.query("up == 1")) < len(_MODULES):
            assert time.monotonic() < deadline, guest.log("prometheus")[-2000:]
            time.sleep(1)
        yield testbed


def _connect(guest: Guest) -> None:
    """Makes a namespace for each service, and a bridge that connects them all with the guest itself."""
    addresses = {name: f"{_NETWORK}.{number}" for number, name in enumerate(_MODULES, start=10)}
    names = "\\n".join(f"{address} {name}" for name, address in addresses.items())
    guest.run(f"printf '127.0.0.1 localhost\\n{names}\\n' > /etc/hosts")
    guest.run(
        f"ip link add br0 type bridge; ip addr add {_NETWORK}.1/24 dev br0; ip link set br0 up"
    )
    for number, (name, address) in enumerate(addresses.items()):
        guest.run(f"ip netns add {name}; ip -n {name} link set lo up")
        guest.run(f"ip link add v{number} type veth peer name eth0 netns {name}")
        guest.run(f"ip link set v{number} master br0 up")
        guest.run(f"ip -n {name} addr add {address}/24 dev eth0; ip -n {name} link set eth0 up")
        # compose.netem.yaml sets the same, and says why.
        guest.run(f"ip netns exec {name} sysctl -q net.ipv4.tcp_slow_start_after_idle=0")


def _start_prometheus(guest: Guest) -> None:
    targets = [f"{name}:{_METRICS_PORT}" for name in _MODULES]
    config = {
        "global": {
            "scrape_interval": f"{_SCRAPE_SECONDS}s",
            "scrape_timeout": f"{_SCRAPE_SECONDS}s",
        },
        "scrape_configs": [{"job_name": "collapipe", "static_configs": [{"targets": targets}]}],
    }
    (guest.shared / "prometheus.json").write_text(json.dumps(config))  # JSON is valid YAML.
    guest.start(
        "prometheus",
        f"prometheus --config.file={SHARED}/prometheus.json --storage.tsdb.path=/run/prometheus "
        f"--web.listen-address={_PROMETHEUS.removeprefix('http://')}",
    )


def _service(name: str) -> str:
    """Returns the command line of a service."""
    options = f"--insecure --threads 1 --host-id {name} --listen {name}:{_GRPC_PORT}"
    options += f" --metrics-listen {name}:{_METRICS_PORT} --ready-file {SHARED}/{name}.ready"
    options += f" --state-dir /run/{name}"
    if name == SCHEDULER:
        options += f" --telemetry prometheus --prometheus-url {_PROMETHEUS}"
        options += f" --telemetry-interval-seconds {_SCRAPE_SECONDS}"
    else:
        options += f" --scheduler {SCHEDULER}:{_GRPC_PORT}"
    return f"{sys.executable} -m collapipe.{_MODULES[name]} {options}"


def _wait_until_ready(guest: Guest, names: list[str]) -> None:
    deadline = time.monotonic() + _START_SECONDS
    for name in names:
        while not (guest.shared / f"{name}.ready").exists():
            assert time.monotonic() < deadline, guest.log(name)[-2000:]
            time.sleep(0.2)
