"""Connects two hosts in a guest. Each is a network namespace with the project's own shaper."""

import json
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from containers.uml.guest import SHARED, Guest

HOSTS = {"near": "10.90.0.1", "far": "10.90.0.2"}
_TRAFFIC = Path(__file__).with_name("traffic.py")
_PORT = 5000


@dataclass(frozen=True)
class Traffic:
    """The packets that a receiver counted."""

    sent: int
    packets: int
    out_of_order: int
    rate_bps: float
    """Rate in bit/s of frames with headers, between the first and the last arrival."""

    @property
    def loss_ratio(self) -> float:
        return 1 - self.packets / self.sent


class TwoHosts:
    """Two connected hosts in a running guest."""

    def __init__(self, guest: Guest) -> None:
        self.guest = guest
        self.clean = {host: self.qdisc(host) for host in HOSTS}

    @property
    def state(self) -> Path:
        """The file links.json, which both shapers read."""
        return self.guest.shared / "links.json"

    def run(self, host: str, command: str, timeout: float = 60.0, check: bool = True) -> str:
        """Runs a command on a host."""
        return self.guest.run(f"ip netns exec {host} {command}", timeout, check)

    def shaper_command(self, host: str) -> str:
        """Returns the command that runs the shaper of a host."""
        return f"{sys.executable} -m collapipe.traffic_shaping --host {host} --state {SHARED}/links.json"

    def start_shaper(self, host: str) -> None:
        """Starts the shaper of a host. The guest names its log shaper-HOST."""
        self.guest.start(f"shaper-{host}", f"ip netns exec {host} {self.shaper_command(host)}")

    def qdisc(self, host: str) -> str:
        """Returns the output of tc for a host's interface, without the counters and handles of the kernel."""
        shown = self.run(host, "tc qdisc show dev eth0")
        return re.sub(r" 8[0-9a-f]{3}:|direct_packets_stat \d+ ", "", shown)

    def send(self, sender: str, rate_bps: float, packets: int, frame_bytes: int) -> Traffic:
        """Sends packets to the other host at a constant rate, and returns the counts of the receiver."""
        receiver = "far" if sender == "near" else "near"
        self.guest.start(
            "receive", f"ip netns exec {receiver} {sys.executable} {_TRAFFIC} receive {_PORT}"
        )
        self.guest.wait_for("receive", "ready")
        command = f"{sys.executable} {_TRAFFIC} send {receiver} {_PORT}"
        self.run(sender, f"{command} {rate_bps} {packets} {frame_bytes}", 120)
        return Traffic(packets, **json.loads(self.guest.wait_for("receive", "}").split("\n")[1]))

    def round_trip_seconds(self, count: int = 60) -> float:
        """Returns the mean round trip of pings that overlap in time."""
        printed = self.run("near", f"ping -q -n -c {count} -i 0.05 far", check=False)
        match = re.search(r"= [0-9.]+/([0-9.]+)/", printed)
        assert match, printed
        return float(match[1]) / 1000

    def tcp_bps(self, sender: str, seconds: float = 4.0, ramp_seconds: float = 1.0) -> float:
        """Returns the goodput in bit/s of one TCP connection, without its ramp-up time."""
        receiver = "far" if sender == "near" else "near"
        self.guest.start("iperf3", f"ip netns exec {receiver} iperf3 -s -1 --forceflush")
        self.guest.wait_for("iperf3", "listening")
        command = f"iperf3 -J -c {receiver} -t {seconds:g} -O {ramp_seconds:g}"
        report = json.loads(self.run(sender, command, 60))
        return float(report["end"]["sum_received"]["bits_per_second"])


@contextmanager
def two_hosts(shared: Path) -> Iterator[TwoHosts]:
    """Boots a guest with two hosts. The caller starts their shapers.

    Args:
        shared: Folder of this machine for links.json and logs.
    """
    with Guest(shared) as guest:
        names = "\\n".join(f"{address} {host}" for host, address in HOSTS.items())
        guest.run(f"printf '127.0.0.1 localhost\\n{names}\\n' > /etc/hosts")
        for host in HOSTS:
            guest.run(f"ip netns add {host}; ip -n {host} link set lo up")
        guest.run("ip link add name eth0 netns near type veth peer name eth0 netns far")
        for host, address in HOSTS.items():
            guest.run(f"ip -n {host} addr add {address}/24 dev eth0; ip -n {host} link set eth0 up")
        yield TwoHosts(guest)
