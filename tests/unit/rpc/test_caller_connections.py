"""A caller may have a bounded number of connections at a time."""

from contextlib import ExitStack
from pathlib import Path

import grpc
import pytest

from collapipe.rpc import Security, interceptor, open_channel
from collapipe.rpc.caller_connections import CallerConnections

from .authorities import Authority
from .serving import ECHO, SERVICE, Served, serving

MOST = 3


def connect(opened: ExitStack, served: Served, security: Security) -> None:
    """Calls over a new connection."""
    channel = opened.enter_context(open_channel(served.server.address, security, for_weights=True))
    channel.unary_unary(f"/{SERVICE}/unary_unary")(b"x", timeout=20)


@pytest.mark.parametrize("look_seconds", [0.0, 3600.0])
def test_caller_with_too_many_connections_is_refused_until_one_has_closed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, look_seconds: float
) -> None:
    monkeypatch.setattr(
        interceptor, "CallerConnections", lambda: CallerConnections(MOST, look_seconds)
    )
    authority = Authority(tmp_path)
    server, other = authority.security("scheduler:scheduler"), authority.security("client:other")
    client = authority.security("client:me")
    with serving(ECHO, server, other) as served, ExitStack() as opened:
        for _ in range(MOST):
            connect(opened, served, client)
        with ExitStack() as refused, pytest.raises(grpc.RpcError) as raised:
            connect(refused, served, client)
        assert raised.value.code() is grpc.StatusCode.UNAVAILABLE
        assert "client:me has 3 connections, and may not have more than 3" in raised.value.details()
        assert served.call("unary_unary", b"x")
        opened.close()
        if look_seconds:
            with ExitStack() as refused, pytest.raises(grpc.RpcError):
                connect(refused, served, client)
        else:
            with ExitStack() as again:
                connect(again, served, client)


def test_closed_connections_of_many_callers_are_forgotten() -> None:
    connections = CallerConnections(look_seconds=0.0)
    for number in range(5000):
        connections.check(f"device:{number}", "ipv4:127.0.0.1:1")
    assert len(connections._ports) < 1100


def test_plain_text_connection_is_a_caller_of_its_own() -> None:
    connections = CallerConnections(most=1)
    for port in range(50_000, 50_010):
        connections.check(f"ipv4:127.0.0.1:{port}", f"ipv4:127.0.0.1:{port}")
