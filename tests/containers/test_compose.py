"""Tests the compose testbed with all layers: health, exact training, recovery, telemetry and removal."""

import itertools
import json
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import httpx
import pytest
from dashboard_panels import panels, to_promql
from prometheus_server import eventually
from reference.comparison import first_difference
from reference.federated_job import Trained
from safetensors.torch import load_file

from collapipe.telemetry.sources import NEEDED
from collapipe.telemetry.sources.prometheus import PrometheusSource
from containers.compose import FOLDER, ComposeTestbed, json_lines
from containers.compose_jobs import ROUNDS, Job, expected, write_rows
from containers.engine import Engine

pytestmark = pytest.mark.timeout(900)

JOB_SECONDS = 300.0
CORES = "4"
"""Sum of all CPU quotas. It may exceed the cores of this machine, because idle containers need none."""
NUM_SHAPED = 10
"""Hosts whose links are shaped."""
ROUNDS_BEFORE = 3
NARROW_PROFILE = "lte-lossy"
"""Its links have 2.4 Mbit/s. What a link really carries is measured by the campaign."""
WINDOW_SECONDS = 4 * 2.0
"""Four scrape intervals of compose.observability.yaml."""
MAY_BE_EMPTY = {
    "collapipe-devices/Hottest": "a sensor of temperature",
    "collapipe-devices/Temperature": "a sensor of temperature",
    "collapipe-links/Radio: gain": "a radio",
    "collapipe-links/Radio: noise": "a radio",
    "collapipe-links/Radio: transmit power": "a radio",
    "collapipe-scheduler/Largest backlog": "a device with an energy budget",
    "collapipe-scheduler/Backlog of the energy queues": "a device with an energy budget",
}
"""Panels that may be empty here, and what they would need for data."""
NO_RADIO = ("collapipe_radio_",)
"""Prefixes of metrics that the scheduler queries, but that only hosts with radios export."""

Event = dict[str, Any]


@pytest.fixture(scope="module")
def testbed(images: Engine, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ComposeTestbed]:
    """Provides a running testbed as a user starts it, but with a larger CPU quota for each container."""
    before = images.leftovers()
    exports = subprocess.check_output([str(FOLDER / "processors"), CORES], text=True)
    processors = dict(line.removeprefix("export ").split("=") for line in exports.splitlines())
    testbed = ComposeTestbed(images, tmp_path_factory.mktemp("compose"), settings=processors)
    try:
        write_rows(testbed.data)
        print(f"healthy after {testbed.up():.0f} s")
        yield testbed
    finally:
        testbed.down()
    assert images.leftovers() == before


@pytest.fixture(scope="module")
def one_process(testbed: ComposeTestbed, tmp_path_factory: pytest.TempPathFactory) -> Trained:
    """The result of the testbed's job in one process, from the plain loop of tests/reference."""
    return expected(Job("expected"), testbed.data, tmp_path_factory.mktemp("expected"))


@pytest.fixture(scope="module")
def trained(testbed: ComposeTestbed) -> list[Event]:
    """The events of a job that was trained without a fault."""
    # With a shared channel, the plan limits the rate of each link.
    return train(testbed, Job("undisturbed", more_schedule="channel_rate_bps = 100e6"))


@dataclass(frozen=True)
class Reaction:
    """The decisions of a job during which a test slowed down the links of a device."""

    decisions: list[dict[str, Any]]
    """The decision of every round."""
    device: str
    """The device with the slow links. It had the most blocks before."""
    changed_at: float
    """Unix time in seconds at which the kernel had the new rates."""


@pytest.fixture(scope="module")
def reaction(testbed: ComposeTestbed) -> Reaction:
    """Trains with dssra. After some rounds, shapes all links of one device to the narrow profile."""
    # In this job, activations cause more traffic than unit states, so the links between stages limit a round.
    job = Job("deciding", "dssra", 1, 3, rounds=9, mini_batch=64, local_steps=6, evaluate_every=0)
    job.write(testbed.data, "/data")
    device, changed_at, num_rounds = "", 0.0, 0
    with testbed.running_client(*arguments(job)) as client:
        assert client.stdout is not None
        for line in client.stdout:
            event = json.loads(line) if line.startswith("{") else {"event": ""}
            num_rounds += event["event"] == "round_committed"
            if event["event"] == "round_started" and num_rounds == ROUNDS_BEFORE:
                blocks = placement(event)
                device = max(blocks, key=blocks.__getitem__)
                testbed.shape(device, NARROW_PROFILE)
                changed_at = time.time()
        assert client.wait() == 0, line
    return Reaction(testbed.decisions(job.name, job.rounds), device, changed_at)


