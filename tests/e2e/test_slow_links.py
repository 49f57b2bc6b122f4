"""Tests that a whole job trains over slow, long and lossy links, also when a connection breaks during a push.

pytest -s tests/e2e/test_slow_links.py      # prints the seconds of rounds and the goodput of pushes

The control unit and the device are on one side of the link. The edge server, the scheduler and the client are on the
other side.
"""

import json
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from slow_wire import LinkQuality, Side, SlowWire, run, slow_wire

pytestmark = pytest.mark.timeout(600)

FAST = LinkQuality(100e6)
LINKS = {"slow, long and lossy": LinkQuality(64e3, delay_seconds=0.15, lost_one_in=100)}
GRPC_PORT, METRICS_PORT = 7100, 9100
EDGE, CONTROL_UNIT, DEVICE = "edge-server", "control-unit-0", "device-0-0"
START_SECONDS, JOB_SECONDS = 240.0, 300.0
ROUNDS, CUT_ROUND = 2, 1
MINI_BATCH = 40
"""One micro-batch. At 64 kbit/s its activations of 82 kB take longer than the silence deadline of 10 s."""
LEAST_BYTES = 8192
"""The connections break when the edge server has at least so many bytes of a unit."""
_JOB = """\
name = "{name}"
devices_per_cluster = 1

[task]
kind = "classification"
max_length = 16

[data]
train = "{folder}/rows.jsonl"
max_held_out_rows = 2

[model]
vocabulary_size = 300

[model.config]
hidden_size = 32
intermediate_size = 64
num_hidden_layers = 1
num_attention_heads = 2
max_position_embeddings = 64

[training]
rounds = {rounds}
local_steps = 1
mini_batch = {mini_batch}
evaluate_every = 0

[schedule]
num_micro_batches = 1
"""


@dataclass
class Trained:
    """What the events of a job said."""

    committed: list[dict[str, Any]] = field(default_factory=list)
    incidents: list[dict[str, Any]] = field(default_factory=list)

    @property
    def losses(self) -> set[tuple[int, tuple[float, ...]]]:
        """The losses of each round. A round may be repeated, because hosts are silent for too long at times on such a link; its losses
        must then be the same bits."""
        return {(e["num_rounds"], tuple(e["summaries"][0]["losses"])) for e in self.committed}

    def pushed_bytes(self, host: str | None = None) -> int:
        """Returns the bytes that the hosts of the near side pushed, in all rounds."""
        return sum(
            int(push["bytes"])
            for event in self.committed
            for push in event["summaries"][0]["pushed"]
            if host in (None, push["host_id"])
        )


