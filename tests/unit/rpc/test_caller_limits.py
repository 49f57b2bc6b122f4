"""A caller can hold up no other one: not with silent calls, not with many calls, and not with many connections."""

import queue
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any

import grpc
import psutil
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from collapipe.errors import PeerLostError
from collapipe.rpc import interceptor, open_channel
from collapipe.rpc.caller_connections import CallerConnections, _end_of, end_at
from collapipe.rpc.permissions import PERMISSIONS
from collapipe.rpc.silent_calls import MOST_SILENT_CALLS, SilentCalls

from .authorities import Authority
from .serving import ARITIES, ECHO, SECONDS, SERVICE, Served, secured, serving


class Silence:
    """Requests that never come, until it is closed."""

    def __init__(self) -> None:
        self._closed = threading.Event()

    def __iter__(self) -> Iterator[bytes]:
        self._closed.wait()
        yield from ()

    def close(self) -> None:
        self._closed.set()


@pytest.fixture
def silence() -> Iterator[Silence]:
    silence = Silence()
    yield silence
    silence.close()


def call_silently(served: Served, arity: str, silence: Silence) -> Any:
    """Opens a call, and sends nothing. The client takes every method for one that takes a stream."""
    answers = "stream" if arity.endswith("stream") else "unary"
    method = getattr(served.channel, f"stream_{answers}")(f"/{SERVICE}/{arity}")
    return method(iter(silence)) if answers == "stream" else method.future(iter(silence))


def code_of(call: Any) -> grpc.StatusCode:
    """Waits for the end of a call that fails."""
    with pytest.raises(grpc.RpcError):
        call.result(SECONDS)
    code: grpc.StatusCode = call.code()
    return code


def test_caller_without_permission_is_refused_before_it_sends_a_message(
    authority: Authority, silence: Silence
) -> None:
    with secured(authority, ECHO, "client:me", permissions={SERVICE: {}}) as served:
        for arity in ARITIES:
            call = call_silently(served, arity, silence)
            assert code_of(call) is grpc.StatusCode.PERMISSION_DENIED


def test_silent_call_ends(monkeypatch: pytest.MonkeyPatch, silence: Silence) -> None:
    monkeypatch.setattr(interceptor, "SilentCalls", lambda: SilentCalls(seconds=0.05))
    with serving(ECHO) as served:
        calls = [call_silently(served, arity, silence) for arity in ARITIES]
        assert {code_of(call) for call in calls} == {grpc.StatusCode.CANCELLED}


def test_silent_calls_hold_no_other_up(silence: Silence) -> None:
    with serving(ECHO) as served:
        calls = [call_silently(served, arity, silence) for arity in ARITIES]
        watching = served.channel.stream_stream("/grpc.health.v1.Health/Watch")
        calls += [watching(iter(silence)) for _ in range(3)]
        for arity in ARITIES:
            assert served.call(arity)
        stub = health_pb2_grpc.HealthStub(served.channel)
        assert stub.Check(health_pb2.HealthCheckRequest(), timeout=SECONDS).status
        assert next(iter(stub.Watch(health_pb2.HealthCheckRequest(), timeout=SECONDS))).status
        for call in calls:
            call.cancel()


def test_caller_has_few_silent_calls_and_others_are_served(
    authority: Authority, silence: Silence
) -> None:
    ended: queue.SimpleQueue[Any] = queue.SimpleQueue()
    with secured(authority, ECHO, "client:me") as served:
        calls = [call_silently(served, "unary_unary", silence) for _ in range(20)]
        for call in calls:
            call.add_done_callback(ended.put)
        refused = [ended.get(timeout=SECONDS) for _ in range(20 - MOST_SILENT_CALLS)]
        assert {call.code() for call in refused} == {grpc.StatusCode.UNAVAILABLE}
        assert f"client:me has {MOST_SILENT_CALLS} calls" in refused[0].details()
        with open_channel(served.server.address, authority.security("client:other")) as channel:
            assert Served(served.server, channel).call("unary_unary", b"x") == [b"x"]
        assert sum(call.done() for call in calls) == len(refused)


def test_call_that_ends_without_a_message_is_refused() -> None:
    with serving(ECHO) as served:
        method = served.channel.stream_unary(f"/{SERVICE}/unary_unary")
        with pytest.raises(grpc.RpcError) as raised:
            method(iter(()), timeout=SECONDS)
    assert raised.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert f"{SERVICE}/unary_unary needs one message" in raised.value.details()


