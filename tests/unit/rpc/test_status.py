"""Errors of a server become statuses, and errors at the caller. The side that ends a call determines the status at the other side."""

import logging
import queue
import threading
from collections.abc import Iterator
from typing import Any

import grpc
import pytest

from collapipe import errors
from collapipe.rpc import call, interceptor, to_error
from collapipe.rpc.status import details, to_code

from .serving import ARITIES, ECHO, SECONDS, SERVICE, raising, serving

TEXT = "unit 3 has 5 bytes, not 7: run\nthe round again, ünless"
CODES = {
    errors.InvalidInputError(TEXT): grpc.StatusCode.INVALID_ARGUMENT,
    errors.WrongStateError(TEXT): grpc.StatusCode.FAILED_PRECONDITION,
    errors.InfeasibleError(TEXT): grpc.StatusCode.RESOURCE_EXHAUSTED,
    errors.NotFoundError(TEXT): grpc.StatusCode.NOT_FOUND,
    errors.NotPermittedError(TEXT): grpc.StatusCode.PERMISSION_DENIED,
    errors.PeerLostError("device-1", TEXT): grpc.StatusCode.UNAVAILABLE,
    errors.AttemptFailedError(TEXT): grpc.StatusCode.ABORTED,
    errors.CorruptDataError(TEXT): grpc.StatusCode.DATA_LOSS,
    errors.DivergedError(TEXT): grpc.StatusCode.OUT_OF_RANGE,
    errors.CancelledError(TEXT): grpc.StatusCode.CANCELLED,
}


def test_every_error_has_a_status() -> None:
    assert {type(error) for error in CODES} == set(errors.CollapipeError.__subclasses__())
    assert {error: to_code(error) for error in CODES} == CODES


@pytest.mark.parametrize("arity", ARITIES)
def test_error_arrives_with_its_type_and_text(arity: str) -> None:
    with serving(raising(*CODES)) as served:
        for error, code in CODES.items():
            failure = served.failure(arity)
            arrived = to_error(failure, "the server")
            assert (failure.code(), type(arrived), str(arrived)) == (code, type(error), TEXT)


def test_text_that_a_terminal_would_obey_arrives_escaped() -> None:
    with serving(raising(errors.InvalidInputError("\x1b]0;x\x07\u202e\none"))) as served:
        assert str(served.error()) == "\\x1b]0;x\\x07\\u202e\none"


@pytest.mark.parametrize("host_id", ["device-1", "gerät 1", "10.0.0.1:5000", ""])
def test_lost_peer_of_the_server_is_named_to_the_caller(host_id: str) -> None:
    with serving(raising(errors.PeerLostError(host_id, "gone"))) as served:
        arrived = served.error()
    assert isinstance(arrived, errors.PeerLostError)
    assert (arrived.host_id, str(arrived)) == (host_id, "gone")


@pytest.mark.parametrize("line", ["data.jsonl:1: wrong\n", "ü\n"])
def test_long_explanation_arrives_shortened(line: str) -> None:
    text = line * 5000
    with serving(raising(errors.InvalidInputError(text))) as served:
        arrived = served.error()
    assert type(arrived) is errors.InvalidInputError
    assert str(arrived).startswith(text[:500])
    assert str(arrived).endswith("[shortened]")


@pytest.mark.parametrize(
    ("error", "resource"),
    [
        (OSError(28, "No space left on device", "/state/round.json"), "disk"),
        (RuntimeError("can't start new thread"), "memory"),
        (MemoryError(), "memory"),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: 4096 bytes"), "memory"),
    ],
)
def test_full_disk_and_full_memory_of_a_host_are_named(error: Exception, resource: str) -> None:
    with serving(raising(error)) as served:
        arrived = served.error()
    assert isinstance(arrived, errors.AttemptFailedError)
    said, _, cause = str(arrived).partition(f"({type(error).__name__}")
    assert said.startswith("device-1 failed") and resource in said and cause
    assert "see the log" not in str(arrived)


@pytest.mark.parametrize("arity", ARITIES)
def test_unexpected_exception_is_internal_and_logged(
    arity: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.ERROR), serving(raising(ZeroDivisionError("by 0"))) as served:
        failure = served.failure(arity)
    assert failure.code() is grpc.StatusCode.INTERNAL
    arrived = to_error(failure, "device-1")
    assert isinstance(arrived, errors.AttemptFailedError)
    assert str(arrived).startswith("device-1 failed: ZeroDivisionError: by 0")
    (record,) = [r for r in caplog.records if r.name == "collapipe.rpc.interceptor"]
    assert f"{SERVICE}/{arity}" in record.getMessage()
    assert record.exc_info is not None


