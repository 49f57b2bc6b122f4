"""Reads addresses of the form HOST:PORT, and tries whether a service could listen there."""

import re
import socket

from collapipe.errors import InvalidInputError


def read_address(option: str, text: str, *, least_port: int = 1) -> tuple[str, int]:
    """Reads HOST:PORT, with an IPv6 address in brackets. Raises `InvalidInputError` for any other text."""
    found = re.fullmatch(r"(\[[^\s/\[\]]+\]|[^\s/:\[\]]+):(\d{1,5})", text, re.ASCII)
    if not found or not least_port <= int(found[2]) < 65536:
        raise InvalidInputError(
            f"{option} {text}: is not HOST:PORT with a port from {least_port} to 65535, for example 192.168.1.10:7100 or [fd77::10]:7100"
        )
    return found[1].strip("[]"), int(found[2])


def listen_briefly(host: str, port: int) -> None:
    """Opens and closes a port. Raises `OSError` if that is not possible."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # The function sets SO_REUSEADDR, as gRPC does, so that closed connections do not occupy the port.
    with socket.create_server((host, port), family=family):
        pass
