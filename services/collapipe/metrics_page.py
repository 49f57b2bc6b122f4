"""The page /metrics of a service for a Prometheus server: HTTPS with mutual TLS, or HTTP in plain text."""

import socket
import ssl
import sys
import threading
import time
from collections import Counter
from contextlib import suppress
from socketserver import ThreadingTCPServer
from typing import Any

from prometheus_client import MetricsHandler

from collapipe.errors import InvalidInputError, NotPermittedError
from collapipe.rpc import Security
from collapipe.rpc.permissions import check_reads_metrics
from collapipe.rpc.refusal_log import RefusalLog

CONNECTION_SECONDS = 10.0
"""Longest life of a connection: its handshake, one request and the answer."""

MOST_CONNECTIONS = 64
"""Connections at a time. Each has a thread."""

MOST_OF_AN_ADDRESS = 8
"""Connections of one IP address at a time, so that no single machine can take all of them."""


class _PageServer(ThreadingTCPServer):
    """Each connection has a thread, which does its handshake and answers. Connections beyond the limits and slow ones are closed."""

    allow_reuse_address = True
    daemon_threads = True
    request_queue_size = MOST_CONNECTIONS

    def __init__(self, host: str, port: int, security: Security) -> None:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        self.address_family = found[0][0]
        self._security = security
        self._refusals = RefusalLog()
        self._lock = threading.Lock()
        self._open: dict[socket.socket, tuple[str, float]] = {}
        """The IP address of each connection, and when it must have ended, by the monotonic clock."""
        super().__init__((host, port), _PageHandler)

    def get_request(self) -> tuple[socket.socket, Any]:
        connection, address = super().get_request()
        context = self._security.server_context()
        if context is not None:
            connection = context.wrap_socket(
                connection, server_side=True, do_handshake_on_connect=False
            )
        return connection, address

    def verify_request(self, request: Any, client_address: Any) -> bool:
        """Returns whether there is room for a connection; if so, counts it."""
        host = client_address[0]
        with self._lock:
            of_host = Counter(other for other, _ in self._open.values())[host]
            if len(self._open) >= MOST_CONNECTIONS or of_host >= MOST_OF_AN_ADDRESS:
                return False
            self._open[request] = host, time.monotonic() + CONNECTION_SECONDS
        return True

    def finish_request(self, request: Any, client_address: Any) -> None:
        if not isinstance(request, ssl.SSLSocket):
            super().finish_request(request, client_address)
            return
        request.do_handshake()
        super().finish_request(request, client_address)
        # Only the end of TLS tells the reader that the page is complete.
        with suppress(OSError, ValueError):
            request.unwrap()

    def check_reader(self, connection: socket.socket) -> None:
        """Refuses a reader by its role or its revoked key; raises `NotPermittedError`. Plain text allows everybody."""
        if isinstance(connection, ssl.SSLSocket):
            shown: dict[str, Any] = connection.getpeercert() or {}
            names = shown.get("subjectAltName", ())
            check_reads_metrics([name for kind, name in names if kind == "URI"])
            # Python 3.13 has this method without an underscore before it. The last certificate is that of the root.
            verified = connection._sslobj.get_verified_chain()  # type: ignore[attr-defined]
            chain = "".join(one.public_bytes() for one in verified[:-1])
            self._security.revoked.check(chain.encode())

    def tell_refusal(self, client_address: Any, error: BaseException) -> None:
        """Writes to the log that the reader at an address got no page."""
        self._refusals.tell("/metrics", client_address[0], error)

    def handle_error(self, request: Any, client_address: Any) -> None:
        error = sys.exc_info()[1]
        assert error is not None
        self.tell_refusal(client_address, error)

    def service_actions(self) -> None:
        """Ends connections that took too long. The server calls this twice a second."""
        now = time.monotonic()
        with self._lock:
            for connection, (_, ends) in self._open.items():
                if now > ends:
                    with suppress(OSError):
                        # The shutdown of an SSLSocket would disturb the thread that reads from it.
                        socket.socket.shutdown(connection, socket.SHUT_RDWR)

    def close_request(self, request: Any) -> None:
        with self._lock:
            self._open.pop(request, None)
            super().close_request(request)


class _PageHandler(MetricsHandler):
    """Reads one request, and answers it with all metrics."""

    server: _PageServer

    def do_GET(self) -> None:
        try:
            self.server.check_reader(self.connection)
        except NotPermittedError as error:
            self.server.tell_refusal(self.client_address, error)
            self.send_error(403, explain=str(error))
        else:
            super().do_GET()


def serve_metrics(listen: str, security: Security) -> str:
    """Serves /metrics until the process ends.

    With mutual TLS, only certificates of the same authority with a role in `METRICS_READERS` get an answer.

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
        server = _PageServer(host.strip("[]"), int(port), security)
    except (OSError, ValueError, OverflowError) as error:
        raise InvalidInputError(
            f"cannot serve metrics on {listen} ({error}): choose another address with --metrics-listen, port 0 for "
            "any free port, or an empty text to serve none"
        ) from None
    threading.Thread(target=server.serve_forever, name="metrics", daemon=True).start()
    return f"{host}:{server.server_address[1]}"