def train(testbed: ComposeTestbed, job: Job, *options: str, check: bool = True) -> list[Event]:
    """Runs `collapipe train` in a container. The model is exported to out/NAME."""
    job.write(testbed.data, "/data")
    return json_lines(testbed.client(*arguments(job), *options, timeout=JOB_SECONDS, check=check))


def arguments(job: Job) -> tuple[str, ...]:
    return ("train", f"/data/{job.name}.toml", "--output", f"/out/{job.name}", "--json")


def losses(events: list[Event], cluster: int) -> list[float]:
    committed = [event for event in events if event["event"] == "round_committed"]
    return [loss for event in committed for loss in event["summaries"][cluster]["losses"]]


def model_difference(testbed: ComposeTestbed, job: str, one_process: Trained) -> str | None:
    exported = load_file(testbed.out / job / "model.safetensors")
    return first_difference(one_process.weights, exported)


def test_job_equals_one_process_bit_for_bit(
    testbed: ComposeTestbed, trained: list[Event], one_process: Trained
) -> None:
    for cluster, expected_losses in enumerate(one_process.losses):
        assert losses(trained, cluster) == expected_losses
    assert model_difference(testbed, "undisturbed", one_process) is None


def test_containers_run_with_least_privileges(testbed: ComposeTestbed) -> None:
    for identity in testbed.containers():
        found = json.loads(testbed.engine.run("inspect", identity))[0]
        name, host = found["Name"], found["HostConfig"]
        shapes = any(role in name for role in ("_device-", "_control-unit-", "_edge-server"))
        if not name.startswith("/collapipe-test_prometheus"):
            assert host["ReadonlyRootfs"] and host["CapDrop"] == ["ALL"], name
        allowed = {"NET_ADMIN", "SETUID", "SETGID", "KILL", "DAC_OVERRIDE"} if shapes else set()
        assert set(host["CapAdd"] or ()) == allowed or "certificates" in name
        if shapes:
            (pid,) = service_processes(testbed, identity)
            status = testbed.engine.run("exec", identity, "cat", f"/proc/{pid}/status")
            rights = dict(line.split(":\t", 1) for line in status.splitlines())
            assert rights["Uid"].split() == rights["Gid"].split() == ["10001"] * 4, name
            assert {int(rights[f"Cap{kind}"], 16) for kind in ("Inh", "Prm", "Eff", "Amb")} == {0}
            assert rights["NoNewPrivs"] == "1", "what is left in CapBnd cannot be had"
        assert host["Memory"] > 0 and host["LogConfig"]["Config"]["max-size"] == "10m", name


def test_job_goes_on_when_a_device_is_killed_and_the_device_comes_back(
    testbed: ComposeTestbed, one_process: Trained
) -> None:
    job = Job("interrupted", replicate_every=1)
    job.write(testbed.data, "/data")
    lines: list[str] = []
    container = testbed.container("device-0-1")
    kill = kill_command(testbed, container)
    with testbed.running_client(*arguments(job)) as client:
        assert client.stdout is not None
        for line in client.stdout:
            lines.append(line)
            is_last = '"event": "round_started"' in line and f'"round_index": {ROUNDS - 1}' in line
            if is_last and kill:  # The next attempt starts this round again.
                testbed.engine.run("exec", container, *kill)
                kill = ()
    events = json_lines("".join(lines))
    states = [event for event in events if event["event"] == "status"]
    assert states[-1]["state"] == "succeeded", states[-1]
    assert any("device-0-1" in event.get("message", "") for event in states), states
    attempts = [e.get("attempt", 0) for e in events if e["event"] == "round_started"]
    assert max(attempts) >= 1
    assert model_difference(testbed, "interrupted", one_process) is None
    # The restart policies of the containers start them again.
    testbed.wait_until_healthy(["device-0-1"])
    eventually(lambda: "device-0-1" in alive_hosts(testbed))


def kill_command(testbed: ComposeTestbed, container: str) -> tuple[str, ...]:
    """Returns a command that kills the service in its container, which ends the container."""
    return ("sh", "-c", f"kill -9 {' '.join(service_processes(testbed, container))}")


def service_processes(testbed: ComposeTestbed, container: str) -> list[str]:
    """Returns the ids of the processes of a stage host in its container, without init and the shaper process."""
    code = (
        "import pathlib\n"
        "for path in pathlib.Path('/proc').glob('[0-9]*/cmdline'):\n"
        "    try:\n"
        "        words = path.read_bytes().split(b'\\0')[1:3]\n"
        "    except OSError:\n"
        "        continue\n"  # It has just ended.
        "    roles = b'device_agent', b'control_unit', b'edge_server'\n"
        "    if words in [[b'-m', b'collapipe.' + role] for role in roles]:\n"
        "        print(path.parent.name)\n"
    )
    return testbed.engine.run("exec", container, "python", "-c", code).split()