@pytest.mark.parametrize("of_this_method", [False, True])
@pytest.mark.parametrize("arity", ARITIES)
def test_caller_with_too_many_calls_is_refused_and_others_are_not(
    authority: Authority, monkeypatch: pytest.MonkeyPatch, arity: str, of_this_method: bool
) -> None:
    if of_this_method:
        monkeypatch.setattr(interceptor, "_MOST_OF_A_METHOD", {f"/{SERVICE}/{arity}": 2})
    else:
        monkeypatch.setattr(interceptor, "_MOST_OF_A_CALLER", {True: 2, False: 2})
    goes_on = threading.Event()
    begun: queue.SimpleQueue[str] = queue.SimpleQueue()

    def wait(request: Any, context: grpc.ServicerContext) -> Any:
        begun.put(arity)
        goes_on.wait()
        return iter([b"done"]) if arity.endswith("stream") else b"done"

    other = authority.security("client:other")
    with (
        secured(authority, {arity: wait}, "client:one") as served,
        ThreadPoolExecutor() as threads,
        open_channel(served.server.address, other) as channel,
    ):
        calls = [threads.submit(served.call, arity) for _ in range(2)]
        for _ in calls:
            begun.get(timeout=SECONDS)
        assert "client:one has 2 calls of " in str(served.failure(arity).details())
        calls.append(threads.submit(Served(served.server, channel).call, arity))
        begun.get(timeout=SECONDS)
        goes_on.set()
        assert [call.result(SECONDS) for call in calls] == [[b"done"]] * 3
        assert served.call(arity) == [b"done"]


def test_methods_with_limits_of_their_own_exist() -> None:
    limited = {*interceptor._MOST_OF_A_METHOD, *interceptor._LARGE_REQUESTS}
    known = {f"/{service}/{name}" for service, names in PERMISSIONS.items() for name in names}
    assert limited <= known


# --- connections


def test_caller_with_too_many_connections_is_refused_and_others_are_not(
    authority: Authority, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(interceptor, "CallerConnections", lambda: CallerConnections(2, 0.0))
    client = authority.security("client:me")
    with secured(authority, ECHO, "client:other") as served, ExitStack() as opened:
        ends = []
        for _ in range(3):
            channel = open_channel(served.server.address, client, for_weights=True)
            ends.append(Served(served.server, opened.enter_context(channel)))
        assert [end.call("unary_unary") for end in ends[:2]] == [[b"ask"]] * 2
        failure = ends[2].failure()
        assert failure.code() is grpc.StatusCode.UNAVAILABLE
        assert "client:me has 2 connections" in str(failure.details())
        assert served.call("unary_unary", b"x")


def test_connection_that_is_refused_is_closed_after_its_answer(
    authority: Authority, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(interceptor, "CallerConnections", lambda: CallerConnections(1, 0.0))
    client = authority.security("client:me")
    with secured(authority, ECHO, "client:me") as served:
        assert served.call("unary_unary") == [b"ask"]
        with open_channel(served.server.address, client, for_weights=True) as channel:
            assert "1 connections" in str(Served(served.server, channel).failure().details())
            has_closed = threading.Event()

            def see(state: grpc.ChannelConnectivity) -> None:
                if state in (
                    grpc.ChannelConnectivity.IDLE,
                    grpc.ChannelConnectivity.TRANSIENT_FAILURE,
                ):
                    has_closed.set()

            channel.subscribe(see)
            assert has_closed.wait(SECONDS)
        assert served.call("unary_unary") == [b"ask"]


def test_closed_connection_counts_no_more_once_the_system_was_asked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ports = [1]
    monkeypatch.setattr(
        psutil.Process,
        "net_connections",
        lambda *_: [SimpleNamespace(raddr=("127.0.0.1", port)) for port in ports],
    )
    connections = CallerConnections(most=1, look_seconds=3600.0)
    connections._next_look = float("inf")
    connections.check("device:a", "ipv4:127.0.0.1:1")
    with pytest.raises(PeerLostError):
        connections.check("device:a", "ipv4:127.0.0.1:2")
    connections._next_look = 0.0
    with pytest.raises(PeerLostError, match="device:a has 1 connections"):
        connections.check("device:a", "ipv4:127.0.0.1:2")
    connections._next_look, ports = 0.0, []
    connections.check("device:a", "ipv4:127.0.0.1:2")
    with pytest.raises(PeerLostError):  # The system is asked at most once in an hour.
        connections.check("device:a", "ipv4:127.0.0.1:3")


def test_equal_ports_of_several_addresses_are_several_connections() -> None:
    connections = CallerConnections(most=2)
    connections._next_look = float("inf")
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
    assert _end_of(peer) == end_at(address, 7)


def test_closed_connections_of_many_callers_are_forgotten() -> None:
    connections = CallerConnections(look_seconds=0.0)
    for number in range(3000):
        connections.check(f"device:{number}", "ipv4:127.0.0.1:1")
    assert len(connections._peers) < 1100


def test_plain_text_connection_is_a_caller_of_its_own() -> None:
    connections = CallerConnections(most=1)
    for port in range(50_000, 50_010):
        connections.check(f"ipv4:127.0.0.1:{port}", f"ipv4:127.0.0.1:{port}")