def test_status_that_a_handler_sets_itself_is_kept() -> None:
    def abort(request: bytes, context: grpc.ServicerContext) -> bytes:
        context.abort(grpc.StatusCode.UNAUTHENTICATED, "who are you")

    with serving({"unary_unary": abort}) as served:
        assert served.failure().code() is grpc.StatusCode.UNAUTHENTICATED


def test_unknown_method_is_a_failed_attempt_and_names_the_status() -> None:
    with serving({}) as served:
        arrived = served.error()
    assert isinstance(arrived, errors.AttemptFailedError)
    assert "device-1" in str(arrived) and "UNIMPLEMENTED" in str(arrived)


def test_unreachable_server_is_a_lost_peer() -> None:
    with serving(ECHO) as served:
        served.server.drain(0)
        with pytest.raises(errors.PeerLostError, match="device-1") as raised:
            call(served.method(), b"", "device-1", SECONDS)
    assert raised.value.host_id == "device-1"


def test_an_address_that_cannot_be_one_is_a_lost_peer() -> None:
    with grpc.insecure_channel("") as channel, pytest.raises(grpc.RpcError) as failed:
        channel.unary_unary("/a/b")(b"", timeout=SECONDS)
    error = to_error(failed.value, "the vocabulary's host")
    assert isinstance(error, errors.PeerLostError)
    assert "address" in str(error)


def test_server_that_does_not_answer_in_time_is_a_lost_peer_and_not_called_unreachable() -> None:
    over = threading.Event()

    def hang(request: bytes, context: grpc.ServicerContext) -> bytes:
        over.wait(SECONDS)
        return b""

    with serving({"unary_unary": hang}) as served:
        with pytest.raises(errors.PeerLostError, match="not answer in time") as raised:
            call(served.method(), b"", "device-1", seconds=0.05)
        over.set()
    assert raised.value.host_id == "device-1"


# --- calls that one side ends


@pytest.mark.parametrize("ended_by", ["server", "caller"])
def test_end_of_a_stream_blames_the_peer_only_if_it_was_the_peer(ended_by: str) -> None:
    over = threading.Event()

    def answer(request: bytes, context: grpc.ServicerContext) -> Iterator[bytes]:
        yield b"answer"
        over.wait(SECONDS)

    with serving({"unary_stream": answer}) as served:
        stream = served.method("unary_stream")(b"")
        assert next(stream) == b"answer"
        if ended_by == "server":
            served.server.drain(0)
        else:
            stream.cancel()
        with pytest.raises(grpc.RpcError) as raised:
            next(stream)
        over.set()
    arrived = to_error(raised.value, "device-1")
    if ended_by == "server":
        assert isinstance(arrived, errors.PeerLostError) and arrived.host_id == "device-1"
    else:
        assert isinstance(arrived, errors.CancelledError)


def test_caller_that_goes_away_during_its_requests_is_no_internal_error_and_logs_none(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    quiet = threading.Event()
    handled: queue.SimpleQueue[tuple[str, ...]] = queue.SimpleQueue()
    counter = interceptor.metrics.CALLS_HANDLED

    class NotingCounter:
        def labels(self, *labels: str) -> Any:
            handled.put(labels)
            return counter.labels(*labels)

    def requests() -> Iterator[bytes]:
        yield b"one"
        quiet.wait(SECONDS)

    monkeypatch.setattr(interceptor.metrics, "CALLS_HANDLED", NotingCounter())
    with caplog.at_level(logging.ERROR), serving(ECHO) as served:
        stream = served.method("stream_stream")(requests())
        assert next(stream) == b"one"
        stream.cancel()
        method: list[str] = []
        # A call of another test may end only now.
        while method != ["bidi_stream", SERVICE, "stream_stream"]:
            *method, code = handled.get(timeout=SECONDS)
        quiet.set()
    # gRPC may end the requests before it reports the cancellation. The handler has then ended well.
    assert code in ("CANCELLED", "OK")
    assert [record.getMessage() for record in caplog.records] == []


def test_text_that_utf8_cannot_encode_arrives_nevertheless() -> None:
    assert details("the column 'a\ud800'") == "the column 'a\\ud800'"
    assert details("\ud800" * 1000).endswith("[shortened]")
