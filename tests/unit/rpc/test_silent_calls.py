"""Calls that send no message hold nothing up, and end."""

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from collapipe.rpc import interceptor, open_channel
from collapipe.rpc.silent_calls import MOST_SILENT_CALLS, SilentCalls

from .authorities import Authority
from .serving import ARITIES, ECHO, SERVICE, Served, serving


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


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.parametrize("arity", ARITIES)
def test_caller_without_permission_is_refused_before_it_sends_a_message(
    tmp_path: Path, silence: Silence, arity: str
) -> None:
    authority = Authority(tmp_path)
    server, client = authority.security("scheduler:scheduler"), authority.security("client:me")
    with serving(ECHO, server, client, permissions={SERVICE: {}}) as served:
        call = call_silently(served, arity, silence)
        with pytest.raises(grpc.RpcError) as raised:
            next(call) if arity.endswith("stream") else call.result(20)
    assert raised.value.code() is grpc.StatusCode.PERMISSION_DENIED


@pytest.mark.parametrize("arity", ARITIES)
def test_silent_call_is_ended_and_another_is_served_meanwhile(
    monkeypatch: pytest.MonkeyPatch, silence: Silence, arity: str
) -> None:
    monkeypatch.setattr(interceptor, "SilentCalls", lambda: SilentCalls(seconds=1.0))
    with serving(ECHO) as served:
        call = call_silently(served, arity, silence)
        assert served.call(arity, b"x")
        with pytest.raises(grpc.RpcError) as raised:
            next(call) if arity.endswith("stream") else call.result(20)
    assert raised.value.code() is grpc.StatusCode.CANCELLED


def test_caller_has_few_silent_calls_and_others_are_served(
    tmp_path: Path, silence: Silence
) -> None:
    authority = Authority(tmp_path)
    server, client = authority.security("scheduler:scheduler"), authority.security("client:me")
    other = authority.security("client:other")
    with serving(ECHO, server, client) as served:
        calls = [call_silently(served, "unary_unary", silence) for _ in range(100)]
        until(lambda: sum(call.done() for call in calls) == 100 - MOST_SILENT_CALLS)
        refused = [call for call in calls if call.done()]
        assert {call.code() for call in refused} == {grpc.StatusCode.UNAVAILABLE}
        assert "client:me has 16 calls of " in refused[0].details()
        channel = open_channel(served.server.address, other)
        assert Served(served.server, channel).call("unary_unary", b"x") == [b"x"]
        channel.close()


def test_call_that_ends_without_a_message_is_refused() -> None:
    with serving(ECHO) as served:
        method = served.channel.stream_unary(f"/{SERVICE}/unary_unary")
        with pytest.raises(grpc.RpcError) as raised:
            method(iter(()), timeout=20)
    assert raised.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "needs one message, but none was sent" in raised.value.details()


def test_silent_watches_of_the_health_hold_no_health_check_up(silence: Silence) -> None:
    with serving(ECHO) as served:
        watching = served.channel.stream_stream("/grpc.health.v1.Health/Watch")
        calls = [watching(iter(silence)) for _ in range(3)]
        stub = health_pb2_grpc.HealthStub(served.channel)
        assert stub.Check(health_pb2.HealthCheckRequest(), timeout=20).status
        assert next(iter(stub.Watch(health_pb2.HealthCheckRequest(), timeout=20))).status
        for call in calls:
            call.cancel()


@pytest.mark.parametrize("arity", ARITIES)
def test_caller_with_too_many_calls_is_refused_and_others_are_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arity: str
) -> None:
    monkeypatch.setattr(interceptor, "_MOST_OF_A_CALLER", {True: 2, False: 2})
    authority, goes_on = Authority(tmp_path), threading.Event()
    begun: list[str] = []

    def wait(request: Any, context: grpc.ServicerContext) -> Any:
        begun.append(arity)
        goes_on.wait()
        return iter([b"done"]) if arity.endswith("stream") else b"done"

    server = authority.security("scheduler:scheduler")
    one, other = authority.security("client:one"), authority.security("client:other")
    with (
        serving({arity: wait}, server, one) as served,
        ThreadPoolExecutor() as threads,
        open_channel(served.server.address, other) as channel,
    ):
        of_other = Served(served.server, channel)
        calls = [threads.submit(served.call, arity) for _ in range(2)]
        until(lambda: len(begun) == 2)
        with pytest.raises(grpc.RpcError) as raised:
            served.call(arity)
        assert "client:one has 2 calls of " in str(raised.value.details())
        calls.append(threads.submit(of_other.call, arity))
        until(lambda: len(begun) == 3)
        goes_on.set()
        assert [call.result(20) for call in calls] == [[b"done"]] * 3
        assert served.call(arity) == [b"done"]
