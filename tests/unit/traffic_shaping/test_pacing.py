import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
from pydantic import ValidationError

from collapipe.job import ScheduleConfig
from collapipe.traffic_shaping import pacing
from collapipe.traffic_shaping.pacing import PacedLink, PacedShaper, Traffic

MEBIBYTE = 1 << 20
CONTROL, ACTIVATIONS, WEIGHTS = Traffic.CONTROL, Traffic.ACTIVATIONS, Traffic.WEIGHTS


@dataclass
class FakeClock:
    """A clock whose time passes only in `sleep`, which takes `overshoot` longer than it should."""

    now: float = 1000.0
    overshoot: float = 0.0
    slept: list[float] = field(default_factory=list)
    meanwhile: Callable[[], None] | None = None
    """Called during the next sleep."""
    threads: set[int] = field(default_factory=set)
    """The threads that have looked at the clock."""
    _looked: threading.Condition = field(default_factory=threading.Condition)

    def __call__(self) -> float:
        with self._looked:
            self.threads.add(threading.get_ident())
            self._looked.notify_all()
        return self.now

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.now += seconds + self.overshoot
        meanwhile, self.meanwhile = self.meanwhile, None
        if meanwhile:
            meanwhile()

    def wait_for(self, thread: threading.Thread) -> None:
        with self._looked:
            assert self._looked.wait_for(lambda: thread.ident in self.threads, 60)


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def link(clock: FakeClock) -> PacedLink:
    return PacedLink(clock, clock.sleep)


def send(link: PacedLink, rate_bps: float, num_bytes: int) -> None:
    """Sends one frame."""
    size = link.quantum_bytes(rate_bps, MEBIBYTE)
    with link.burst(ACTIVATIONS) as wait:
        for start in range(0, num_bytes, size):
            wait(min(size, num_bytes - start), rate_bps)


def test_frame_takes_its_bits_over_the_rate(clock: FakeClock, link: PacedLink) -> None:
    send(link, 8e6, 1_000_000)
    assert clock.now - 1000 == pytest.approx(1.0)
    assert max(clock.slept) <= 0.021  # no burst


def test_sleeps_that_take_too_long_do_not_add_up(clock: FakeClock, link: PacedLink) -> None:
    clock.overshoot = 0.003
    for _ in range(10):
        send(link, 8e6, 100_000)
    assert clock.now - 1000 == pytest.approx(1.0, abs=0.004)


@pytest.mark.parametrize("gap", [0.001, 5.0])
def test_pause_between_frames_is_not_caught_up(
    clock: FakeClock, link: PacedLink, gap: float
) -> None:
    send(link, 8e6, 100_000)
    clock.now += gap
    send(link, 8e6, 100_000)
    assert clock.now - 1000 == pytest.approx(0.2 + gap)


def test_next_frame_catches_up_the_lateness_of_the_last_chunk(
    clock: FakeClock, link: PacedLink
) -> None:
    clock.overshoot = 0.01
    send(link, 8e6, 20_000)
    clock.overshoot = 0.0
    clock.now += 5.0
    send(link, 8e6, 20_000)
    assert clock.slept == [pytest.approx(0.02), pytest.approx(0.01)]


def test_delayed_sender_sends_only_a_short_burst(clock: FakeClock, link: PacedLink) -> None:
    with link.burst(ACTIVATIONS) as wait:
        wait(20_000, 8e6)
        clock.now += 60.0
        delayed_until = clock.now
        for _ in range(50):
            wait(20_000, 8e6)
    assert clock.now - delayed_until == pytest.approx(0.95)


def test_rate_that_changes_holds_from_the_next_frame(clock: FakeClock, link: PacedLink) -> None:
    send(link, 8e6, 100_000)
    send(link, 2e6, 100_000)
    assert clock.now - 1000 == pytest.approx(0.1 + 0.4)
    num_sleeps = len(clock.slept)
    send(link, 0.0, 10 * MEBIBYTE)
    assert len(clock.slept) == num_sleeps


