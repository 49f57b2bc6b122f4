import threading
import time
from dataclasses import dataclass, field

import pytest
from pydantic import ValidationError

from collapipe.job import ScheduleConfig
from collapipe.traffic_shaping import pacing
from collapipe.traffic_shaping.pacing import PacedLink, PacedShaper, Traffic

MEBIBYTE = 1 << 20


@dataclass
class FakeClock:
    """A clock whose time passes only in `sleep`, which takes `overshoot` longer than it should."""

    now: float = 1000.0
    overshoot: float = 0.0
    slept: list[float] = field(default_factory=list)

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.now += seconds + self.overshoot


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def link(clock: FakeClock) -> PacedLink:
    return PacedLink(clock, clock.sleep)


def send(link: PacedLink, rate_bps: float, num_bytes: int) -> None:
    """Sends one frame."""
    size = link.quantum_bytes(rate_bps, MEBIBYTE)
    with link.burst(Traffic.ACTIVATIONS) as wait:
        for start in range(0, num_bytes, size):
            wait(min(size, num_bytes - start), rate_bps)


def test_frame_takes_its_bits_over_the_rate(clock: FakeClock, link: PacedLink) -> None:
    send(link, 8e6, 1_000_000)
    assert clock.now - 1000 == pytest.approx(1.0)
    assert max(clock.slept) <= 0.021  # no burst


def test_first_chunk_waits_too(clock: FakeClock, link: PacedLink) -> None:
    with link.burst(Traffic.CONTROL) as wait:
        wait(500, 8000.0)
    assert clock.slept == [pytest.approx(0.5)]


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
    with link.burst(Traffic.ACTIVATIONS) as wait:
        wait(20_000, 8e6)
        clock.now += 60.0
        delayed_until = clock.now
        for _ in range(50):
            wait(20_000, 8e6)
    assert clock.now - delayed_until == pytest.approx(0.95)


def test_link_without_a_rate_is_not_paced(clock: FakeClock, link: PacedLink) -> None:
    send(link, 0.0, 10 * MEBIBYTE)
    assert clock.slept == []


def test_rate_that_changes_holds_from_the_next_frame(clock: FakeClock, link: PacedLink) -> None:
    send(link, 8e6, 100_000)
    send(link, 2e6, 100_000)
    assert clock.now - 1000 == pytest.approx(0.1 + 0.4)
    send(link, 0.0, 100_000)
    assert clock.now - 1000 == pytest.approx(0.5)


@pytest.mark.parametrize(
    ("rate_bps", "chunk_bytes"),
    [(0.0, MEBIBYTE), (1e3, 1024), (2e7, 50_000), (1e8, 250_000), (1e12, MEBIBYTE)],
)
def test_chunks_are_small_where_the_link_is_slow(
    link: PacedLink, rate_bps: float, chunk_bytes: int
) -> None:
    assert link.quantum_bytes(rate_bps, MEBIBYTE) == chunk_bytes


def test_real_link_is_not_faster_than_its_rate() -> None:
    link = PacedShaper().open()
    started = time.monotonic()
    for _ in range(4):
        with link.burst(Traffic.ACTIVATIONS) as wait:
            wait(20_000, 8e6)
            wait(20_000, 8e6)
    assert 0.15 < time.monotonic() - started < 5.0  # 0.16 s


# --- several senders


class Sender:
    """A thread that sends chunks of 10 ms, without a pause, and counts them."""

    def __init__(self, link: PacedLink, traffic: Traffic, num_chunks: int) -> None:
        self.sent: list[float] = []
        self.thread = threading.Thread(target=self._run, args=(link, traffic, num_chunks))
        self.thread.start()

    def _run(self, link: PacedLink, traffic: Traffic, num_chunks: int) -> None:
        with link.burst(traffic) as wait:
            for _ in range(num_chunks):
                wait(10_000, 8e6)
                self.sent.append(time.monotonic())


def test_activations_take_the_whole_link_and_weights_get_what_is_left() -> None:
    link = PacedLink()
    weights = Sender(link, Traffic.WEIGHTS, 60)
    while len(weights.sent) < 5:
        time.sleep(0.001)
    before = len(weights.sent)
    activations = Sender(link, Traffic.ACTIVATIONS, 50)
    activations.thread.join()
    during = len(weights.sent) - before
    weights.thread.join()
    seconds = weights.sent[-1] - weights.sent[0]
    # The chunk that was under way, and a few for a thread that the machine held up.
    assert during <= 15
    assert seconds >= 0.9 * 0.01 * (50 + 60 - 1)  # Together, they have the rate of the link.


def test_control_message_overtakes_waiting_chunks() -> None:
    link = PacedLink()
    senders = [Sender(link, traffic, 40) for traffic in (Traffic.WEIGHTS, Traffic.ACTIVATIONS)]
    while not senders[1].sent:
        time.sleep(0.001)
    before = len(senders[1].sent)
    with link.burst(Traffic.CONTROL) as wait:
        wait(100, 8e6)
    overtaken = len(senders[1].sent) - before
    for sender in senders:
        sender.thread.join()
    assert overtaken <= 5


def test_senders_of_one_kind_take_turns() -> None:
    link = PacedLink()
    one, other = (Sender(link, Traffic.WEIGHTS, 40) for _ in range(2))
    one.thread.join()
    other.thread.join()
    assert sum(sent < one.sent[-1] for sent in other.sent) >= 20


def test_chunk_of_weights_that_waited_for_long_goes_before_activations(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(pacing, "_MAX_QUEUEING_SECONDS", 0.1)
    link = PacedLink()
    activations = Sender(link, Traffic.ACTIVATIONS, 100)
    weights = Sender(link, Traffic.WEIGHTS, 2)
    weights.thread.join()
    assert len(activations.sent) < 100
    activations.thread.join()


def test_burst_whose_sender_is_held_up_leaves_the_link_to_others() -> None:
    link = PacedLink()
    with link.burst(Traffic.ACTIVATIONS) as wait:
        wait(10_000, 8e6)
        weights = Sender(link, Traffic.WEIGHTS, 3)
        weights.thread.join(30)
        assert len(weights.sent) == 3


def test_no_job_may_have_less_silence_than_weights_wait_on_a_busy_link() -> None:
    with pytest.raises(ValidationError, match="silence_seconds"):
        ScheduleConfig(silence_seconds=pacing._MAX_QUEUEING_SECONDS)
