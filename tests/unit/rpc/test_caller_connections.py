"""A caller may have a bounded number of connections at a time."""

import time
from contextlib import ExitStack
from pathlib import Path

import grpc
import pytest

from collapipe.errors import PeerLostError
from collapipe.rpc import Security, interceptor, open_channel
from collapipe.rpc.caller_connections import CallerConnections, _end, _end_of

from .authorities import Authority
from .serving import ECHO, SERVICE, Served, serving

MOST = 3


def connect(opened: ExitStack, served: Served, security: Security) -> None:
    """Calls over a new connection."""
    channel = opened.enter_context(open_channel(served.server.address, security, for_weights=True))
    channel.unary_unary(f"/{SERVICE}/unary_unary")(b"x", timeout=20)


def test_caller_with_too_many_connections_is_refused_until_one_has_closed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(interceptor, "CallerConnections", lambda: CallerConnections(MOST, 0.0))
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
        for left in reversed(range(100)):  # The server closes its ends a little later.
            try:
                with ExitStack() as again:
                    connect(again, served, client)
                break
            except grpc.RpcError:
                if not left:
                    raise
                time.sleep(0.1)


def test_system_is_asked_for_connections_at_most_once_in_a_while() -> None:
    connections = CallerConnections(most=1, look_seconds=3600.0)
    connections.check("device:a", "ipv4:127.0.0.1:1")
    connections.check("device:a", "ipv4:127.0.0.1:2")  # The first one is not open.
    with pytest.raises(PeerLostError, match="device:a has 1 connections"):
        connections.check("device:a", "ipv4:127.0.0.1:3")


def test_equal_ports_of_several_addresses_are_several_connections() -> None:
    connections = CallerConnections(most=2, look_seconds=3600.0)
    connections._forget_closed()
    for _ in range(2):
        for peer in ("ipv4:127.0.0.1:7", "ipv6:%5B::1%5D:7"):
            connections.check("device:a", peer)
    with pytest.raises(PeerLostError):
        connections.check("device:a", "ipv4:127.0.0.2:7")


@pytest.mark.parametrize(
    ("peer", "address"),
    [
        ("ipv4:127.0.0.1:7", "::ffff:127.0.0.1"),
        ("ipv6:%5B::ffff:127.0.0.1%5D:7", "127.0.0.1"),
        ("ipv6:%5Bfe80::1%25eth0%5D:7", "fe80::1"),
    ],
)
def test_address_of_grpc_is_found_among_those_of_the_system(peer: str, address: str) -> None:
    assert _end_of(peer) == _end(address, 7)


def test_closed_connections_of_many_callers_are_forgotten() -> None:
    connections = CallerConnections(look_seconds=0.0)
    for number in range(5000):
        connections.check(f"device:{number}", "ipv4:127.0.0.1:1")
    assert len(connections._peers) < 1100


def test_plain_text_connection_is_a_caller_of_its_own() -> None:
    connections = CallerConnections(most=1)
    for port in range(50_000, 50_010):
        connections.check(f"ipv4:127.0.0.1:{port}", f"ipv4:127.0.0.1:{port}")
