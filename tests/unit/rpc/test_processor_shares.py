"""A caller has a part of the processor for its questions, and others have theirs."""

import time

import grpc
import pytest

from collapipe.errors import PeerLostError
from collapipe.rpc import interceptor, open_channel
from collapipe.rpc.processor_shares import (
    LONGEST_WAIT_SECONDS,
    SAVED_SECONDS,
    SHARE,
    Meter,
    ProcessorShares,
)

from .authorities import Authority
from .serving import ECHO, SERVICE, Served, secured


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
    shares.wait("client:me")
    assert clock.now == 0
    shares.used("client:me", 0.5)
    shares.wait("client:other")
    assert clock.now == 0
    shares.wait("client:me")
    assert clock.now == pytest.approx(0.5 / SHARE)


def test_caller_gets_its_share_in_the_long_run(shares: ProcessorShares, clock: Time) -> None:
    used = 0.0
    while clock.now < 1000:
        shares.wait("client:me")
        shares.used("client:me", 0.05)
        used += 0.05
    assert used == pytest.approx(SAVED_SECONDS + 1000 * SHARE, abs=0.1)


def test_caller_with_too_long_a_wait_is_refused_and_soon_free_again(
    shares: ProcessorShares, clock: Time
) -> None:
    shares.used("client:me", 1e6)
    with pytest.raises(PeerLostError, match=r"client:me .* 10% .* in 60 s"):
        shares.wait("client:me")
    clock.now = 6 * LONGEST_WAIT_SECONDS
    shares.wait("client:me")
    assert clock.now == pytest.approx(6 * LONGEST_WAIT_SECONDS)


def test_many_callers_that_owe_nothing_are_forgotten(shares: ProcessorShares, clock: Time) -> None:
    shares.used("client:me", 100.0)
    for number in range(3000):
        shares.used(f"client:{number}", 0.001)
        clock.now += 0.1
    assert len(shares._free_at) < 1100


def test_meter_counts_the_processor_time_of_its_thread(
    shares: ProcessorShares, clock: Time
) -> None:
    meter = Meter(shares, "client:me", call_seconds=0.0)
    time.sleep(0.1)  # Waiting takes no processor time.
    meter.count()
    waiting = shares._free_at["client:me"]
    assert waiting < 0.1 / SHARE
    began = time.thread_time()
    while time.thread_time() < began + 0.02:
        pass
    meter.count()
    assert shares._free_at["client:me"] - waiting >= 0.02 / SHARE


def test_caller_that_owes_too_much_is_refused_and_others_are_served(
    authority: Authority, monkeypatch: pytest.MonkeyPatch
) -> None:
    shares = ProcessorShares(sleep=lambda seconds: None)
    monkeypatch.setattr(interceptor, "ProcessorShares", lambda: shares)
    monkeypatch.setattr(interceptor, "_has_share", lambda method: True)
    with secured(authority, ECHO, "client:me") as served:
        assert served.call("unary_unary", b"x") == [b"x"]
        shares.used("client:me", 100.0)
        error = served.failure("unary_unary")
        assert error.code() is grpc.StatusCode.UNAVAILABLE
        assert "more than its share" in error.details()
        with open_channel(served.server.address, authority.security("client:other")) as channel:
            assert Served(served.server, channel).call("unary_unary", b"x") == [b"x"]


def test_refused_calls_count_and_those_of_a_job_do_not(
    authority: Authority, monkeypatch: pytest.MonkeyPatch
) -> None:
    shares = ProcessorShares(sleep=lambda seconds: None)
    monkeypatch.setattr(interceptor, "ProcessorShares", lambda: shares)
    with secured(authority, ECHO, "client:me") as served:
        assert served.call("unary_unary", b"x") == [b"x"]
    assert shares._free_at == {}
    with secured(authority, ECHO, "client:me", permissions={SERVICE: {}}) as served:
        assert "may not call" in served.refusal()
    assert list(shares._free_at) == ["client:me"]
