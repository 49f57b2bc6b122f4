"""Serves /metrics."""

from prometheus_client import start_http_server

from collapipe.errors import InvalidInputError


def serve_metrics(listen: str) -> str:
    """Serves /metrics until the process ends.

    Args:
        listen: "host:port"; port 0 takes a free one. Empty: nothing is served.

    Returns:
        Where it is served, with the port that it got; empty when it is not.

    Raises:
        InvalidInputError: The address is in use, or is none.
    """
    if not listen:
        return ""
    host, _, port = listen.rpartition(":")
    try:
        server, _ = start_http_server(int(port), host)
    except (OSError, ValueError, OverflowError) as error:
        raise InvalidInputError(
            f"cannot serve metrics on {listen} ({error}): choose another with --metrics-listen, port 0 for any "
            "free one, or an empty text for none"
        ) from None
    return f"{host}:{server.server_port}"
