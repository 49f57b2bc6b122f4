"""Two hosts in a guest, each a network namespace with the project's own shaper, and a wire between them."""

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
    """What a receiver counted."""

    sent: int
    packets: int
    out_of_order: int
    rate_bps: float
    """Of whole frames, between the first and the last."""

    @property
    def loss_ratio(self) -> float:
        return 1 - self.packets / self.sent


class TwoHosts:
    """What can be done with the two.

    Args:
        guest: In which they are.
    """

    def __init__(self, guest: Guest) -> None:
        self.guest = guest
        self.clean = {host: self.qdisc(host) for host in HOSTS}

    @property
    def state(self) -> Path:
        """links.json of both."""
        return self.guest.shared / "links.json"

    def run(self, host: str, command: str, timeout: float = 60.0, check: bool = True) -> str:
        """Runs a command on a host."""
        return self.guest.run(f"ip netns exec {host} {command}", timeout, check)

    def shaper_command(self, host: str) -> str:
        """How the shaper of a host is run."""
        return f"{sys.executable} -m collapipe.traffic_shaping --host {host} --state {SHARED}/links.json"

    def start_shaper(self, host: str) -> None:
        """Starts the shaper of a host; its log is that of `shaper-HOST`."""
        self.guest.start(f"shaper-{host}", f"ip netns exec {host} {self.shaper_command(host)}")

    def qdisc(self, host: str) -> str:
        """What tc shows of a host's interface, without what the kernel counts up."""
        shown = self.run(host, "tc qdisc show dev eth0")
        return re.sub(r" 8[0-9a-f]{3}:|direct_packets_stat \d+ ", "", shown)

    def send(self, sender: str, rate_bps: float, packets: int, frame_bytes: int) -> Traffic:
        """Sends packets to the other host at an even rate, and says what came."""
        receiver = "far" if sender == "near" else "near"
        self.guest.start(
            "receive", f"ip netns exec {receiver} {sys.executable} {_TRAFFIC} receive {_PORT}"
        )
        self.guest.wait_for("receive", "ready")
        command = f"{sys.executable} {_TRAFFIC} send {receiver} {_PORT}"
        self.run(sender, f"{command} {rate_bps} {packets} {frame_bytes}", 120)
        return Traffic(packets, **json.loads(self.guest.wait_for("receive", "}").split("\n")[1]))

    def round_trip_seconds(self, count: int = 60) -> float:
        """Mean round trip of pings that do not wait for one another."""
        printed = self.run("near", f"ping -q -n -c {count} -i 0.05 far", check=False)
        match = re.search(r"= [0-9.]+/([0-9.]+)/", printed)
        assert match, printed
        return float(match[1]) / 1000

    def tcp_bps(self, sender: str, seconds: float = 4.0, ramp_seconds: float = 1.0) -> float:
        """Goodput of one connection after it has found its pace."""
        receiver = "far" if sender == "near" else "near"
        self.guest.start("iperf3", f"ip netns exec {receiver} iperf3 -s -1 --forceflush")
        self.guest.wait_for("iperf3", "listening")
        command = f"iperf3 -J -c {receiver} -t {seconds:g} -O {ramp_seconds:g}"
        report = json.loads(self.run(sender, command, 60))
        return float(report["end"]["sum_received"]["bits_per_second"])


@contextmanager
def two_hosts(shared: Path) -> Iterator[TwoHosts]:
    """Boots a guest with the two hosts; no shaper runs yet.

    Args:
        shared: Folder of the host for links.json and logs.
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
