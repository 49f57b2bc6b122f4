"""The ports of a service: free, or taken by whom."""

import contextlib
import errno
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from collapipe_client.doctor.check import Check

_LISTENING = "0A"
"""State of a socket in /proc/net/tcp."""
_LOOPBACK = ("127.", "localhost", "::1")


@dataclass(frozen=True)
class PortFacts:
    """What binding a port led to.

    Args:
        outcome: free; taken: somebody listens there; forbidden: only root may; elsewhere: the address is not of
            this machine.
        holder: Who listens: the command line and the process id, where this user may know.
    """

    outcome: Literal["free", "taken", "forbidden", "elsewhere"]
    holder: str = ""


def try_port(address: str) -> PortFacts:
    """Binds "host:port" for a moment."""
    host, separator, port = address.rpartition(":")
    bare = host.strip("[]")
    if not separator:
        return PortFacts("elsewhere")
    try:
        family = socket.AF_INET6 if ":" in bare else socket.AF_INET
        with socket.socket(family, socket.SOCK_STREAM) as trial:
            # connections of a service that has ended do not hold the port, as they do not for gRPC
            trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            trial.bind((bare, int(port)))
            trial.listen()
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            return PortFacts("taken", find_listener(int(port)))
        if error.errno == errno.EACCES:
            return PortFacts("forbidden")
        return PortFacts("elsewhere")
    except (ValueError, OverflowError):
        return PortFacts("elsewhere")
    return PortFacts("free")


def find_listener(port: int, proc: Path = Path("/proc")) -> str:
    """Who listens on a port; empty when that is hidden from this user."""
    sockets = {f"socket:[{inode}]" for inode in _listening_inodes(port, proc)}
    for folder in proc.glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if any(str(link.readlink()) in sockets for link in (folder / "fd").iterdir()):
                command = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode().strip()
                return f"{command} (pid {folder.name})"
    return ""


def _listening_inodes(port: int, proc: Path) -> set[str]:
    inodes = set()
    for table in ("net/tcp", "net/tcp6"):
        with contextlib.suppress(OSError):
            for line in (proc / table).read_text(encoding="ascii").splitlines()[1:]:
                fields = line.split()
                if fields[3] == _LISTENING and int(fields[1].rpartition(":")[2], 16) == port:
                    inodes.add(fields[9])
    return inodes


def check_port(purpose: str, setting: str, address: str, port: PortFacts, module: str) -> Check:
    """Can the service have its port, or does it have it already.

    Args:
        purpose: What is served there.
        setting: The setting that says where.
        address: Its value, "host:port".
        port: What binding it led to.
        module: The service's module, to know it among those who listen.
    """
    name = f"port: {purpose}"
    host, _, number = address.rpartition(":")
    if host.strip("[]").startswith(_LOOPBACK):
        return Check(
            name,
            "fail",
            f"{address} is reached from this machine only",
            f'set {setting} = "0.0.0.0:{number if number not in ("", "0") else 7100}"',
        )
    if port.outcome == "free":
        return Check(name, "ok", f"{address} is free")
    if port.outcome == "forbidden":
        return Check(
            name,
            "fail",
            f"{address}: only root may have it",
            f"set {setting} to a port from 1024 on",
        )
    if port.outcome == "elsewhere":
        return Check(
            name,
            "fail",
            f"{address}: not an address of this machine, or no host:port",
            f'set {setting} = "0.0.0.0:7100", or one that `ip address` lists',
        )
    if module in port.holder:
        return Check(
            name, "ok", f"{address} is served by it (pid{port.holder.rpartition('(pid')[2]}"
        )
    return Check(
        name,
        "fail" if port.holder else "warn",
        f"{address} is taken by {port.holder or 'a process of another user'}",
        f"if it is not the service itself (sudo ss -ltnp 'sport = :{number}'), end it or set another {setting}",
    )


def check_loopback() -> Check:
    """Can a port be opened and reached here."""
    try:
        with (
            socket.create_server(("127.0.0.1", 0)) as server,
            socket.create_connection(server.getsockname(), timeout=5),
        ):
            pass
    except OSError as error:
        return Check(
            "ports", "fail", f"127.0.0.1: {error.strerror}", "allow connections on loopback"
        )
    return Check("ports", "ok", "loopback ports can be opened and reached")
