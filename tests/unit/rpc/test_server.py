import socket
import threading
from collections.abc import Iterator
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from collapipe.errors import InvalidInputError
from collapipe.rpc import ChannelPool, Security, serve
from collapipe.rpc.options import MAX_MESSAGE_BYTES

from .serving import ECHO, SERVICE, Served, serving

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


def test_address_has_the_port_that_was_free() -> None:
    with serving(ECHO) as one, serving(ECHO) as two:
        assert one.server.address.startswith("127.0.0.1:")
        assert not one.server.address.endswith(":0")
        assert one.server.address != two.server.address
        assert two.call("unary_unary", b"hello") == [b"hello"]


def test_services_get_the_address_before_they_serve() -> None:
    told: list[str] = []
    server = serve(
        "127.0.0.1:0", Security.insecure(), lambda grpc_server, address: told.append(address)
    )
    server.drain(0)
    assert told == [server.address]


def test_port_in_use_is_refused() -> None:
    with serving(ECHO) as served, pytest.raises(InvalidInputError) as raised:
        serve(served.server.address, Security.insecure(), lambda grpc_server, address: None)
    assert f"cannot listen on {served.server.address}: the port is in use" in str(raised.value)


def test_port_of_another_program_is_refused() -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        address = f"127.0.0.1:{other.getsockname()[1]}"
        with pytest.raises(InvalidInputError, match=address):
            serve(address, Security.insecure(), lambda grpc_server, address: None)


@pytest.mark.parametrize("listen", ["nonsense", "127.0.0.1:99999", "127.0.0.1", "256.1.1.1:0", ""])
def test_invalid_address_is_refused(listen: str) -> None:
    with pytest.raises(InvalidInputError, match="cannot listen on"):
        serve(listen, Security.insecure(), lambda grpc_server, address: None)


def test_message_of_eight_mebibytes_passes_and_a_larger_one_does_not() -> None:
    with serving(ECHO) as served:
        largest = bytes(MAX_MESSAGE_BYTES)
        assert served.call("unary_unary", largest) == [largest]
        with pytest.raises(grpc.RpcError) as raised:
            served.call("unary_unary", largest + b"x")
        assert raised.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED


def test_channel_pool_opens_one_channel_for_each_peer() -> None:
    pool = ChannelPool(Security.insecure())
    with serving(ECHO) as served:
        channel = pool.channel(served.server.address)
        assert pool.channel(served.server.address) is channel
        assert pool.channel("127.0.0.1:1") is not channel
        assert channel.unary_unary(f"/{SERVICE}/unary_unary")(b"x", timeout=20) == b"x"
        pool.close()
        with pytest.raises(ValueError, match="closed"):
            channel.unary_unary(f"/{SERVICE}/unary_unary")(b"x", timeout=20)


# --- health and drain


def check(served: Served) -> int:
    stub = health_pb2_grpc.HealthStub(served.channel)
    return int(stub.Check(health_pb2.HealthCheckRequest(), timeout=20).status)


def watch(served: Served) -> Iterator[Any]:
    stub = health_pb2_grpc.HealthStub(served.channel)
    return iter(stub.Watch(health_pb2.HealthCheckRequest(), timeout=20))


def test_server_is_serving_once_it_is_started() -> None:
    with serving(ECHO) as served:
        assert check(served) == SERVING


def test_server_reports_not_serving_while_it_finishes_its_calls() -> None:
    begun, finish = threading.Event(), threading.Event()

    def work(request: bytes, context: grpc.ServicerContext) -> bytes:
        begun.set()
        assert finish.wait(20)
        return b"done"

    with serving({"unary_unary": work}) as served:
        statuses = watch(served)
        assert next(statuses).status == SERVING
        method = served.channel.unary_unary(f"/{SERVICE}/unary_unary")
        working = method.future(b"x", timeout=20)
        assert begun.wait(20)
        draining = threading.Thread(target=served.server.drain, args=(20,))
        draining.start()
        assert next(statuses).status == NOT_SERVING
        assert draining.is_alive()
        assert not working.done()
        finish.set()
        assert working.result(timeout=20) == b"done"
        statuses.cancel()  # type: ignore[attr-defined]
        draining.join(20)
        assert not draining.is_alive()


def test_drain_ends_calls_that_take_longer() -> None:
    begun, finish = threading.Event(), threading.Event()

    def work(request: bytes, context: grpc.ServicerContext) -> bytes:
        begun.set()
        finish.wait(20)
        return b"done"

    with serving({"unary_unary": work}) as served:
        method = served.channel.unary_unary(f"/{SERVICE}/unary_unary")
        working = method.future(b"x", timeout=20)
        assert begun.wait(20)
        served.server.drain(0.1)
        assert working.exception(timeout=20) is not None
        finish.set()


def test_server_whose_calls_are_all_busy_is_healthy(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("collapipe.rpc.interceptor.UNARY_THREADS", 1)
    begun, finish = threading.Event(), threading.Event()
    told_to_finish: list[bool] = []

    def work(request: bytes, context: grpc.ServicerContext) -> bytes:
        begun.set()
        told_to_finish.append(finish.wait(5))
        return b""

    with serving({"unary_unary": work}) as served:
        working = served.channel.unary_unary(f"/{SERVICE}/unary_unary").future(b"", timeout=20)
        assert begun.wait(20)
        statuses = watch(served)
        assert next(statuses).status == SERVING
        assert check(served) == SERVING
        statuses.cancel()  # type: ignore[attr-defined]
        finish.set()
        working.result(timeout=20)
    assert told_to_finish == [True], "health waited for a call to end"


def test_streams_that_stay_open_hold_up_no_other_method(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("collapipe.rpc.interceptor.STREAM_THREADS", 2)
    finish = threading.Event()

    def watch(request: bytes, context: grpc.ServicerContext) -> Iterator[bytes]:
        yield b"begun"
        assert finish.wait(20)

    with serving(ECHO | {"unary_stream": watch}) as served:
        method = served.channel.unary_stream(f"/{SERVICE}/unary_stream")
        watchers = [method(b"", timeout=30) for _ in range(2)]
        assert [next(watcher) for watcher in watchers] == [b"begun"] * 2
        watchers.append(method(b"", timeout=30))
        for arity in ("unary_unary", "stream_unary", "stream_stream"):
            assert served.call(arity, timeout=10)
        assert not any(watcher.done() for watcher in watchers)  # type: ignore[attr-defined]
        finish.set()
        assert [answer for watcher in watchers for answer in watcher] == [b"begun"]