def test_links_that_are_not_shaped_are_shown(testbed: ComposeTestbed) -> None:
    url = f"http://{testbed.address('prometheus', 9090)}/api/v1/query"
    query = {"query": f"sum(collapipe_links_unshaped) == {NUM_SHAPED}"}
    file = testbed.shaping / "links.json"
    assert not file.exists()
    file.write_text("{")
    try:
        eventually(
            lambda: httpx.get(url, params=query, trust_env=False).json()["data"]["result"] != []
        )
        eventually(lambda: sum("links.json" in why for why in unshaped(testbed)) == NUM_SHAPED)
    finally:
        file.unlink()


def unshaped(testbed: ComposeTestbed) -> list[str]:
    """Returns why links of hosts are not shaped."""
    status = json.loads(testbed.client("status", "--json"))
    return [host["unshaped"] for host in status["hosts"] if host.get("unshaped")]


def alive_hosts(testbed: ComposeTestbed) -> set[str]:
    status = json.loads(testbed.client("status", "--json"))
    return {host["host"]["host_id"] for host in status["hosts"] if host["alive"]}


def test_prometheus_has_the_metrics_that_the_scheduler_queries(
    testbed: ComposeTestbed, trained: list[Event], reaction: Reaction
) -> None:
    source = PrometheusSource(f"http://{testbed.address('prometheus', 9090)}", timeout_seconds=60)
    now = time.time()
    series = source.window(now - 900, now)
    asked = {name for name in NEEDED if not name.startswith(NO_RADIO)}
    assert asked - {one.name for one in series} == set()
    hosts = {name for name in testbed.health() if name.startswith(("edge", "control", "device"))}
    assert {one.instance for one in series} >= {f"{host}:9100" for host in hosts}
    # On a busy machine, Prometheus may answer too late for a decision.
    assert any(decision["estimates"]["missing"] == [] for decision in reaction.decisions[1:])


def test_scheduler_reacts_to_a_shaped_link_within_two_rounds(reaction: Reaction) -> None:
    """The scheduler must react by the second round after its telemetry shows only the slow link.

    A telemetry window covers the last round and at least four scrapes.
    """
    ends = [decision["estimates"]["end"] for decision in reaction.decisions[1:]]
    starts = [min(before, end - WINDOW_SECONDS) for before, end in itertools.pairwise(ends)]
    # starts[0] belongs to the third round: the first round has no telemetry, the second no previous window.
    full = 2 + next(i for i, start in enumerate(starts) if start >= reaction.changed_at)
    before, *after = (placement(one) for one in reaction.decisions[ROUNDS_BEFORE : full + 2])
    print(
        f"{reaction.device} narrowed in round {ROUNDS_BEFORE + 1}, full window before {full + 1}: {before}, {after}"
    )
    assert min(one.get(reaction.device, 0) for one in after) < before[reaction.device]


def placement(decided: dict[str, Any]) -> dict[str, int]:
    """Returns the number of units on each device, from the plans of an event or a decision."""
    return {
        stage["host_id"]: stage["stop_unit"] - stage["start_unit"]
        for plan in decided["plans"]
        for stage in plan["stages"]
        if stage["host_id"].startswith("device")
    }


def test_every_panel_has_data(
    testbed: ComposeTestbed, trained: list[Event], reaction: Reaction
) -> None:
    url = f"http://{testbed.address('prometheus', 9090)}/api/v1/query_range"
    every = [(panel.name, target.expression) for panel in panels() for target in panel.targets]
    without = [each for each in every if not has_numbers(url, to_promql(each[1]))]
    print(f"{len(every)} expressions, of which {len(without)} have no data: {without}")
    empty = {name for name, _ in without}
    assert empty - set(MAY_BE_EMPTY) == set()


def has_numbers(url: str, expression: str) -> bool:
    """Returns whether a query has had a value at some time since the testbed was started."""
    now = time.time()
    form = {"query": expression, "start": str(now - 900), "end": str(now), "step": "5"}
    answer = httpx.post(url, data=form, trust_env=False, timeout=30).json()
    assert answer["status"] == "success", f"{expression}: {answer.get('error')}"
    return any(
        value != "NaN" for series in answer["data"]["result"] for _, value in series["values"]
    )
