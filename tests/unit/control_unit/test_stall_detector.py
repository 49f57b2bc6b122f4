"""When a pipeline counts as stalled."""

import pytest

from collapipe.control_unit import stall_detector
from collapipe.control_unit.stall_detector import StallDetector

WAITING = "device-0-0 waits to get the forward frame of micro-batch 0"


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(stall_detector, "time", clock)
    return clock


def test_pipeline_is_stalled_after_a_silence_without_any_change(clock: Clock) -> None:
    detector = StallDetector(silence_seconds=5.0)
    assert not detector.is_stalled(WAITING, 10)
    clock.now += 5.0
    assert not detector.is_stalled(WAITING, 10)
    clock.now += 0.1
    assert detector.is_stalled(WAITING, 10)


@pytest.mark.parametrize(
    ("waiting_for", "received_bytes"),
    [("", 10), (WAITING, 11), ("device-0-0 waits to get the backward frame of micro-batch 0", 10)],
    ids=["computing", "bytes arrive", "another wait"],
)
def test_any_change_restarts_the_silence(
    clock: Clock, waiting_for: str, received_bytes: int
) -> None:
    detector = StallDetector(silence_seconds=5.0)
    detector.is_stalled(WAITING, 10)
    clock.now += 4.0
    detector.is_stalled(waiting_for, received_bytes)
    clock.now += 4.0
    assert not detector.is_stalled(waiting_for, received_bytes)


def test_pipeline_that_computes_is_never_stalled(clock: Clock) -> None:
    detector = StallDetector(silence_seconds=5.0)
    for _ in range(3):
        clock.now += 100.0
        assert not detector.is_stalled("", 0)
