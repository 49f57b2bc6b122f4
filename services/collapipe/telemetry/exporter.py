"""The HTTP server of /metrics."""

from prometheus_client import start_http_server

from collapipe.errors import InvalidInputError


def serve_metrics(listen: str) -> str:
    """Serves /metrics until the process ends.

    Args:
        listen: "host:port"; port 0 takes a free port. With an empty text, nothing is served.

    Returns:
        The address with the real port, or an empty text if nothing is served.

    Raises:
        InvalidInputError: The address is invalid or in use.
    """
    if not listen:
        return ""
    host, _, port = listen.rpartition(":")
    try:
        server, _ = start_http_server(int(port), host)
    except (OSError, ValueError, OverflowError) as error:
        raise InvalidInputError(
            f"cannot serve metrics on {listen} ({error}): choose another address with --metrics-listen, port 0 for "
            "any free port, or an empty text to serve none"
        ) from None
    return f"{host}:{server.server_port}"
