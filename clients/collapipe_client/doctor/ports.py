"""Checks the ports of a service: each must be free, or be used by the service itself."""

import errno
import socket

import psutil

from collapipe_client.doctor.check import Check

_LOOPBACK = ("127.", "localhost", "::1")


def check_port(purpose: str, setting: str, address: str, module: str) -> Check:
    """Checks that the service can listen at an address, or listens there already.

    Args:
        purpose: "gRPC" or "metrics".
        setting: Name of the setting that has the address.
        address: "host:port".
        module: The service's Python module, which identifies its process.
    """
    name = f"port: {purpose}"
    host, separator, port = address.rpartition(":")
    if host.strip("[]").startswith(_LOOPBACK):
        remedy = f'set {setting} = "0.0.0.0:{port if port not in ("", "0") else 7100}"'
        return Check.fail(name, f"{address} can be reached from this machine only", remedy)
    try:
        if not separator:
            raise ValueError("there is no port")
        listen_briefly(host.strip("[]"), int(port))
    except (OSError, ValueError, OverflowError) as error:
        reason = error.errno if isinstance(error, OSError) else None
        if reason == errno.EACCES:
            remedy = f"set {setting} to a port from 1024 to 65535"
            return Check.fail(name, f"{address}: only root may open this port", remedy)
        if reason == errno.EADDRINUSE:
            return _check_listener(name, setting, address, find_listener(int(port)), module)
        found = f"{address} is not an address of this machine, or not host:port"
        remedy = f'set {setting} = "0.0.0.0:7100", or to an address that `ip address` lists'
        return Check.fail(name, found, remedy)
    return Check.ok(name, f"{address} is free")


def _check_listener(name: str, setting: str, address: str, listener: str, module: str) -> Check:
    if module in listener:
        return Check.ok(name, f"the service is running and uses {address}: {listener}")
    port = address.rpartition(":")[2]
    remedy = (
        f"see which process has the port (sudo ss -ltnp 'sport = :{port}'); if it is not the service itself, end "
        f"the process or change {setting}"
    )
    if not listener:
        return Check.warn(name, f"{address} is taken by a process of another user", remedy)
    return Check.fail(name, f"{address} is taken by {listener}", remedy)


def listen_briefly(host: str, port: int) -> None:
    """Opens and closes a port. Raises `OSError` if that is not possible."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as trial:
        # gRPC sets this too, so that closed connections of an earlier service do not occupy the port.
        trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        trial.bind((host, port))
        trial.listen()


def find_listener(port: int) -> str:
    """Returns the command line and pid of the process that listens on a port; empty if none is visible."""
    try:
        for connection in psutil.net_connections("tcp"):
            listens = connection.status == psutil.CONN_LISTEN and connection.pid is not None
            if listens and connection.laddr and connection.laddr.port == port:
                command_line = " ".join(psutil.Process(connection.pid).cmdline())
                return f"{command_line} (pid {connection.pid})"
    except psutil.Error:
        pass
    return ""


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
