"""A loopback server with one method of each arity. A test chooses the behaviour of the methods."""

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc
import pytest

from collapipe.certificates import Identity, Role
from collapipe.errors import CollapipeError, NotPermittedError
from collapipe.rpc import Security, Server, open_channel, serve, to_error
from collapipe.rpc.permissions import Permissions

from .authorities import Authority

SERVICE = "test.TestService"
ARITIES = ["unary_unary", "unary_stream", "stream_unary", "stream_stream"]

ALL_ROLES: Permissions = {SERVICE: dict.fromkeys(ARITIES, frozenset(Role) - {Role.AUTHORITY})}
"""Every caller with a role may call every method."""

PLAIN = Security.insecure()
SECONDS = 60.0
"""Bounds the waits of tests."""

Behaviour = Callable[[Any, grpc.ServicerContext], Any]


@dataclass
class Served:
    """A server and a channel to it."""

    server: Server
    channel: grpc.Channel

    def method(self, arity: str = "unary_unary") -> Any:
        return getattr(self.channel, arity)(f"/{SERVICE}/{arity}")

    def call(self, arity: str, request: bytes = b"ask", **options: Any) -> list[bytes]:
        """Calls the method of an arity, and returns its answers."""
        asked = iter([request, request]) if arity.startswith("stream") else request
        answer = self.method(arity)(asked, **({"timeout": SECONDS} | options))
        return list(answer) if arity.endswith("stream") else [answer]

    def failure(self, arity: str = "unary_unary", *request: bytes, **options: Any) -> grpc.RpcError:
        """Makes a call that fails."""
        with pytest.raises(grpc.RpcError) as raised:
            self.call(arity, *request, **options)
        return raised.value

    def error(self, arity: str = "unary_unary", **options: Any) -> CollapipeError:
        """Returns the error of a call that fails, as a caller gets it."""
        return to_error(self.failure(arity, **options), "device-1")

    def refusal(self, arity: str = "unary_unary") -> str:
        """Returns why a call is not permitted."""
        error = self.error(arity)
        assert isinstance(error, NotPermittedError), error
        return str(error)


@dataclass
class CallContext:
    """What a method sees of a caller: "role:name" over TLS, or nothing in plain text."""

    caller: str

    def auth_context(self) -> dict[str, list[bytes]]:
        if not self.caller:
            return {}
        uri = Identity.parse(self.caller).uri.encode()
        return {"transport_security_type": [b"ssl"], "peer_uri": [uri]}

    def peer(self) -> str:
        return "ipv4:127.0.0.1:1"


def refusal(check: Callable[..., object], *arguments: Any) -> str:
    """Returns why a check refuses its arguments; "" if it does not."""
    try:
        check(*arguments)
    except NotPermittedError as error:
        return str(error)
    return ""


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
    of_server: Security = PLAIN,
    of_client: Security = PLAIN,
    listen: str = "127.0.0.1:0",
    permissions: Permissions = ALL_ROLES,
    expected: Role | None = None,
) -> Iterator[Served]:
    methods = Methods(behaviours)
    server = serve(
        listen,
        of_server,
        lambda grpc_server, address: grpc_server.add_generic_rpc_handlers((methods,)),
        permissions,
    )
    channel = open_channel(server.address, of_client, expected)
    try:
        yield Served(server, channel)
    finally:
        channel.close()
        server.drain(0)


@contextmanager
def secured(
    authority: Authority, behaviours: dict[str, Behaviour], caller: str, **options: Any
) -> Iterator[Served]:
    """Serves over TLS as "scheduler:server"."""
    server = authority.security("scheduler:server")
    with serving(behaviours, server, authority.security(caller), **options) as served:
        yield served


def raising(*errors: BaseException, after: int = 0) -> dict[str, Behaviour]:
    """Returns methods whose calls raise the errors in turn. Those that stream raise after some answers."""
    upcoming = itertools.cycle(errors)

    def unary(request: Any, context: grpc.ServicerContext) -> bytes:
        raise next(upcoming)

    def stream(request: Any, context: grpc.ServicerContext) -> Iterator[bytes]:
        yield from [b"answer"] * after
        raise next(upcoming)

    return {arity: stream if arity.endswith("stream") else unary for arity in ARITIES}


def echo(request: Any, context: grpc.ServicerContext) -> bytes:
    return request if isinstance(request, bytes) else b"+".join(request)


def echo_each(request: Any, context: grpc.ServicerContext) -> Iterator[bytes]:
    yield from [request] if isinstance(request, bytes) else request


ECHO = {arity: echo_each if arity.endswith("stream") else echo for arity in ARITIES}
