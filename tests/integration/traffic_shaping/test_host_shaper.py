"""The shaper process on a wire between two network namespaces. tests/containers measures packets of netem."""

import json
import os
import pwd
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from collapipe.errors import InvalidInputError
from collapipe.traffic_shaping.shaper_process.status import why_unshaped
from collapipe.traffic_shaping.tc.service_shaper import TrafficControlShaper

from .namespaces import joined_namespaces, run

FAR = "10.78.0.2"
"""A receiver whose id is its address."""
LIMITED = {"hosts": ["near", FAR], "links": {f"near>{FAR}": {"rate_bps": 8e6}}}
SECONDS = 60.0


@dataclass
class Host:
    """The near end of the wire, and its links.json."""

    namespace: str
    state: Path

    @property
    def inside(self) -> list[str]:
        return ["ip", "netns", "exec", self.namespace]

    def write(self, document: Any) -> None:
        temporary = self.state.with_suffix(".new")
        temporary.write_text(document if isinstance(document, str) else json.dumps(document))
        os.replace(temporary, self.state)

    def command(self, *arguments: str) -> list[str]:
        shaper = (sys.executable, "-m", "collapipe.traffic_shaping", f"--state={self.state}")
        return [*self.inside, *shaper, "--host=near", "--interface=near0", *arguments]

    def once(self, *arguments: str) -> str:
        line = self.command(*(arguments or ("--once",)))
        done = subprocess.run(line, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return done.stderr

    def qdiscs(self) -> str:
        shown = run(*self.inside, "tc", "qdisc", "show", "dev", "near0")
        return re.sub(r"direct_packets_stat \d+ ", "", shown)

    def applied(self) -> dict[str, Any]:
        file = self.state.parent / "applied" / "near.json"
        return json.loads(file.read_text()) if file.exists() else {}

    def wait(self, what: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
        deadline = time.monotonic() + SECONDS
        while not (applied := self.applied()) or not what(applied):
            assert time.monotonic() < deadline, applied
            time.sleep(0.05)
        return applied


@pytest.fixture
def host(tmp_path: Path) -> Iterator[Host]:
    with joined_namespaces("collapipe-shaped", "10.78.0") as (near, _):
        yield Host(near, tmp_path / "links.json")


@pytest.fixture
def shaper(host: Host) -> Iterator["subprocess.Popen[str]"]:
    host.write(LIMITED)
    process = subprocess.Popen(host.command(), stderr=subprocess.PIPE, text=True)
    try:
        host.wait(lambda applied: bool(applied["links"][FAR]["addresses"]))
        yield process
    finally:
        process.kill()
        process.communicate()


def test_rate_is_applied_once_and_reported(host: Host) -> None:
    free = host.qdiscs()
    host.write(LIMITED)
    assert host.once().count(": tc ") == 4
    assert "8Mbit" in host.qdiscs()
    assert host.applied()["links"][FAR]["rate_bps"] == 8e6
    assert ": tc " not in host.once()
    host.once("--remove")
    assert host.qdiscs() == free


def test_change_of_the_file_is_followed_and_the_end_removes_the_shaping(
    host: Host, shaper: "subprocess.Popen[str]"
) -> None:
    host.write({"hosts": ["near", FAR], "links": {"near>*": {"rate_bps": 3e6}}})
    host.wait(lambda applied: applied["links"][FAR]["rate_bps"] == 3e6)
    assert "3Mbit" in host.qdiscs() and "8Mbit" not in host.qdiscs()
    assert why_unshaped(host.state, "near") == ""
    host.write('{"links": {"near>')
    host.wait(lambda applied: not applied["in_force"])
    assert "3Mbit" in host.qdiscs()
    assert str(host.state) in why_unshaped(host.state, "near")
    host.write({"hosts": ["near", FAR]})
    host.wait(lambda applied: applied["in_force"] and not applied["links"])
    assert "htb" not in host.qdiscs()
    host.write(LIMITED)
    host.wait(lambda applied: bool(applied["links"]))
    shaper.send_signal(signal.SIGTERM)
    assert shaper.wait(SECONDS) == 0
    assert "noqueue" in host.qdiscs() and "htb" not in host.qdiscs()
    assert "no shaper process of near" in why_unshaped(host.state, "near")


def test_trace_is_played_to_its_last_step(host: Host, shaper: "subprocess.Popen[str]") -> None:
    steps = [{"at_seconds": 0, "rate_bps": 5e6}, {"at_seconds": 1, "rate_bps": 1e6}]
    entry = {"trace": {"steps": steps}, "started_at": time.time()}
    host.write({"hosts": ["near", FAR], "links": {f"near>{FAR}": entry}})
    host.wait(lambda applied: applied["links"][FAR]["rate_bps"] == 1e6)
    assert "1Mbit" in host.qdiscs()


def test_shaping_of_a_killed_process_is_taken_over(
    host: Host, shaper: "subprocess.Popen[str]"
) -> None:
    shaper.kill()
    shaper.wait()
    assert "8Mbit" in host.qdiscs()
    assert ": tc " not in host.once()
    host.once("--remove")
    assert "htb" not in host.qdiscs()
    offloads = run(*host.inside, "ethtool", "-k", "near0") if shutil.which("ethtool") else ""
    assert "tcp-segmentation-offload: off" not in offloads


def test_interface_that_comes_back_is_shaped_again(
    host: Host, shaper: "subprocess.Popen[str]"
) -> None:
    run("ip", "-n", host.namespace, "link", "del", "near0")
    host.wait(lambda applied: not applied["in_force"])
    assert "near0" in why_unshaped(host.state, "near")
    run("ip", "-n", host.namespace, "link", "add", "near0", "type", "veth", "peer", "near1")
    host.wait(lambda applied: bool(applied["in_force"]))
    assert "8Mbit" in host.qdiscs()


SERVICE = "trap 'exit 7' TERM; cat /proc/self/status; echo; while :; do sleep 0.1; done"
"""A program of the shell, because nobody may not run the Python of this test everywhere."""


@pytest.fixture
def service(host: Host) -> Iterator["subprocess.Popen[str]"]:
    """Provides a shaper process that has started a service of the user nobody."""
    host.write(LIMITED)
    line = host.command("--user=nobody", "sh", "-c", SERVICE)
    process = subprocess.Popen(line, stdout=subprocess.PIPE, text=True)
    try:
        host.wait(lambda applied: bool(applied["links"][FAR]["addresses"]))
        yield process
    finally:
        process.terminate()  # ends the service, too
        process.communicate()


def test_service_has_the_rights_of_its_user_and_ends_with_its_shaper(
    host: Host, service: "subprocess.Popen[str]"
) -> None:
    nobody = pwd.getpwnam("nobody")
    assert service.stdout is not None
    lines = iter(service.stdout.readline, "\n")
    status = dict(line.rstrip().split(":\t", 1) for line in lines)
    assert status["Uid"].split() == [str(nobody.pw_uid)] * 4
    assert status["Gid"].split() == [str(nobody.pw_gid)] * 4
    assert status["Groups"].split() == [str(nobody.pw_gid)]
    assert {int(status[f"Cap{kind}"], 16) for kind in ("Inh", "Prm", "Eff", "Amb")} == {0}
    assert int(status["SigBlk"], 16) == 0
    assert "8Mbit" in host.qdiscs()
    service.send_signal(signal.SIGTERM)
    assert service.wait(SECONDS) == 7
    assert "htb" not in host.qdiscs()
    assert not host.applied()["running"]


def test_killed_service_ends_its_shaper(host: Host, service: "subprocess.Popen[str]") -> None:
    (child,) = Path(f"/proc/{service.pid}/task/{service.pid}/children").read_text().split()
    os.kill(int(child), signal.SIGKILL)
    assert service.wait(SECONDS) == 128 + signal.SIGKILL
    assert "htb" not in host.qdiscs()


def test_service_that_cannot_be_started_is_an_error(host: Host) -> None:
    for options, said in (
        (["--user=nobody-here", "true"], "no such user"),
        (["/no/such"], "/no/such"),
    ):
        done = subprocess.run(host.command(*options), capture_output=True, text=True)
        assert done.returncode == 2
        assert said in done.stderr


def test_interface_that_an_agent_shapes_is_unchanged_and_reported(host: Host) -> None:
    agent = TrafficControlShaper("near0", [*host.inside, "tc"])
    link = agent.open()
    link.address = f"{FAR}:1"
    link.limit(2e7)
    before = host.qdiscs()
    host.write(LIMITED)
    host.once()
    assert host.qdiscs() == before
    status = host.applied()
    assert not status["in_force"]
    assert "--shaper pacing" in status["problems"][0]


def test_agent_refuses_an_interface_of_the_shaper_process(host: Host) -> None:
    host.write(LIMITED)
    host.once()
    with pytest.raises(InvalidInputError, match="shaper process .*--shaper"):
        TrafficControlShaper("near0", [*host.inside, "tc"])
    assert "8Mbit" in host.qdiscs()
