"""Connections without a call take neither the descriptors of a server nor the places of others."""

import os
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import pytest

from collapipe.rpc import open_channel, options, silent_connections
from collapipe.rpc import server as server_module
from collapipe.rpc.caller_connections import CallerConnections
from collapipe.rpc.silent_connections import SilentConnections, most_connections, surplus

from .authorities import Authority
from .serving import ECHO, PLAIN, SECONDS, Served, secured, serving

_HANDSHAKE = "grpc.server_handshake_timeout_ms"


def test_address_with_most_silent_connections_loses_its_oldest() -> None:
    attacker = [("10.0.0.9", port) for port in range(5)]
    silent = [("10.0.0.1", 1), *attacker, ("10.0.0.1", 2), ("10.0.0.2", 1)]
    assert surplus(silent, 8) == []
    assert surplus(silent, 6) == attacker[:2]
    assert surplus(silent, 2) == [*attacker, ("10.0.0.1", 1)]


@pytest.mark.parametrize(
    ("soft", "most"),
    [(256, 128), (1024, 512), (20_000, 4096), (silent_connections.resource.RLIM_INFINITY, 4096)],
)
def test_server_leaves_half_of_the_descriptors_to_files_and_own_calls(
    monkeypatch: pytest.MonkeyPatch, soft: int, most: int
) -> None:
    monkeypatch.setattr(silent_connections.resource, "getrlimit", lambda which: (soft, soft))
    assert most_connections() == most


def test_server_with_few_descriptors_says_so_at_its_start(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with serving(ECHO):
        assert not caplog.records
        monkeypatch.setattr(server_module, "most_connections", lambda: 512)
        with serving(ECHO):
            (told,) = caplog.messages
    assert all(number in told for number in ("512", "4096", "1024", "8192"))


@contextmanager
def idle(served: Served, number: int) -> Iterator[list[socket.socket]]:
    host, _, port = served.server.address.rpartition(":")
    with ExitStack() as opened:
        yield [
            opened.enter_context(socket.create_connection((host, int(port)), SECONDS))
            for _ in range(number)
        ]


def wait_for_end(connection: socket.socket) -> None:
    """Waits until the other side closes a connection; some bytes of HTTP/2 may come before."""
    try:
        while connection.recv(4096):
            pass
    except ConnectionResetError:
        pass


def set_handshake_time(monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    changed = dict(options.SERVER_OPTIONS) | {_HANDSHAKE: int(seconds * 1000)}
    monkeypatch.setattr(server_module, "SERVER_OPTIONS", list(changed.items()))


@pytest.mark.parametrize("is_secured", [True, False])
def test_connection_that_sends_nothing_ends(
    authority: Authority, monkeypatch: pytest.MonkeyPatch, is_secured: bool
) -> None:
    for of_kind in (options.SERVER_OPTIONS, options.PUBLIC_SERVER_OPTIONS):
        assert dict(of_kind)[_HANDSHAKE] == 10_000
    set_handshake_time(monkeypatch, 0.3)
    with secured(authority, ECHO, "client:me") if is_secured else serving(ECHO) as served:
        with idle(served, 3) as connections:
            for connection in connections:
                wait_for_end(connection)
        assert served.call("unary_unary") == [b"ask"]


def test_connections_beyond_the_limit_are_closed_at_once_and_others_stay(
    authority: Authority, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_module, "most_connections", lambda: 4)
    monkeypatch.setattr(silent_connections, "LOOK_SECONDS", 10 * SECONDS)
    set_handshake_time(monkeypatch, 10 * SECONDS)
    with secured(authority, ECHO, "client:me") as served:
        assert served.call("unary_unary") == [b"ask"]
        with idle(served, 4) as connections:
            wait_for_end(connections[3])
            assert served.call("unary_unary") == [b"ask"]


@pytest.mark.parametrize("is_secured", [True, False])
def test_silent_connections_make_room_for_callers(
    authority: Authority, monkeypatch: pytest.MonkeyPatch, is_secured: bool
) -> None:
    """The server takes 40 connections. Idle ones take all places, and come again as soon as they are closed."""
    monkeypatch.setattr(server_module, "most_connections", lambda: 40)
    monkeypatch.setattr(silent_connections, "LOOK_SECONDS", 0.05)
    set_handshake_time(monkeypatch, 10 * SECONDS)
    of_client = authority.security("client:other") if is_secured else PLAIN
    with secured(authority, ECHO, "client:me") if is_secured else serving(ECHO) as served:
        assert served.call("unary_unary") == [b"ask"]
        with idle(served, 60) as connections:
            # The oldest go, until ten are left.
            for connection in connections[:20]:
                wait_for_end(connection)
            with open_channel(served.server.address, of_client, for_weights=True) as channel:
                other = Served(served.server, channel)
                assert other.call("unary_unary", wait_for_ready=True) == [b"ask"]
                with idle(served, 60):
                    for connection in connections:
                        wait_for_end(connection)
                    assert [end.call("unary_unary") for end in (served, other)] == [[b"ask"]] * 2


def test_server_that_is_full_says_so_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(silent_connections, "LOOK_SECONDS", 10 * SECONDS)
    with socket.create_server(("127.0.0.1", 0)) as server, ExitStack() as opened:
        port = server.getsockname()[1]
        looking = SilentConnections(port, CallerConnections(), 4)
        for number in range(1, 5):
            opened.enter_context(socket.create_connection(("127.0.0.1", port), SECONDS))
            opened.enter_context(server.accept()[0])
            assert not any("all of the" in one for one in caplog.messages), number
            # The connections have made no call, and only one such connection may stay.
            assert looking._look() == number - 1
        looking._look()
        looking.close()
    (told,) = [one for one in caplog.messages if "all of the" in one]
    assert f"port {port}" in told and " 4 connections" in told


def test_few_silent_connections_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(silent_connections, "LOOK_SECONDS", 0.01)
    before = len(os.listdir("/proc/self/fd"))
    monkeypatch.setattr(server_module, "most_connections", lambda: 4 * (before + 100))
    with serving(ECHO) as served, idle(served, 20) as connections:
        assert served.call("unary_unary") == [b"ask"]
        for connection in connections:
            connection.setblocking(False)
            with pytest.raises(BlockingIOError):
                while connection.recv(4096):
                    pass
