"""Makes servers: options, credentials, roles, health, drain."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from collapipe.errors import InvalidInputError
from collapipe.rpc.credentials import Security
from collapipe.rpc.interceptor import CallInterceptor
from collapipe.rpc.options import PUBLIC_SERVER_OPTIONS, SERVER_OPTIONS
from collapipe.rpc.permissions import CALLERS, Permissions

MAX_CONCURRENT_CALLS = 64
"""Calls that a server works on at a time; a stream counts as long as it is open. An edge server needs two
streams a cluster, a device three in all, a scheduler one for each client that watches."""

_DRAIN_SECONDS = 5.0


class Server:
    """A server that is serving."""

    def __init__(
        self, server: grpc.Server, address: str, health_servicer: health.HealthServicer
    ) -> None:
        self.address = address
        """Where it serves, "host:port", with the port that it got."""
        self._server = server
        self._health = health_servicer

    def drain(self, seconds: float = _DRAIN_SECONDS) -> None:
        """Reports NOT_SERVING, takes no new calls, and ends those in progress after some time."""
        self._health.enter_graceful_shutdown()
        self._server.stop(seconds).wait()


def serve(
    listen: str,
    security: Security,
    add_services: Callable[[grpc.Server, str], None],
    callers: Permissions = CALLERS,
) -> Server:
    """Starts a server.

    Args:
        listen: "host:port"; port 0 takes a free one.
        security: What to ask of callers.
        add_services: Adds the services; is given the server and the address that it got.
        callers: Who may call what, where callers are known.

    Raises:
        InvalidInputError: The address is in use, or is none.
    """
    pool = ThreadPoolExecutor(MAX_CONCURRENT_CALLS, thread_name_prefix="call")
    server = grpc.server(
        pool,
        interceptors=[CallInterceptor(None if security.is_insecure else callers)],
        options=SERVER_OPTIONS if security.asks_callers else PUBLIC_SERVER_OPTIONS,
    )
    # its own thread: a server whose calls are all busy is still healthy
    health_pool = ThreadPoolExecutor(1, thread_name_prefix="health")
    health_servicer = health.HealthServicer(
        experimental_non_blocking=True,
        experimental_thread_pool=health_pool,
    )
    # as it does for Watch; by `vars`, since the stubs know no functions behind methods
    vars(health.HealthServicer)["Check"].experimental_thread_pool = health_pool
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
    # of a port beyond 65535, gRPC takes what is left of it
    if not port or listen.rpartition(":")[2] not in ("0", str(port)):
        raise InvalidInputError(
            f"cannot listen on {listen}: the port is in use, or the address is not of this machine or not "
            "host:port; choose another with --listen, or port 0 for any free one"
        )
    address = f"{listen.rpartition(':')[0]}:{port}"
    add_services(server, address)
    server.start()
    health_servicer.set("", health_pb2.HealthCheckResponse.SERVING)
    return Server(server, address, health_servicer)
