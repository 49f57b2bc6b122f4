"""A local testbed whose processes have a network namespace each, so that services and the links between them can have faults.

A bridge connects the namespaces. Needs root and the programs `ip`, `tc` and `nft`. The caller must have a network
namespace of its own, as `isolate` gives it: nothing else on the machine is touched.
"""

import os
import subprocess
import sys
from pathlib import Path

from collapipe_client import LocalTestbed
from collapipe_client.processes import child_environment
from collapipe_client.testbed_processes import Clusters

_NETWORK = "10.99.0"
_PORT = 7000
_BURST_BYTES = 32 << 10
_FAULTY_SERVICE = Path(__file__).with_name("faulty_service.py")


def run(line: str) -> None:
    """Runs a command line without a shell. Raises `subprocess.CalledProcessError`."""
    subprocess.run(line.split(), check=True, capture_output=True, text=True)


def isolate(module: str) -> None:
    """Runs this program again in network and mount namespaces of its own, and exits as it does. Returns in the second run."""
    if os.environ.get("COLLAPIPE_ISOLATED"):
        run("ip link set lo up")
        return
    line = ["unshare", "--net", "--mount", sys.executable, "-m", module, *sys.argv[1:]]
    environment = {**os.environ, "COLLAPIPE_ISOLATED": "yes"}
    sys.exit(subprocess.run(line, check=False, env=environment).returncode)


class NamespacedTestbed(LocalTestbed):
    """A testbed with one namespace for each service. Use it in `with`."""

    forks_hosts = False  # Each process is started in its namespace.

    def __init__(self, clusters: Clusters, workspace: Path) -> None:
        super().__init__(clusters, workspace)
        self._addresses = {
            name: f"{_NETWORK}.{number}" for number, name in enumerate(self._services, start=10)
        }

    @property
    def names(self) -> list[str]:
        """The services, the scheduler first."""
        return list(self._addresses)

    def start(self) -> None:
        run("ip link add br0 type bridge")
        run(f"ip addr add {_NETWORK}.1/24 dev br0")
        run("ip link set br0 up")
        for number, (name, address) in enumerate(self._addresses.items()):
            namespace = self._namespace(name)
            run(f"ip netns add {namespace}")
            run(f"ip link add v{number} type veth peer name eth0 netns {namespace}")
            run(f"ip link set v{number} master br0 up")
            run(f"ip -n {namespace} link set lo up")
            run(f"ip -n {namespace} addr add {address}/24 dev eth0")
            run(f"ip -n {namespace} link set eth0 up")
        super().start()

    def stop(self) -> None:
        super().stop()
        for name in self._addresses:
            run(f"ip netns del {self._namespace(name)}")

    def cut(self, sender: str, receiver: str) -> None:
        """Drops all packets from one service to another, in this direction."""
        self._nft(sender, "add table inet cut")
        self._nft(sender, "add chain inet cut out { type filter hook output priority 0 ; }")
        self._nft(sender, f"add rule inet cut out ip daddr {self._addresses[receiver]} drop")

    def slow_down(self, sender: str, rate_bps: float) -> None:
        """Limits the rate of everything that a service sends."""
        tbf = f"tbf rate {rate_bps:.0f}bit burst {_BURST_BYTES} latency 1s"
        run(f"tc -n {self._namespace(sender)} qdisc replace dev eth0 root {tbf}")

    def refuse_connections(self, name: str) -> None:
        """Drops everything that others send to the port of a service, also on connections that exist."""
        self._nft(name, "add table inet closed")
        self._nft(name, "add chain inet closed in { type filter hook input priority 0 ; }")
        self._nft(name, f"add rule inet closed in tcp dport {_PORT} drop")

    def start_in(self, name: str, line: list[str]) -> subprocess.Popen[bytes]:
        """Starts a further process in the namespace of a service."""
        return subprocess.Popen(
            ["ip", "netns", "exec", self._namespace(name), *line],
            env=child_environment() | {"FAULT_FILE": str(self.fault_file(name))},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )

    def address_of(self, name: str) -> str:
        """Returns the IP address that a service has at first."""
        return self._addresses[name]

    def exchange_address(self, name: str, address: str) -> None:
        """Gives the namespace of a service another address instead of its own one."""
        run(f"ip -n {self._namespace(name)} addr flush dev eth0")
        run(f"ip -n {self._namespace(name)} addr add {address}/24 dev eth0")

    def heal(self) -> None:
        """Ends all cuts and limits."""
        for name in self._addresses:
            self._nft(name, "flush ruleset")
            line = f"tc -n {self._namespace(name)} qdisc del dev eth0 root"
            subprocess.run(line.split(), check=False, capture_output=True)  # It may have none.

    def unplug(self, name: str) -> None:
        """Takes a service off the network."""
        run(f"ip -n {self._namespace(name)} link set eth0 down")

    def plug_in(self, name: str) -> None:
        """Ends `unplug`."""
        run(f"ip -n {self._namespace(name)} link set eth0 up")

    def fault_file(self, name: str) -> Path:
        """Returns the file that tells a service which fault of benchmarks/faulty_service.py to have."""
        return self.workspace.run / f"{name}.fault"

    def _nft(self, name: str, command: str) -> None:
        run(f"ip netns exec {self._namespace(name)} nft {command}")

    def _namespace(self, name: str) -> str:
        return f"collapipe-{os.getpid()}-{name}"

    def _listen_address(self, name: str) -> str:
        return f"{self._addresses[name]}:{_PORT}"

    def _command_line(self, name: str, listen: str, line: list[str]) -> list[str]:
        wrapped = [sys.executable, str(_FAULTY_SERVICE), *line[line.index("-m") + 1 :]]
        metrics = ["--metrics-listen", f"{self._addresses[name]}:0"]
        namespace = ["ip", "netns", "exec", self._namespace(name)]
        return [*namespace, "env", f"FAULT_FILE={self.fault_file(name)}", *wrapped, *metrics]
