import threading
from collections.abc import Iterator
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from collapipe.errors import InvalidInputError
from collapipe.rpc import serve
from collapipe.rpc.options import MAX_MESSAGE_BYTES

from .serving import ECHO, PLAIN, SECONDS, Served, serving

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


def test_address_has_the_port_that_was_free_and_services_get_it_before_they_serve() -> None:
    told: list[str] = []
    servers = [
        serve("127.0.0.1:0", PLAIN, lambda grpc_server, address: told.append(address))
        for _ in range(2)
    ]
    assert told == [server.address for server in servers]
    assert told[0] != told[1]
    for server in servers:
        assert server.address.startswith("127.0.0.1:") and not server.address.endswith(":0")
        server.drain(0)


def test_port_in_use_is_refused() -> None:
    with serving(ECHO) as served, pytest.raises(InvalidInputError, match=served.server.address):
        serve(served.server.address, PLAIN, lambda grpc_server, address: None)


@pytest.mark.parametrize("listen", ["nonsense", "127.0.0.1:99999", "127.0.0.1", "256.1.1.1:0", ""])
def test_invalid_address_is_refused(listen: str) -> None:
    with pytest.raises(InvalidInputError, match=f"listen on {listen}"):
        serve(listen, PLAIN, lambda grpc_server, address: None)


def test_message_of_eight_mebibytes_passes_and_a_larger_one_does_not() -> None:
    with serving(ECHO) as served:
        largest = bytes(MAX_MESSAGE_BYTES)
        assert served.call("unary_unary", largest) == [largest]
        failure = served.failure("unary_unary", largest + b"x")
        assert failure.code() is grpc.StatusCode.RESOURCE_EXHAUSTED


# --- health and drain


def check(served: Served) -> int:
    stub = health_pb2_grpc.HealthStub(served.channel)
    return int(stub.Check(health_pb2.HealthCheckRequest(), timeout=SECONDS).status)


def watch(served: Served) -> Any:
    stub = health_pb2_grpc.HealthStub(served.channel)
    return stub.Watch(health_pb2.HealthCheckRequest(), timeout=SECONDS)


class Work:
    """A method that works until a test lets it finish."""

    def __init__(self) -> None:
        self.begun, self.finish = threading.Event(), threading.Event()

    def __call__(self, request: bytes, context: grpc.ServicerContext) -> bytes:
        self.begun.set()
        assert self.finish.wait(SECONDS)
        return b"done"

    def begin(self, served: Served) -> Any:
        working = served.method().future(b"x", timeout=2 * SECONDS)
        assert self.begun.wait(SECONDS)
        return working


def test_server_reports_not_serving_while_it_finishes_its_calls() -> None:
    work = Work()
    with serving({"unary_unary": work}) as served:
        statuses = watch(served)
        assert next(statuses).status == SERVING
        working = work.begin(served)
        draining = threading.Thread(target=served.server.drain, args=(SECONDS,))
        draining.start()
        assert next(statuses).status == NOT_SERVING
        assert draining.is_alive()
        assert not working.done()
        work.finish.set()
        assert working.result(timeout=SECONDS) == b"done"
        statuses.cancel()
        draining.join(SECONDS)
        assert not draining.is_alive()


def test_drain_ends_calls_that_take_longer() -> None:
    work = Work()
    with serving({"unary_unary": work}) as served:
        working = work.begin(served)
        served.server.drain(0.01)
        assert working.exception(timeout=SECONDS) is not None
        work.finish.set()


def test_server_whose_calls_are_all_busy_is_healthy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("collapipe.rpc.interceptor.UNARY_THREADS", 1)
    work = Work()
    with serving({"unary_unary": work}) as served:
        working = work.begin(served)
        statuses = watch(served)
        assert next(statuses).status == check(served) == SERVING
        statuses.cancel()
        assert not working.done(), "health waited for a call to end"
        work.finish.set()
        assert working.result(timeout=SECONDS) == b"done"


def test_streams_that_stay_open_hold_up_no_other_method(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("collapipe.rpc.interceptor.STREAM_THREADS", 2)
    finish = threading.Event()

    def stay(request: bytes, context: grpc.ServicerContext) -> Iterator[bytes]:
        yield b"begun"
        assert finish.wait(SECONDS)

    with serving(ECHO | {"unary_stream": stay}) as served:
        open_stream = served.method("unary_stream")
        streams = [open_stream(b"") for _ in range(2)]
        assert [next(stream) for stream in streams] == [b"begun"] * 2
        streams.append(open_stream(b""))
        for arity in ("unary_unary", "stream_unary", "stream_stream"):
            assert served.call(arity)
        assert not any(stream.done() for stream in streams)
        finish.set()
        assert [answer for stream in streams for answer in stream] == [b"begun"]
