"""Starts gRPC servers with options, credentials, permissions and health checks, and drains them."""

import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from collapipe.errors import InvalidInputError
from collapipe.rpc.credentials import Security
from collapipe.rpc.interceptor import CallInterceptor
from collapipe.rpc.options import PUBLIC_SERVER_OPTIONS, SERVER_OPTIONS
from collapipe.rpc.permissions import PERMISSIONS, Permissions
from collapipe.rpc.silent_connections import MOST_CONNECTIONS, SilentConnections, most_connections
from collapipe.traffic_shaping.outgoing_links import OutgoingLinks

logger = logging.getLogger(__name__)

_DRAIN_SECONDS = 5.0


class Server:
    """A running server."""

    def __init__(
        self,
        server: grpc.Server,
        address: str,
        health_servicer: health.HealthServicer,
        interceptor: CallInterceptor,
        silent_connections: SilentConnections,
    ) -> None:
        self.address = address
        """The "host:port" at which it serves, with the real port instead of port 0."""
        self._server = server
        self._health = health_servicer
        self._interceptor = interceptor
        self._silent_connections = silent_connections

    def drain(self, seconds: float = _DRAIN_SECONDS) -> None:
        """Reports NOT_SERVING and refuses new calls. Calls in progress get some seconds to end."""
        self._health.enter_graceful_shutdown()
        self._server.stop(seconds).wait()
        self._silent_connections.close()
        self._interceptor.close()


def serve(
    listen: str,
    security: Security,
    add_services: Callable[[grpc.Server, str], None],
    permissions: Permissions = PERMISSIONS,
    links: OutgoingLinks | None = None,
    process: str = "",
) -> Server:
    """Starts a server.

    Args:
        listen: "host:port"; port 0 takes a free port.
        add_services: Adds the services to the server, given the address of the server.
        permissions: Ignored with plain text, which knows no roles.
        links: The links that leave this host; `None` if nothing shapes its answers.
        process: The incarnation of a host, by which its health service can be asked, too.

    Raises:
        InvalidInputError: The address is invalid or in use.
    """
    interceptor = CallInterceptor(
        None if security.is_insecure else permissions, security.revoked, links
    )
    most = most_connections()
    if most < MOST_CONNECTIONS:
        logger.warning(
            "%s takes %d connections at a time instead of %d, because this process may open only about %d files: raise the limit of "
            "open files to %d (`ulimit -n`, LimitNOFILE of systemd) if that many hosts and clients connect",
            *(listen, most, MOST_CONNECTIONS, 2 * most, 2 * MOST_CONNECTIONS),
        )
    server = grpc.server(
        # The interceptor gives each method threads of its own, so a server whose calls are all busy is still healthy.
        ThreadPoolExecutor(1),
        interceptors=[interceptor],
        options=[
            *(SERVER_OPTIONS if security.asks_callers else PUBLIC_SERVER_OPTIONS),
            ("grpc.max_allowed_incoming_connections", most),
        ],
    )
    health_servicer = health.HealthServicer(experimental_non_blocking=False)
    health_pb2_grpc.add_HealthServicer_to_server(health_servicer, server)
    credentials = security.server_credentials()
    try:
        port = (
            server.add_secure_port(listen, credentials)
            if credentials
            else server.add_insecure_port(listen)
        )
    except RuntimeError:
        port = 0
    # gRPC silently reduces a port beyond 65535 to another port.
    if not port or listen.rpartition(":")[2] not in ("0", str(port)):
        raise InvalidInputError(
            f"cannot listen on {listen}: the port is in use, or this is not a host:port of this machine; "
            "choose another one with --listen, or port 0 for any free port"
        )
    address = f"{listen.rpartition(':')[0]}:{port}"
    add_services(server, address)
    server.start()
    for name in {"", process}:
        health_servicer.set(name, health_pb2.HealthCheckResponse.SERVING)
    silent_connections = SilentConnections(port, interceptor.connections, most)
    return Server(server, address, health_servicer, interceptor, silent_connections)
