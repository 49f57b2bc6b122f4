import threading
from collections.abc import Callable, Iterator
from typing import Any

import grpc
import pytest

from collapipe.errors import CancelledError, CorruptDataError, PeerLostError
from collapipe.rpc import Outbox, streams, within_silence, work_with_signs_of_life

from .serving import SERVICE, Served, raising, serving

Emit = Callable[[bytes], None]

# --- an outbox


def test_outbox_yields_the_items_before_its_end() -> None:
    outbox: Outbox[int] = Outbox()
    for item in (0, 1):
        outbox.put(item)
    outbox.close()
    outbox.put(2)
    assert list(outbox) == [0, 1]


def test_outbox_waits_for_the_next_item() -> None:
    outbox: Outbox[int] = Outbox()
    taken: list[int] = []
    arrived = threading.Event()

    def take() -> None:
        for item in outbox:
            taken.append(item)
            arrived.set()

    taker = threading.Thread(target=take, daemon=True)
    taker.start()
    assert not arrived.wait(0.05)
    outbox.put(7)
    assert arrived.wait(10)
    outbox.close()
    taker.join(10)
    assert not taker.is_alive()
    assert taken == [7]


# --- the caller


def stream_of(served: Served, **options: Any) -> Any:
    return served.channel.unary_stream(f"/{SERVICE}/unary_stream")(b"ask", **options)


def read(call: Any, silence_seconds: float = 20.0) -> Iterator[bytes]:
    return within_silence(call, silence_seconds, "device-1", lambda: "run step 4")


def test_answers_come_in_order_and_the_stream_ends() -> None:
    def answer(request: bytes, context: grpc.ServicerContext) -> Iterator[bytes]:
        yield from [b"1", b"2", b"3"]

    with serving({"unary_stream": answer}) as served:
        assert list(read(stream_of(served))) == [b"1", b"2", b"3"]


def test_silent_peer_is_lost_and_the_error_names_its_task() -> None:
    over, left = threading.Event(), threading.Event()

    def silent(request: bytes, context: grpc.ServicerContext) -> Iterator[bytes]:
        context.add_callback(left.set)
        yield b"first"
        over.wait(20)

    with serving({"unary_stream": silent}) as served:
        answers = read(stream_of(served), silence_seconds=0.2)
        assert next(answers) == b"first"
        with pytest.raises(PeerLostError) as raised:
            next(answers)
        assert left.wait(20), "the call was not cancelled"
        over.set()
    assert raised.value.host_id == "device-1"
    assert str(raised.value).startswith(
        "device-1 has sent no sign of life for 0.2 s while it should run step 4"
    )


def test_peer_that_refuses_connections_is_lost_long_before_the_silence() -> None:
    over = threading.Event()

    def silent(request: bytes, context: grpc.ServicerContext) -> Iterator[bytes]:
        over.wait(20)
        yield b"late"

    reasons = iter(["", "", "it refuses connections"])
    with serving({"unary_stream": silent}) as served:
        answers = within_silence(
            stream_of(served),
            3600.0,
            "device-1",
            lambda: "run step 4",
            lambda: next(reasons),
            refused_seconds=0.1,
        )
        with pytest.raises(PeerLostError, match="^it refuses connections$"):
            next(answers)
        over.set()


def test_slow_peer_that_sends_messages_is_not_lost() -> None:
    pause = threading.Event()

    def slow(request: bytes, context: grpc.ServicerContext) -> Iterator[bytes]:
        for _ in range(10):
            pause.wait(0.15)
            yield b"alive"

    with serving({"unary_stream": slow}) as served:
        answers = list(read(stream_of(served), silence_seconds=1.2))
    assert len(answers) == 10  # They take 1.5 seconds.


def test_error_of_the_peer_is_raised_after_its_answers() -> None:
    with serving(raising(CorruptDataError("garbled"), after=2)) as served:
        answers = read(stream_of(served))
        assert [next(answers), next(answers)] == [b"answer"] * 2
        with pytest.raises(CorruptDataError, match="garbled"):
            next(answers)