class Deployment:
    """Services on both sides of a slow link."""

    def __init__(self, folder: Path, wire: SlowWire, stack: ExitStack) -> None:
        self.folder = folder
        self.wire = wire
        self._stack = stack
        self._processes: dict[str, subprocess.Popen[str]] = {}
        self.near, self.far = wire.sides
        self._start(self.far, "scheduler", "scheduler", f"--state-dir={folder}/scheduler")
        self._start(self.far, EDGE, "edge_server", f"--state-dir={folder}/{EDGE}")
        self._start(self.near, CONTROL_UNIT, "control_unit", f"--state-dir={folder}/{CONTROL_UNIT}")
        self._start(self.near, DEVICE, "device_agent")
        rows = [
            {"text": f"{'river stone cloud lamp ' * 4}{i}", "label": "ab"[i % 2]} for i in range(60)
        ]
        (folder / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n")

    def _start(self, side: Side, name: str, module: str, *options: str) -> None:
        ready, number = self.folder / f"{name}.ready", len(self._processes)
        line = [*side.command, sys.executable, "-m", f"collapipe.{module}", "--insecure", *options]
        line += [f"--host-id={name}", f"--listen={side.address}:{GRPC_PORT + number}"]
        line += [
            f"--metrics-listen={side.address}:{METRICS_PORT + number}",
            f"--ready-file={ready}",
        ]
        if number:
            line.append(f"--scheduler={self.far.address}:{GRPC_PORT}")
        process = self._run(line, self.folder / f"{name}.log")
        self._processes[name] = process
        deadline = time.monotonic() + START_SECONDS
        while not ready.exists():
            assert process.poll() is None and time.monotonic() < deadline, self.log(name)
            time.sleep(0.1)

    def _run(self, line: list[str], log: Path) -> "subprocess.Popen[str]":
        output = self._stack.enter_context(log.open("w"))
        process = subprocess.Popen(line, stdout=output, stderr=subprocess.STDOUT, text=True)
        self._stack.callback(process.wait)
        self._stack.callback(process.kill)
        return process

    def log(self, name: str) -> str:
        return (self.folder / f"{name}.log").read_text()

    def train(self, name: str, cut: bool) -> Trained:
        """Trains a job. With `cut`, breaks the device's connections to the edge server during its last push."""
        job = self.folder / f"{name}.toml"
        values = {"name": name, "folder": self.folder, "rounds": ROUNDS, "mini_batch": MINI_BATCH}
        job.write_text(_JOB.format_map(values))
        line = [*self.far.command, sys.executable, "-m", "collapipe_client", "train", str(job)]
        line += ["--json", "--insecure", f"--scheduler={self.far.address}:{GRPC_PORT}"]
        client = self._run([*line, f"--output={self.folder}/{name}"], self.folder / f"{name}.log")
        trained, deadline = Trained(), time.monotonic() + JOB_SECONDS
        to_cut: list[str] = []
        while client.poll() is None:
            assert time.monotonic() < deadline, self.log(name)[-2000:]
            trained.committed = self._events(name, "round_committed")
            if cut and len(trained.committed) == CUT_ROUND:
                to_cut = to_cut or self._connections_to_edge()
                if self._is_half_pushed(name, trained.pushed_bytes(DEVICE)):
                    run(f"{' '.join(self.near.command)} ss -K {' or '.join(to_cut)}")
                    cut = False
            time.sleep(0.05)
        assert client.returncode == 0, self.log(name)[-2000:]
        assert not cut, "the connections were never cut"
        trained.committed = self._events(name, "round_committed")
        trained.incidents = self._events(name, "incident")
        return trained

    def _events(self, name: str, kind: str) -> list[dict[str, Any]]:
        """Returns the events of one kind that the client has written so far."""
        begin = f'{{"event": "{kind}"'
        lines = [line for line in self.log(name).splitlines() if line.startswith(begin)]
        return [json.loads(line) for line in lines if line.endswith("}")]

    def _connections_to_edge(self) -> list[str]:
        """Returns the filters of `ss` for the device's connections: one for activations, one for weights."""
        edge, pid = f"{self.far.address}:{GRPC_PORT + 1}", self._processes[DEVICE].pid
        lines = run(f"{' '.join(self.near.command)} ss -tnpHO dst {edge}").splitlines()
        ports = [line.split()[3].rpartition(":")[2] for line in lines if f"pid={pid}," in line]
        assert len(ports) == 2, lines
        return [f"sport = :{port}" for port in ports]

    def _is_half_pushed(self, name: str, unit_bytes: int) -> bool:
        """Returns whether the edge server has a part of the device's unit."""
        found = list(self.folder.glob(f"{EDGE}/jobs/{name}-*/pushed/cluster-0-unit-1"))
        return bool(found) and LEAST_BYTES <= found[0].stat().st_size < unit_bytes

    def received_bytes(self) -> float:
        """Returns the bytes of weights that the edge server has received so far."""
        page = f"http://{self.far.address}:{METRICS_PORT + 1}/metrics"
        fetch = f"import urllib.request as r; print(r.urlopen('{page}').read().decode())"
        text = subprocess.run(
            [*self.far.command, sys.executable, "-c", fetch],
            check=True,
            capture_output=True,
            text=True,
        ).stdout
        found = re.search(
            r'^collapipe_blob_bytes_total\{way="received"\} (\S+)', text, re.MULTILINE
        )
        assert found, text
        return float(found[1])


@pytest.fixture(scope="module")
def deployment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    with ExitStack() as stack:
        wire = stack.enter_context(slow_wire(FAST))
        yield Deployment(tmp_path_factory.mktemp("slow"), wire, stack)


@pytest.fixture(scope="module")
def fast(deployment: Deployment) -> tuple[Trained, float]:
    """The same job over a fast link, and the bytes of weights that the edge server received meanwhile."""
    trained = deployment.train("fast", cut=False)
    return trained, deployment.received_bytes()


@pytest.mark.parametrize("name", LINKS)
def test_job_trains_over_the_link_and_a_push_that_breaks_goes_on_at_its_byte(
    deployment: Deployment, fast: tuple[Trained, float], name: str
) -> None:
    expected, expected_bytes = fast
    logged, received = len(deployment.log(DEVICE)), deployment.received_bytes()
    deployment.wire.quality = link = LINKS[name]
    try:
        trained = deployment.train(re.sub(r"\W+", "-", name), cut=True)
    finally:
        deployment.wire.quality = FAST
    pushes = trained.committed[0]["summaries"][0]["pushed"]
    goodput = (
        8 * sum(int(push["bytes"]) for push in pushes) / max(push["seconds"] for push in pushes)
    )
    rounds = ", ".join(f"{event['round_seconds']:.1f}" for event in trained.committed)
    print(
        f"\n{name}: rounds of {rounds} s; push at {goodput / link.rate_bps:.2f} of the link's rate"
    )
    assert all(side.num_lost > 0 for side in deployment.wire.sides) or not link.lost_one_in
    assert trained.losses == expected.losses
    offsets = re.findall(r"unit 1 is pushed on from byte (\d+)", deployment.log(DEVICE)[logged:])
    unit_bytes = expected.pushed_bytes(DEVICE) // ROUNDS
    # What was under way when the connections broke may still have arrived.
    assert offsets and all(0 < int(offset) <= unit_bytes for offset in offsets)
    if not trained.incidents:  # No byte came twice.
        assert deployment.received_bytes() - received == expected_bytes
