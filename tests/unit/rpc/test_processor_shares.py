"""A caller has a part of the processor for its questions, and others have theirs."""

import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import grpc
import pytest

from collapipe.errors import PeerLostError
from collapipe.rpc import interceptor, open_channel
from collapipe.rpc.permissions import PERMISSIONS
from collapipe.rpc.processor_shares import (
    CALL_SECONDS,
    MOST_WAITING,
    REFUSED_AFTER_SECONDS,
    SAVED_SECONDS,
    SHARE,
    Meter,
    ProcessorShares,
)

from .authorities import Authority
from .serving import ARITIES, ECHO, SECONDS, SERVICE, Served, secured

METHOD = "/some.Service/Method"


class Time:
    """A clock that goes on when somebody sleeps."""

    def __init__(self) -> None:
        self.now = 0.0

    def sleep(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def clock() -> Time:
    return Time()


@pytest.fixture
def shares(clock: Time) -> ProcessorShares:
    return ProcessorShares(lambda: clock.now, clock.sleep)


def test_caller_waits_for_its_share_when_it_has_used_what_it_saved(
    shares: ProcessorShares, clock: Time
) -> None:
    shares.used("client:me", SAVED_SECONDS)
    shares.begin("client:me", METHOD, 0.5)
    assert clock.now == 0
    shares.begin("client:other", METHOD, 0.5)
    assert clock.now == 0
    shares.begin("client:me", METHOD, 0.0)
    assert clock.now == pytest.approx(0.5 / SHARE)


def test_caller_gets_its_share_in_the_long_run(shares: ProcessorShares, clock: Time) -> None:
    used = 0.0
    while clock.now < 1000:
        shares.begin("client:me", METHOD, 0.05)
        used += 0.05
    assert used == pytest.approx(SAVED_SECONDS + 1000 * SHARE, abs=0.1)


def test_caller_with_too_long_a_wait_is_refused_and_soon_free_again(
    shares: ProcessorShares, clock: Time
) -> None:
    shares.used("client:me", 1e6)
    with pytest.raises(PeerLostError, match=r"client:me .* 10% .* in 60 s"):
        shares.begin("client:me", METHOD, 0.0)
    assert clock.now == REFUSED_AFTER_SECONDS
    clock.now = 61.0
    shares.begin("client:me", METHOD, 0.0)
    assert clock.now == 61.0


def test_few_calls_of_a_caller_wait_and_the_others_are_refused_at_once() -> None:
    """Those that wait keep threads from other callers."""
    begun, may_end = threading.Semaphore(0), threading.Event()

    def sleep(seconds: float) -> None:
        begun.release()
        assert may_end.wait(60)

    shares = ProcessorShares(lambda: 0.0, sleep)
    shares.used("client:me", SAVED_SECONDS + 0.1)
    with ThreadPoolExecutor(MOST_WAITING + 1) as executor:
        waiting = [
            executor.submit(shares.begin, "client:me", METHOD, 0.0) for _ in range(MOST_WAITING)
        ]
        for _ in waiting:
            assert begun.acquire(timeout=60)
        with pytest.raises(PeerLostError, match="more than its share"):
            shares.begin("client:me", METHOD, 0.0)
        shares.refuse("client:me", METHOD)
        other = executor.submit(shares.begin, "client:me", "/some.Service/Other", 0.0)
        assert begun.acquire(timeout=60), "another method has threads of its own"
        may_end.set()
        other.result(60)
        for each in waiting:
            each.result(60)


def test_refused_calls_count_and_come_late_when_the_caller_owes_much(
    shares: ProcessorShares, clock: Time
) -> None:
    for _ in range(int(SAVED_SECONDS / CALL_SECONDS) - 1):
        shares.refuse("client:me", METHOD)
    assert clock.now == 0
    for _ in range(2):
        shares.refuse("client:me", METHOD)
    assert clock.now >= REFUSED_AFTER_SECONDS


def test_many_callers_that_owe_nothing_are_forgotten(shares: ProcessorShares, clock: Time) -> None:
    shares.used("client:me", 100.0)
    for number in range(3000):
        shares.used(f"client:{number}", 0.001)
        clock.now += 0.1
    assert len(shares._free_at) < 1100


def compute(seconds: float) -> None:
    """Uses the processor for some seconds."""
    began = time.thread_time()
    while time.thread_time() < began + seconds:
        pass


def owed(shares: ProcessorShares) -> float:
    return SHARE * shares._free_at.get("client:me", 0.0)


def test_meter_counts_the_processor_time_of_its_thread_beyond_the_advance(
    shares: ProcessorShares,
) -> None:
    meter = Meter(shares, "client:me", advance_seconds=0.05)
    other = threading.Thread(target=compute, args=(0.1,))
    other.start()
    other.join()  # Waiting takes no processor time of this thread.
    compute(0.02)
    meter.count()
    assert owed(shares) == 0
    compute(0.05)
    meter.count()
    assert 0.02 <= owed(shares) < 0.1


def test_meter_of_a_call_that_watches_counts_its_first_seconds(shares: ProcessorShares) -> None:
    meter = Meter(shares, "client:me", 0.0, counted_seconds=0.0)
    meter.count()
    first = owed(shares)
    compute(0.02)
    meter.count()
    assert owed(shares) == first


@pytest.mark.parametrize(
    ("method", "has"),
    [
        ("SchedulerService/ReplayDecision", True),
        ("SchedulerService/WatchJob", True),
        ("SchedulerService/SubmitJob", True),
        ("SchedulerService/RegisterHost", True),
        ("LinkService/ReceiveProbe", True),
        ("SchedulerService/Heartbeat", False),
        ("SchedulerService/UseModel", False),
        ("StageService/RunStage", False),
        ("EdgeServerService/PushUnit", False),
        ("ControlUnitService/RunRound", False),
        ("BlobService/FetchBlob", False),
    ],
)
def test_questions_have_a_share_and_the_work_for_a_job_has_none(method: str, has: bool) -> None:
    service, name = method.split("/")
    assert name in PERMISSIONS[f"collapipe.v1.{service}"]
    assert interceptor.has_share(f"/collapipe.v1.{method}") is has


@pytest.mark.parametrize("arity", ARITIES)
def test_caller_that_owes_too_much_is_refused_and_others_are_served(
    authority: Authority, monkeypatch: pytest.MonkeyPatch, arity: str
) -> None:
    shares = ProcessorShares(sleep=lambda seconds: None)
    monkeypatch.setattr(interceptor, "ProcessorShares", lambda: shares)
    monkeypatch.setattr(interceptor, "has_share", lambda method: True)
    with secured(authority, ECHO, "client:me") as served:
        assert served.call(arity, b"x")
        assert shares._free_at.keys() == {"client:me"}
        shares.used("client:me", 100.0)
        error = served.failure(arity)
        assert error.code() is grpc.StatusCode.UNAVAILABLE
        assert "more than its share" in error.details()
        with open_channel(served.server.address, authority.security("client:other")) as channel:
            assert Served(served.server, channel).call(arity, b"x")


def test_stream_counts_what_each_answer_uses(
    authority: Authority, monkeypatch: pytest.MonkeyPatch
) -> None:
    shares = ProcessorShares(lambda: 0.0, lambda seconds: None)
    monkeypatch.setattr(interceptor, "ProcessorShares", lambda: shares)
    monkeypatch.setattr(interceptor, "has_share", lambda method: True)

    def answers(request: bytes, context: grpc.ServicerContext) -> Iterator[bytes]:
        for _ in range(3):
            compute(0.02)
            yield request

    with secured(authority, {"unary_stream": answers}, "client:me") as served:
        stream = served.method("unary_stream")(b"x", timeout=SECONDS)
        first = [next(stream), next(stream)]
        used = owed(shares)
        stream.cancel()
    assert first == [b"x", b"x"]
    assert used > 0.015


def test_calls_that_are_refused_count_although_those_of_a_job_do_not(
    authority: Authority, monkeypatch: pytest.MonkeyPatch
) -> None:
    shares = ProcessorShares(sleep=lambda seconds: None)
    monkeypatch.setattr(interceptor, "ProcessorShares", lambda: shares)
    with secured(authority, ECHO, "client:me") as served:
        assert served.call("unary_unary", b"x") == [b"x"]
    assert shares._free_at == {}
    with secured(authority, ECHO, "client:me", permissions={SERVICE: {}}) as served:
        shares.used("client:me", 100.0)
        assert "may not call" in served.refusal(), "who owes much is still told what is wrong"
    assert list(shares._free_at) == ["client:me"]
