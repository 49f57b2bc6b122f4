import logging
import threading

import grpc
import pytest

from collapipe import errors
from collapipe.rpc import call, to_error
from collapipe.rpc.status import to_code

from .serving import ARITIES, ECHO, SERVICE, Served, raising, serving

CODES = {
    errors.InvalidInputError("x"): grpc.StatusCode.INVALID_ARGUMENT,
    errors.WrongStateError("x"): grpc.StatusCode.FAILED_PRECONDITION,
    errors.InfeasibleError("x"): grpc.StatusCode.RESOURCE_EXHAUSTED,
    errors.NotFoundError("x"): grpc.StatusCode.NOT_FOUND,
    errors.NotPermittedError("x"): grpc.StatusCode.PERMISSION_DENIED,
    errors.PeerLostError("device-1", "x"): grpc.StatusCode.UNAVAILABLE,
    errors.AttemptFailedError("x"): grpc.StatusCode.ABORTED,
    errors.CorruptDataError("x"): grpc.StatusCode.DATA_LOSS,
    errors.DivergedError("x"): grpc.StatusCode.OUT_OF_RANGE,
    errors.CancelledError("x"): grpc.StatusCode.CANCELLED,
}


def failure_of(served: Served, arity: str) -> grpc.RpcError:
    with pytest.raises(grpc.RpcError) as raised:
        served.call(arity)
    return raised.value


def test_every_error_has_a_status() -> None:
    assert {type(error) for error in CODES} == set(errors.CollapipeError.__subclasses__())
    assert {error: to_code(error) for error in CODES} == CODES


@pytest.mark.parametrize("arity", ARITIES)
def test_calls_pass_when_nothing_is_raised(arity: str) -> None:
    with serving(ECHO) as served:
        joined = [b"ask+ask"] if arity == "stream_unary" else [b"ask"]
        assert served.call(arity) == (joined if arity != "stream_stream" else [b"ask", b"ask"])


@pytest.mark.parametrize("arity", ARITIES)
def test_error_arrives_with_its_type_and_text(arity: str) -> None:
    for kind, code in {type(error): code for error, code in CODES.items()}.items():
        text = "unit 3 has 5 bytes, not 7: run\nthe round again, ünless"
        error = kind("device-1", text) if kind is errors.PeerLostError else kind(text)
        with serving(raising(error)) as served:
            failure = failure_of(served, arity)
        assert failure.code() is code
        arrived = to_error(failure, "the server")
        assert type(arrived) is kind
        assert str(arrived) == text


def test_hanging_server_is_distinguished_from_an_unreachable_one() -> None:
    asked = threading.Event()

    def hang(request: object, context: object) -> bytes:
        asked.wait(20)
        return b""

    with serving({"unary_unary": hang}) as served, pytest.raises(grpc.RpcError) as raised:
        try:
            served.call("unary_unary", timeout=0.5)
        finally:
            asked.set()
    assert "it did not answer in time" in str(to_error(raised.value, "the server"))


@pytest.mark.parametrize("arity", ["unary_stream", "stream_stream"])
def test_error_arrives_after_the_answers_of_a_stream(arity: str) -> None:
    with serving(raising(errors.CorruptDataError("garbled"), after=2)) as served:
        stream = getattr(served.channel, arity)(f"/{SERVICE}/{arity}")
        answers = stream(b"x" if arity == "unary_stream" else iter([b"x"]), timeout=20)
        assert [next(answers), next(answers)] == [b"answer"] * 2
        with pytest.raises(grpc.RpcError) as raised:
            next(answers)
    assert type(to_error(raised.value, "")) is errors.CorruptDataError


@pytest.mark.parametrize("host_id", ["device-1", "gerät 1", "10.0.0.1:5000", ""])
def test_lost_peer_of_the_server_is_named_to_the_caller(host_id: str) -> None:
    with serving(raising(errors.PeerLostError(host_id, "gone"))) as served:
        arrived = to_error(failure_of(served, "unary_unary"), "the server")
    assert isinstance(arrived, errors.PeerLostError)
    assert (arrived.host_id, str(arrived)) == (host_id, "gone")


