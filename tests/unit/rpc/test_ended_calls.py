"""The side that ends a call determines the status at the other side."""

import logging
import threading
import time
from collections.abc import Iterator

import grpc
import pytest
from prometheus_client import REGISTRY

from collapipe.errors import CancelledError, PeerLostError
from collapipe.rpc import to_error

from .serving import SERVICE, Served, serving

SECONDS = 20.0


class OpenStream:
    """Answers once, then stays open until it is released."""

    def __init__(self) -> None:
        self.released = threading.Event()

    def __call__(self, request: bytes, context: grpc.ServicerContext) -> Iterator[bytes]:
        yield b"answer"
        self.released.wait(SECONDS)


def open_stream(served: Served) -> "grpc.CallIterator[bytes]":
    stream = served.channel.unary_stream(f"/{SERVICE}/unary_stream")(b"", timeout=SECONDS)
    assert next(stream) == b"answer"
    return stream


def num_handled(code: str) -> float:
    labels = {
        "grpc_type": "bidi_stream",
        "grpc_service": SERVICE,
        "grpc_method": "stream_stream",
        "grpc_code": code,
    }
    return REGISTRY.get_sample_value("grpc_server_handled_total", labels) or 0


def test_server_that_ends_during_a_stream_is_a_lost_peer() -> None:
    behaviour = OpenStream()
    with serving({"unary_stream": behaviour}) as served:
        stream = open_stream(served)
        served.server.drain(0)
        with pytest.raises(grpc.RpcError) as raised:
            next(stream)
        behaviour.released.set()
    arrived = to_error(raised.value, "device-1")
    assert isinstance(arrived, PeerLostError)
    assert arrived.host_id == "device-1"


def test_own_cancellation_does_not_blame_the_peer() -> None:
    behaviour = OpenStream()
    with serving({"unary_stream": behaviour}) as served:
        stream = open_stream(served)
        stream.cancel()
        with pytest.raises(grpc.RpcError) as raised:
            next(stream)
        behaviour.released.set()
    assert isinstance(to_error(raised.value, "device-1"), CancelledError)


def test_caller_that_goes_away_during_its_requests_is_no_internal_error_and_logs_none(
    caplog: pytest.LogCaptureFixture,
) -> None:
    ended, quiet = threading.Event(), threading.Event()

    def echo(requests: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
        try:
            yield from requests
        finally:
            ended.set()

    def requests() -> Iterator[bytes]:
        yield b"one"
        quiet.wait(SECONDS)

    codes = ("CANCELLED", "OK", "INTERNAL")
    before = {code: num_handled(code) for code in codes}
    with caplog.at_level(logging.ERROR), serving({"stream_stream": echo}) as served:
        stream = served.channel.stream_stream(f"/{SERVICE}/stream_stream")(requests())
        assert next(stream) == b"one"
        stream.cancel()
        assert ended.wait(SECONDS)
        served.server.drain(SECONDS)
        quiet.set()
    assert [record.getMessage() for record in caplog.records] == []
    deadline = time.monotonic() + SECONDS  # The server counts a call after it has ended.
    while all(num_handled(code) == before[code] for code in codes) and time.monotonic() < deadline:
        time.sleep(0.01)
    counted = {code: num_handled(code) - before[code] for code in codes}
    # gRPC may end the requests before it reports the cancellation. The handler has then ended well.
    assert counted in (
        {"CANCELLED": 1, "OK": 0, "INTERNAL": 0},
        {"CANCELLED": 0, "OK": 1, "INTERNAL": 0},
    )
