import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from collapipe.errors import InvalidInputError
from collapipe.traffic_shaping.pacing import ShapedLink, Traffic
from collapipe.traffic_shaping.tc.service_shaper import TrafficControlShaper

from .namespaces import joined_namespaces, run

RATE_BPS = 2e7
RECEIVE = """
import socket, time
server = socket.create_server(("10.77.0.2", 5001))
print("ready", flush=True)
connection, _ = server.accept()
total, started = 0, None
while data := connection.recv(65536):
    started = started or time.monotonic()
    total += len(data)
print(total, time.monotonic() - started, flush=True)
"""
SEND = """
import socket
connection = socket.create_connection(("10.77.0.2", 5001))
connection.sendall(bytes(2_000_000))
"""


@dataclass
class Wire:
    """A wire between two network namespaces, of which `near` sends."""

    near: str
    far: str

    def ip(self, *arguments: str) -> str:
        return run("ip", "-n", self.near, *arguments)

    @property
    def tc(self) -> list[str]:
        return ["ip", "netns", "exec", self.near, "tc"]

    def show(self, what: str) -> str:
        return run(*self.tc, what, "show", "dev", "near0")

    def goodput_bps(self) -> float:
        receiver = subprocess.Popen(
            ["ip", "netns", "exec", self.far, sys.executable, "-c", RECEIVE],
            stdout=subprocess.PIPE,
            text=True,
        )
        with receiver:
            assert receiver.stdout is not None
            try:
                receiver.stdout.readline()
                run("ip", "netns", "exec", self.near, sys.executable, "-c", SEND)
                total, seconds = receiver.stdout.readline().split()
            finally:
                receiver.kill()
        return 8 * int(total) / float(seconds)


def opened(shaper: TrafficControlShaper, address: str) -> ShapedLink:
    link = shaper.open()
    link.address = address
    return link


@pytest.fixture
def wire() -> Iterator[Wire]:
    with joined_namespaces("collapipe", "10.77.0") as names:
        yield Wire(*names)


def test_kernel_limits_a_link_to_its_rate(wire: Wire) -> None:
    shaper = TrafficControlShaper("near0", wire.tc)
    link = opened(shaper, "10.77.0.2:5001")
    with link.burst(Traffic.ACTIVATIONS) as wait:
        wait(1, RATE_BPS)
    assert link.quantum_bytes(RATE_BPS, 1 << 20) == 1 << 20
    assert wire.goodput_bps() < 1.15 * RATE_BPS  # A busy machine only makes it lower.


def test_same_rate_again_changes_nothing_and_another_rate_replaces_it(wire: Wire) -> None:
    shaper = TrafficControlShaper("near0", wire.tc)
    links = [opened(shaper, f"10.77.0.{host}:1") for host in (2, 3)]
    for _ in range(2):
        links[0].limit(RATE_BPS)
    links[1].limit(2 * RATE_BPS)
    classes = wire.show("class")
    assert classes.count("class htb") == 2
    assert "20Mbit" in classes and "40Mbit" in classes
    links[0].limit(RATE_BPS / 4)
    classes = wire.show("class")
    assert classes.count("class htb") == 2
    assert "5Mbit" in classes and "20Mbit" not in classes


def test_class_is_removed_with_the_last_link_to_its_receiver(wire: Wire) -> None:
    shaper = TrafficControlShaper("near0", wire.tc)
    links = [opened(shaper, "10.77.0.2:1") for _ in range(2)]
    for link in links:
        link.limit(RATE_BPS)
    links[0].limit(0.0)
    assert "20Mbit" in wire.show("class")
    links[1].limit(0.0)
    assert wire.show("class") == ""
    assert "match" not in wire.show("filter")
    again = opened(shaper, "10.77.0.2:1")
    again.limit(RATE_BPS)
    assert "20Mbit" in wire.show("class")


def test_link_is_paced_until_its_address_is_known(wire: Wire) -> None:
    link = TrafficControlShaper("near0", wire.tc).open()
    link.limit(RATE_BPS)
    assert link.quantum_bytes(RATE_BPS, 1 << 20) < 1 << 20
    link.address = "10.77.0.2:1"
    link.limit(RATE_BPS)
    assert link.quantum_bytes(RATE_BPS, 1 << 20) == 1 << 20
    assert "20Mbit" in wire.show("class")


def test_link_that_the_kernel_refuses_gives_its_class_back(
    wire: Wire, monkeypatch: pytest.MonkeyPatch
) -> None:
    shaper = TrafficControlShaper("near0", wire.tc)
    link = opened(shaper, "10.77.0.2:1")
    link.limit(RATE_BPS)

    def refuse(ip: str, rate_bps: float) -> None:
        raise InvalidInputError("tc took too long")

    monkeypatch.setattr(shaper, "limit", refuse)
    link.limit(2 * RATE_BPS)
    assert wire.show("class") == ""
    assert link.quantum_bytes(RATE_BPS, 1 << 20) < 1 << 20


def test_closed_shaper_leaves_the_interface_as_it_was(wire: Wire) -> None:
    before = wire.show("qdisc")
    shaper = TrafficControlShaper("near0", wire.tc)
    opened(shaper, "10.77.0.2:1").limit(RATE_BPS)
    assert "htb" in wire.show("qdisc")
    shaper.close()
    assert wire.show("qdisc") == before


def test_root_of_a_killed_process_is_replaced(wire: Wire) -> None:
    opened(TrafficControlShaper("near0", wire.tc), "10.77.0.2:1").limit(RATE_BPS)
    TrafficControlShaper("near0", wire.tc)
    assert wire.show("class") == ""


def test_interface_that_another_program_shapes_is_refused_and_unchanged(wire: Wire) -> None:
    tbf = ("tbf", "rate", "1mbit", "burst", "10kb", "latency", "50ms")
    run(*wire.tc, "qdisc", "add", "dev", "near0", "root", *tbf)
    with pytest.raises(InvalidInputError, match="tbf.*--shaper pacing"):
        TrafficControlShaper("near0", wire.tc)
    assert "tbf" in wire.show("qdisc")


def test_link_is_paced_when_the_interface_disappears(
    wire: Wire, caplog: pytest.LogCaptureFixture
) -> None:
    link = opened(TrafficControlShaper("near0", wire.tc), "10.77.0.2:1")
    wire.ip("link", "del", "near0")
    for _ in range(2):
        with link.burst(Traffic.ACTIVATIONS) as wait:
            wait(1000, RATE_BPS)
        assert link.quantum_bytes(RATE_BPS, 1 << 20) == 50_000
    link.limit(0.0)
    assert len(caplog.records) == 1
    assert "10.77.0.2:1 is paced" in caplog.text


def test_unknown_interface_is_refused_with_a_remedy() -> None:
    if not shutil.which("tc"):
        pytest.skip("needs tc")
    with pytest.raises(InvalidInputError, match="no-such0.*--shaper pacing"):
        TrafficControlShaper("no-such0")


def test_missing_program_is_refused_with_a_remedy() -> None:
    with pytest.raises(InvalidInputError, match="no-such-tc.*--shaper pacing"):
        TrafficControlShaper("eth0", ["no-such-tc"])