@pytest.mark.parametrize(
    ("rate_bps", "chunk_bytes"),
    [(0.0, MEBIBYTE), (1e3, 1024), (2e7, 50_000), (1e8, 250_000), (1e12, MEBIBYTE)],
)
def test_chunks_are_small_where_the_link_is_slow(
    link: PacedLink, rate_bps: float, chunk_bytes: int
) -> None:
    assert link.quantum_bytes(rate_bps, MEBIBYTE) == chunk_bytes


def test_real_link_is_not_faster_than_its_rate() -> None:
    started = time.monotonic()
    with PacedShaper().open().burst(ACTIVATIONS) as wait:
        wait(20_000, 8e6)
    assert time.monotonic() - started >= 0.02


# --- several senders


class Senders:
    """Threads that each send chunks of 10 ms without a pause."""

    def __init__(self, clock: FakeClock, link: PacedLink) -> None:
        self.sent: list[Traffic] = []
        self._clock = clock
        self._link = link
        self._threads: list[threading.Thread] = []

    def start(self, traffic: Traffic, num_chunks: int) -> None:
        """Starts a thread, and waits until its first chunk is queued."""
        thread = threading.Thread(target=self.send, args=(traffic, num_chunks), daemon=True)
        thread.start()
        self._clock.wait_for(thread)
        self._threads.append(thread)

    def send(self, traffic: Traffic, num_chunks: int) -> None:
        with self._link.burst(traffic) as wait:
            for _ in range(num_chunks):
                wait(10_000, 8e6)
                self.sent.append(traffic)

    def join(self) -> list[Traffic]:
        """Returns the chunks in the order in which they were sent."""
        for thread in self._threads:
            thread.join(60)
        return self.sent


@pytest.fixture
def senders(clock: FakeClock, link: PacedLink) -> Senders:
    return Senders(clock, link)


def test_traffic_that_goes_first_takes_the_whole_link(clock: FakeClock, senders: Senders) -> None:
    def join_in() -> None:
        for traffic in (WEIGHTS, ACTIVATIONS, CONTROL):
            senders.start(traffic, 3)

    clock.meanwhile = join_in
    senders.send(WEIGHTS, 1)
    assert senders.join() == [WEIGHTS, *[CONTROL] * 3, *[ACTIVATIONS] * 3, *[WEIGHTS] * 3]
    assert clock.now - 1000 == pytest.approx(10 * 0.01)  # Together, they have the rate of the link.


@pytest.mark.parametrize(
    ("waited_seconds", "order"),
    [(0.0, [ACTIVATIONS, ACTIVATIONS, WEIGHTS]), (5.0, [ACTIVATIONS, WEIGHTS, ACTIVATIONS])],
)
def test_chunk_of_weights_that_waited_for_long_goes_before_activations(
    clock: FakeClock, senders: Senders, waited_seconds: float, order: list[Traffic]
) -> None:
    def join_in() -> None:
        senders.start(WEIGHTS, 1)
        clock.now += waited_seconds

    clock.meanwhile = join_in
    senders.send(ACTIVATIONS, 2)
    assert senders.join() == order


def test_senders_of_one_kind_take_turns(
    clock: FakeClock, link: PacedLink, senders: Senders
) -> None:
    clock.meanwhile = lambda: senders.start(WEIGHTS, 1)
    with link.burst(WEIGHTS) as wait:
        wait(10_000, 8e6)
        wait(10_000, 8e6)
        assert senders.sent == [WEIGHTS]


def test_burst_whose_sender_is_held_up_leaves_the_link_to_others(
    clock: FakeClock, link: PacedLink, senders: Senders
) -> None:
    clock.meanwhile = lambda: senders.start(WEIGHTS, 1)
    with link.burst(ACTIVATIONS) as wait:
        wait(10_000, 8e6)
        clock.now += 0.06
        assert senders.join() == [WEIGHTS]


def test_no_job_may_have_less_silence_than_weights_wait_on_a_busy_link() -> None:
    with pytest.raises(ValidationError, match="silence_seconds"):
        ScheduleConfig(silence_seconds=pacing._MAX_QUEUEING_SECONDS)
