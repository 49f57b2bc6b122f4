"""Checks the ports of a service: each must be free, or be used by the service itself."""

import errno
import socket
from dataclasses import dataclass
from typing import Literal

import psutil

from collapipe_client.doctor.check import Check

_LOOPBACK = ("127.", "localhost", "::1")


@dataclass(frozen=True)
class PortFacts:
    """What happened when a port was opened.

    Args:
        outcome: "free"; "taken" by a process that listens there; "forbidden" for users other than root; or
            "elsewhere", if the address does not belong to this machine.
        holder: Command line and pid of the process that listens; empty if this user may not see them.
    """

    outcome: Literal["free", "taken", "forbidden", "elsewhere"]
    holder: str = ""


def try_port(address: str) -> PortFacts:
    """Opens "host:port" for a moment."""
    host, separator, port = address.rpartition(":")
    bare_host = host.strip("[]")
    if not separator:
        return PortFacts("elsewhere")
    try:
        family = socket.AF_INET6 if ":" in bare_host else socket.AF_INET
        with socket.socket(family, socket.SOCK_STREAM) as trial:
            # As for gRPC, the closed connections of an earlier service must not count as taken.
            trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            trial.bind((bare_host, int(port)))
            trial.listen()
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            return PortFacts("taken", find_listener(int(port)))
        return PortFacts("forbidden" if error.errno == errno.EACCES else "elsewhere")
    except (ValueError, OverflowError):
        return PortFacts("elsewhere")
    return PortFacts("free")


def find_listener(port: int) -> str:
    """Returns the command line and pid of the process that listens on a port.

    Returns an empty text if there is none, or if this user may not see it.
    """
    try:
        for connection in psutil.net_connections("tcp"):
            listens = connection.status == psutil.CONN_LISTEN and connection.pid is not None
            if listens and connection.laddr and connection.laddr.port == port:
                command_line = " ".join(psutil.Process(connection.pid).cmdline())
                return f"{command_line} (pid {connection.pid})"
    except psutil.Error:
        pass
    return ""


def check_port(purpose: str, setting: str, address: str, port: PortFacts, module: str) -> Check:
    """Checks that the service can open its port, or has opened it already.

    Args:
        purpose: What is served at the port.
        setting: Name of the setting with the address.
        address: "host:port".
        module: The service's Python module, by which its process is recognised.
    """
    name = f"port: {purpose}"
    host, _, number = address.rpartition(":")
    if host.strip("[]").startswith(_LOOPBACK):
        remedy = f'set {setting} = "0.0.0.0:{number if number not in ("", "0") else 7100}"'
        return Check.fail(name, f"{address} can be reached from this machine only", remedy)
    if port.outcome == "free":
        return Check.ok(name, f"{address} is free")
    if port.outcome == "forbidden":
        remedy = f"set {setting} to a port from 1024 to 65535"
        return Check.fail(name, f"{address}: only root may open this port", remedy)
    if port.outcome == "elsewhere":
        found = f"{address} is not an address of this machine, or not host:port"
        remedy = f'set {setting} = "0.0.0.0:7100", or to an address that `ip address` lists'
        return Check.fail(name, found, remedy)
    if module in port.holder:
        pid = port.holder.rpartition("(pid")[2]
        return Check.ok(name, f"the service is running and uses {address} (pid{pid}")
    remedy = (
        f"see which process has the port (sudo ss -ltnp 'sport = :{number}'); if it is not the service itself, end "
        f"the process or change {setting}"
    )
    if not port.holder:
        return Check.warn(name, f"{address} is taken by a process of another user", remedy)
    return Check.fail(name, f"{address} is taken by {port.holder}", remedy)


def check_loopback() -> Check:
    """Checks that a port can be opened and reached on this machine."""
    try:
        with (
            socket.create_server(("127.0.0.1", 0)) as server,
            socket.create_connection(server.getsockname(), timeout=5),
        ):
            pass
    except OSError as error:
        found = f"127.0.0.1: {error.strerror}"
        return Check.fail("ports", found, "allow connections on loopback")
    return Check.ok("ports", "loopback ports can be opened and reached")
