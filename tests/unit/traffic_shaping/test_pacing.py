import time
from dataclasses import dataclass, field

import pytest

from collapipe.traffic_shaping.pacing import PacedLink, PacedShaper

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
    link.begin(rate_bps)
    size = link.chunk_bytes(rate_bps, MEBIBYTE)
    for start in range(0, num_bytes, size):
        link.wait(min(size, num_bytes - start))


def test_frame_takes_its_bits_over_the_rate(clock: FakeClock, link: PacedLink) -> None:
    send(link, 8e6, 1_000_000)
    assert clock.now - 1000 == pytest.approx(1.0)
    assert max(clock.slept) <= 0.021  # no burst


def test_first_chunk_waits_too(clock: FakeClock, link: PacedLink) -> None:
    link.begin(8000.0)
    link.wait(500)
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
    link.begin(8e6)
    link.wait(20_000)
    clock.now += 60.0
    delayed_until = clock.now
    for _ in range(50):
        link.wait(20_000)
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
    assert link.chunk_bytes(rate_bps, MEBIBYTE) == chunk_bytes


def test_real_link_is_not_faster_than_its_rate() -> None:
    link = PacedShaper().open("127.0.0.1:1")
    started = time.monotonic()
    for _ in range(4):
        link.begin(8e6)
        link.wait(20_000)
        link.wait(20_000)
    assert 0.15 < time.monotonic() - started < 5.0  # 0.16 s
