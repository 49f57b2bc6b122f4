"""Checks the ports of a service: each must be free, or be used by the service itself."""

import errno

import psutil

from collapipe.errors import InvalidInputError
from collapipe_client.addresses import listen_briefly, read_address
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
    try:
        host, port = read_address(setting, address, least_port=0)
        if host.startswith(_LOOPBACK):
            remedy = f'set {setting} = "0.0.0.0:{port or 7100}"'
            return Check.fail(name, f"{address} can be reached from this machine only", remedy)
        listen_briefly(host, port)
    except (OSError, ValueError, InvalidInputError) as error:
        reason = error.errno if isinstance(error, OSError) else None
        if reason == errno.EACCES:
            remedy = f"set {setting} to a port from 1024 to 65535"
            return Check.fail(name, f"{address}: only root may open this port", remedy)
        if reason == errno.EADDRINUSE:
            return _check_listener(name, setting, address, find_listener(port), module)
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