@pytest.mark.parametrize("line", ["data.jsonl:1: wrong\n", "ü\n"])
def test_long_explanation_arrives_shortened(line: str) -> None:
    text = line * 5000
    with serving(raising(errors.InvalidInputError(text))) as served:
        arrived = to_error(failure_of(served, "unary_unary"), "the server")
    assert type(arrived) is errors.InvalidInputError
    assert str(arrived).startswith(text[:500])
    assert str(arrived).endswith("[shortened]")


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (OSError(28, "No space left on device", "/state/round.json"), "its disk is full"),
        (RuntimeError("can't start new thread"), "it gets no more memory"),
        (MemoryError(), "it gets no more memory"),
        (
            RuntimeError("DefaultCPUAllocator: can't allocate memory: 4096 bytes"),
            "it gets no more memory",
        ),
    ],
)
def test_full_disk_and_full_memory_of_a_host_are_named_with_a_remedy(
    error: Exception, words: str
) -> None:
    with serving(raising(error)) as served:
        arrived = to_error(failure_of(served, "unary_unary"), "device-1")
    assert isinstance(arrived, errors.AttemptFailedError)
    assert str(arrived).startswith(f"device-1 failed: {words} ({type(error).__name__}")
    assert "see the log" not in str(arrived)


@pytest.mark.parametrize("arity", ARITIES)
def test_unexpected_exception_is_internal_and_logged(
    arity: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.ERROR), serving(raising(ZeroDivisionError("by 0"))) as served:
        failure = failure_of(served, arity)
    assert failure.code() is grpc.StatusCode.INTERNAL
    assert "ZeroDivisionError: by 0; see the log" in str(failure.details())
    arrived = to_error(failure, "device-1")
    assert isinstance(arrived, errors.AttemptFailedError)
    assert str(arrived).startswith("device-1 failed: ZeroDivisionError")
    (record,) = [r for r in caplog.records if r.name == "collapipe.rpc.interceptor"]
    assert f"{SERVICE}/{arity} failed unexpectedly" in record.getMessage()
    assert record.exc_info is not None


def test_status_that_a_handler_sets_itself_is_kept() -> None:
    def abort(request: bytes, context: grpc.ServicerContext) -> bytes:
        context.abort(grpc.StatusCode.UNAUTHENTICATED, "who are you")

    with serving({"unary_unary": abort}) as served:
        assert failure_of(served, "unary_unary").code() is grpc.StatusCode.UNAUTHENTICATED


def test_unknown_method_is_a_failed_attempt_and_names_the_status() -> None:
    with serving({}) as served:
        arrived = to_error(failure_of(served, "unary_unary"), "device-1")
    assert isinstance(arrived, errors.AttemptFailedError)
    assert "device-1 failed with UNIMPLEMENTED" in str(arrived)


def test_unreachable_server_is_a_lost_peer() -> None:
    with serving(ECHO) as served:
        served.server.drain(0)
        method = served.channel.unary_unary(f"/{SERVICE}/unary_unary")
        with pytest.raises(errors.PeerLostError, match="device-1 cannot be reached") as raised:
            call(method, b"", "device-1", seconds=10)
    assert raised.value.host_id == "device-1"


def test_an_address_that_cannot_be_one_is_a_lost_peer() -> None:
    with grpc.insecure_channel("") as channel, pytest.raises(grpc.RpcError) as failed:
        channel.unary_unary("/a/b")(b"", timeout=10)
    error = to_error(failed.value, "the vocabulary's host")
    assert isinstance(error, errors.PeerLostError)
    assert "address is right" in str(error)


def test_call_beyond_its_deadline_is_a_lost_peer() -> None:
    over = threading.Event()

    def wait(request: bytes, context: grpc.ServicerContext) -> bytes:
        over.wait(20)
        return b""

    with serving({"unary_unary": wait}) as served:
        method = served.channel.unary_unary(f"/{SERVICE}/unary_unary")
        with pytest.raises(errors.PeerLostError, match="device-1 cannot be reached"):
            call(method, b"", "device-1", seconds=0.2)
        over.set()
