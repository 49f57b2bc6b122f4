import itertools
import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import grpc
import pytest

from collapipe.errors import CancelledError, CorruptDataError, PeerLostError
from collapipe.rpc import Outbox, streams, within_silence, work_with_signs_of_life

from .serving import SECONDS, Served, raising, serving

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
    taker = threading.Thread(target=lambda: taken.extend(outbox), daemon=True)
    taker.start()
    outbox.put(7)
    outbox.close()
    taker.join(SECONDS)
    assert taken == [7]


# --- the caller


def stream_of(served: Served) -> Any:
    return served.method("unary_stream")(b"ask", timeout=SECONDS)


def read(call: Any, silence_seconds: float = SECONDS, **options: Any) -> Iterator[bytes]:
    return within_silence(call, silence_seconds, "device-1", lambda: "run step 4", **options)


def test_answers_come_in_order_and_the_stream_ends() -> None:
    def answer(request: bytes, context: grpc.ServicerContext) -> Iterator[bytes]:
        yield from [b"1", b"2", b"3"]

    with serving({"unary_stream": answer}) as served:
        assert list(read(stream_of(served))) == [b"1", b"2", b"3"]


@pytest.fixture
def silent() -> Iterator[Any]:
    """The method of a server that answers once."""
    left = threading.Event()

    def answer(request: bytes, context: grpc.ServicerContext) -> Iterator[bytes]:
        context.add_callback(left.set)
        yield b"first"
        left.wait(SECONDS)

    with serving({"unary_stream": answer}) as served:
        yield served
        assert left.wait(SECONDS), "the call was not cancelled"


def set_times(monkeypatch: pytest.MonkeyPatch, times: Iterator[float]) -> None:
    monkeypatch.setattr(streams, "time", SimpleNamespace(monotonic=lambda: next(times)))


def test_silent_peer_is_lost_and_the_error_names_its_task(
    silent: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The reader looks at the clock when it begins to wait, and again for how long it may wait.
    set_times(monkeypatch, iter([0.0, 0.0, 5.0, 5.0 + SECONDS]))
    answers = read(stream_of(silent))
    assert next(answers) == b"first"
    with pytest.raises(PeerLostError, match="device-1 .* 60 s .* run step 4") as raised:
        next(answers)
    assert raised.value.host_id == "device-1"


def test_slow_peer_that_sends_messages_is_not_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    looked = threading.Semaphore(0)

    def times() -> Iterator[float]:
        for time in itertools.count(step=10.0):
            yield time
            looked.release()
            yield time

    class Slow:
        """Answers only when the reader has begun to wait."""

        def __iter__(self) -> Iterator[bytes]:
            for _ in range(10):
                assert looked.acquire(timeout=SECONDS)
                yield b"alive"

        def cancel(self) -> None:
            pass

    set_times(monkeypatch, times())
    assert len(list(read(Slow()))) == 10


def test_peer_that_refuses_connections_is_lost_long_before_the_silence() -> None:
    over = threading.Event()

    def mute(request: bytes, context: grpc.ServicerContext) -> Iterator[bytes]:
        over.wait(SECONDS)
        yield b"late"

    reasons = iter(["", "", "it refuses connections"])
    with serving({"unary_stream": mute}) as served:
        options = {"why_unreachable": lambda: next(reasons), "refused_seconds": 0.01}
        with pytest.raises(PeerLostError, match="^it refuses connections$"):
            next(read(stream_of(served), 3600.0, **options))
        over.set()


def test_error_of_the_peer_is_raised_after_its_answers() -> None:
    with serving(raising(CorruptDataError("garbled"), after=2)) as served:
        answers = read(stream_of(served))
        assert [next(answers), next(answers)] == [b"answer"] * 2
        with pytest.raises(CorruptDataError, match="garbled"):
            next(answers)


def test_peer_that_ends_is_lost(silent: Served) -> None:
    answers = read(stream_of(silent))
    next(answers)
    silent.server.drain(0)
    with pytest.raises(PeerLostError, match="device-1"):
        next(answers)


def test_call_is_cancelled_when_the_caller_stops_reading(silent: Served) -> None:
    answers = read(stream_of(silent))
    next(answers)
    answers.close()  # type: ignore[attr-defined]


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
        for _ in range(5):
            answers = [answer for answer in stream_of(served) if answer != b"alive"]
            assert answers == [b"1", b"2", b"3"]
    assert worker.cancelled == []


def test_silent_work_gives_signs_of_life() -> None:
    go_on = threading.Event()

    def silent(emit: Emit) -> None:
        assert go_on.wait(SECONDS)
        emit(b"done")

    worker = Worker(silent)
    with serving({"unary_stream": worker.serve}) as served:
        answers = stream_of(served)
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
        answers = read(stream_of(served))
        assert next(answers) == b"first"
        with pytest.raises(CorruptDataError, match="garbled"):
            next(answers)
    assert worker.cancelled == []


@pytest.mark.parametrize("pauses", [True, False])
def test_caller_that_goes_away_cancels_the_work_once_and_the_call_waits_for_its_end(
    pauses: bool,
) -> None:
    def work(emit: Emit) -> None:
        emit(b"begun")
        while not worker.stop.wait(SECONDS if pauses else 0.001):
            emit(b"more")
        threading.Event().wait(0.05)  # The call could end before, if it did not wait.

    worker = Worker(work)
    with serving({"unary_stream": worker.serve}) as served:
        answers = stream_of(served)
        next(answers)
        answers.cancel()
        assert worker.call_ended.wait(SECONDS)
    assert worker.joined, "the call ended before its work"
    assert len(worker.cancelled) == 1
