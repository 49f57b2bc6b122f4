"""A loopback server with one method of each arity. A test chooses the behaviour of the methods."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc

from collapipe.certificates import Role
from collapipe.rpc import Security, Server, open_channel, serve
from collapipe.rpc.permissions import Permissions

SERVICE = "test.TestService"
ARITIES = ["unary_unary", "unary_stream", "stream_unary", "stream_stream"]

ALL_ROLES: Permissions = {SERVICE: dict.fromkeys(ARITIES, frozenset(Role) - {Role.AUTHORITY})}
"""Every caller with a role may call every method."""

Behaviour = Callable[[Any, grpc.ServicerContext], Any]


@dataclass
class Served:
    """A server and a channel to it."""

    server: Server
    channel: grpc.Channel

    def call(self, arity: str, request: bytes = b"ask", **options: Any) -> list[bytes]:
        """Calls the method of an arity, and returns its answers."""
        method = getattr(self.channel, arity)(f"/{SERVICE}/{arity}")
        asked = iter([request, request]) if arity.startswith("stream") else request
        answer = method(asked, **({"timeout": 20} | options))
        return list(answer) if arity.endswith("stream") else [answer]


@dataclass
class Methods(grpc.GenericRpcHandler):
    """The methods of the server. Requests and answers are bytes."""

    behaviours: dict[str, Behaviour] = field(default_factory=dict)

    def service(self, handler_call_details: Any) -> Any:
        _, service, arity = handler_call_details.method.split("/")
        if service != SERVICE or arity not in self.behaviours:
            return None
        factory = getattr(grpc, f"{arity}_rpc_method_handler")
        return factory(self.behaviours[arity])


@contextmanager
def serving(
    behaviours: dict[str, Behaviour],
    of_server: Security | None = None,
    of_client: Security | None = None,
    listen: str = "127.0.0.1:0",
    permissions: Permissions = ALL_ROLES,
    expected: Role | None = None,
) -> Iterator[Served]:
    plain = Security.insecure()
    methods = Methods(behaviours)
    server = serve(
        listen,
        of_server or plain,
        lambda grpc_server, address: grpc_server.add_generic_rpc_handlers((methods,)),
        permissions,
    )
    channel = open_channel(server.address, of_client or plain, expected)
    try:
        yield Served(server, channel)
    finally:
        channel.close()
        server.drain(0)


def raising(error: BaseException, after: int = 0) -> dict[str, Behaviour]:
    """Returns methods that raise. Those that stream raise after some answers."""

    def unary(request: Any, context: grpc.ServicerContext) -> bytes:
        raise error

    def stream(request: Any, context: grpc.ServicerContext) -> Iterator[bytes]:
        yield from [b"answer"] * after
        raise error

    return {arity: stream if arity.endswith("stream") else unary for arity in ARITIES}


def echo(request: Any, context: grpc.ServicerContext) -> bytes:
    return request if isinstance(request, bytes) else b"+".join(request)


def echo_each(request: Any, context: grpc.ServicerContext) -> Iterator[bytes]:
    yield from [request] if isinstance(request, bytes) else request


ECHO = {arity: echo_each if arity.endswith("stream") else echo for arity in ARITIES}