def test_peer_that_ends_is_lost() -> None:
    over = threading.Event()

    def wait(request: bytes, context: grpc.ServicerContext) -> Iterator[bytes]:
        yield b"first"
        over.wait(20)

    with serving({"unary_stream": wait}) as served:
        answers = read(stream_of(served))
        next(answers)
        ending = threading.Thread(target=served.server.drain, args=(0,))
        ending.start()
        with pytest.raises(PeerLostError, match="device-1 cannot be reached"):
            next(answers)
        over.set()
        ending.join(20)


def test_call_is_cancelled_when_the_caller_stops_reading() -> None:
    left = threading.Event()

    def endless(request: bytes, context: grpc.ServicerContext) -> Iterator[bytes]:
        context.add_callback(left.set)
        while not left.wait(0.01):
            yield b"more"

    with serving({"unary_stream": endless}) as served:
        answers = read(stream_of(served))
        next(answers)
        answers.close()  # type: ignore[attr-defined]
        assert left.wait(20)


# --- the server


class Worker:
    """Serves a stream from work. Records cancellations, and whether the work ended before the call."""

    def __init__(self, work: Callable[[Emit], None]) -> None:
        self._work = work
        self.stop = threading.Event()
        self.cancelled: list[CancelledError] = []
        self.work_ended = threading.Event()
        self.call_ended = threading.Event()
        self.joined = False

    def serve(self, request: bytes, context: grpc.ServicerContext) -> Iterator[bytes]:
        try:
            yield from work_with_signs_of_life(self._run, lambda: b"alive", self._cancel, context)
        finally:
            self.joined = self.work_ended.is_set()
            self.call_ended.set()

    def _run(self, emit: Emit) -> None:
        try:
            self._work(emit)
        finally:
            self.work_ended.set()

    def _cancel(self, reason: CancelledError) -> None:
        self.cancelled.append(reason)
        self.stop.set()


@pytest.fixture(autouse=True)
def _frequent_signs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streams, "SIGN_OF_LIFE_SECONDS", 0.02)


def test_messages_of_work_arrive_in_order_without_a_cancellation() -> None:
    def send_three(emit: Emit) -> None:
        for message in (b"1", b"2", b"3"):
            emit(message)

    worker = Worker(send_three)
    with serving({"unary_stream": worker.serve}) as served:
        for _ in range(20):
            answers = [answer for answer in stream_of(served, timeout=20) if answer != b"alive"]
            assert answers == [b"1", b"2", b"3"]
    assert worker.cancelled == []


def test_silent_work_gives_signs_of_life() -> None:
    go_on = threading.Event()

    def silent(emit: Emit) -> None:
        assert go_on.wait(20)
        emit(b"done")

    worker = Worker(silent)
    with serving({"unary_stream": worker.serve}) as served:
        answers = stream_of(served, timeout=20)
        assert [next(answers) for _ in range(3)] == [b"alive"] * 3
        go_on.set()
        rest = list(answers)
    assert rest[-1] == b"done"


def test_error_of_work_arrives_after_its_messages() -> None:
    def fail(emit: Emit) -> None:
        emit(b"first")
        raise CorruptDataError("garbled")

    worker = Worker(fail)
    with serving({"unary_stream": worker.serve}) as served:
        answers = read(stream_of(served, timeout=20))
        assert next(answers) == b"first"
        with pytest.raises(CorruptDataError, match="garbled"):
            next(answers)
    assert worker.cancelled == []


def test_caller_that_goes_away_cancels_the_work_once_and_the_call_waits_for_its_end() -> None:
    slow_end = threading.Event()

    def work(emit: Emit) -> None:
        emit(b"begun")
        assert worker.stop.wait(20)
        slow_end.wait(0.2)

    worker = Worker(work)
    with serving({"unary_stream": worker.serve}) as served:
        answers = stream_of(served, timeout=20)
        next(answers)
        answers.cancel()
        assert worker.call_ended.wait(20)
    assert worker.joined, "the call ended before its work"
    assert len(worker.cancelled) == 1
    assert "went away" in str(worker.cancelled[0])


def test_caller_that_goes_away_cancels_work_that_sends_without_a_pause() -> None:
    def flood(emit: Emit) -> None:
        while not worker.stop.wait(0.001):
            emit(b"more")

    worker = Worker(flood)
    with serving({"unary_stream": worker.serve}) as served:
        answers = stream_of(served, timeout=20)
        next(answers)
        answers.cancel()
        assert worker.call_ended.wait(20)
    assert worker.joined
    assert len(worker.cancelled) == 1
