"""When a pipeline counts as stalled."""

import pytest

from collapipe.control_unit import stall_detector
from collapipe.control_unit.stall_detector import OvertimeDetector, StallDetector

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


def test_stage_may_compute_ten_times_as_long_as_the_longest_step(clock: Clock) -> None:
    detector = OvertimeDetector(silence_seconds=5.0)
    detector.step_began()
    for seconds in (8.0, 20.0, 3.0):
        clock.now += seconds
        assert not detector.is_over(["device-0-0"], 0)
        detector.step_ended()
    assert detector.limit_seconds == 200.0
    clock.now += 200.0
    assert not detector.is_over(["device-0-0"], 0)
    clock.now += 0.1
    assert detector.is_over(["device-0-0"], 0)


def test_first_step_may_take_long(clock: Clock) -> None:
    detector = OvertimeDetector(silence_seconds=5.0)
    detector.step_began()
    clock.now += 3600.0
    assert not detector.is_over(["device-0-0"], 0)
    clock.now += 0.1
    assert detector.is_over(["device-0-0"], 0)


def test_first_step_may_take_thirty_times_as_long_as_predicted(clock: Clock) -> None:
    detector = OvertimeDetector(silence_seconds=5.0, predicted_seconds=4.0)
    detector.step_began()
    assert detector.limit_seconds == 120.0
    clock.now += 40.0
    assert not detector.is_slow
    clock.now += 0.1
    assert detector.is_slow
    clock.now += 80.0
    assert detector.is_over(["device-0-0"], 0)


def test_stage_is_not_slow_before_the_first_step(clock: Clock) -> None:
    detector = OvertimeDetector(silence_seconds=5.0, predicted_seconds=4.0)
    clock.now += 1e6
    assert not detector.is_slow
    assert detector.seconds == 0.0


def test_quick_steps_leave_at_least_six_silences(clock: Clock) -> None:
    detector = OvertimeDetector(silence_seconds=5.0)
    detector.step_began()
    detector.step_ended()
    assert detector.limit_seconds == 30.0


@pytest.mark.parametrize(
    ("computing", "received_bytes"), [([], 0), (["device-0-0"], 7)], ids=["waiting", "bytes arrive"]
)
def test_computing_counts_anew_after_progress(
    clock: Clock, computing: list[str], received_bytes: int
) -> None:
    detector = OvertimeDetector(silence_seconds=5.0)
    detector.step_began()
    detector.step_ended()
    clock.now += 29.0
    assert not detector.is_over(computing, received_bytes)
    clock.now += 29.0
    assert not detector.is_over(["device-0-0"], received_bytes)
    clock.now += 1.1
    assert detector.is_over(["device-0-0"], received_bytes)


def test_evaluation_before_the_first_step_may_take_any_time(clock: Clock) -> None:
    detector = OvertimeDetector(silence_seconds=5.0)
    clock.now += 1e6
    assert not detector.is_over(["control-unit-0"], 0)
    detector.step_began()
    assert not detector.is_over(["control-unit-0"], 0)
