"""When a pipeline counts as stalled."""

from types import SimpleNamespace

import pytest

from collapipe.control_unit import stall_detector
from collapipe.control_unit.stall_detector import OvertimeDetector, StallDetector

WAITING = "device-0-0 waits to get the forward frame of micro-batch 0"
HOSTS = ["device-0-0"]


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    clock = SimpleNamespace(now=100.0, monotonic=lambda: clock.now)
    monkeypatch.setattr(stall_detector, "time", clock)
    return clock


def test_pipeline_is_stalled_after_a_silence_without_any_change(clock: SimpleNamespace) -> None:
    detector = StallDetector(silence_seconds=5.0)
    for seconds, is_stalled in ((0.0, False), (5.0, False), (0.1, True)):
        clock.now += seconds
        assert detector.is_stalled(WAITING, 10) == is_stalled


@pytest.mark.parametrize(
    ("waiting_for", "received_bytes"),
    [(WAITING, 11), ("device-0-0 waits to get the backward frame of micro-batch 0", 10)],
    ids=["bytes arrive", "another wait"],
)
def test_any_change_restarts_the_silence(
    clock: SimpleNamespace, waiting_for: str, received_bytes: int
) -> None:
    detector = StallDetector(silence_seconds=5.0)
    for report in ((WAITING, 10), (waiting_for, received_bytes), (waiting_for, received_bytes)):
        clock.now += 4.0
        assert not detector.is_stalled(*report)


def test_pipeline_that_computes_is_never_stalled(clock: SimpleNamespace) -> None:
    detector = StallDetector(silence_seconds=5.0)
    for _ in range(3):
        clock.now += 100.0
        assert not detector.is_stalled("", 0)


@pytest.fixture
def overtime(clock: SimpleNamespace) -> OvertimeDetector:
    detector = OvertimeDetector(silence_seconds=5.0)
    detector.step_began()
    return detector


def test_stage_may_compute_ten_times_as_long_as_the_longest_step(
    clock: SimpleNamespace, overtime: OvertimeDetector
) -> None:
    for seconds in (8.0, 20.0, 3.0):
        clock.now += seconds
        assert not overtime.is_over(HOSTS, 0)
        overtime.step_ended()
    assert overtime.limit_seconds == 200.0
    clock.now += 200.0
    assert not overtime.is_over(HOSTS, 0)
    clock.now += 0.1
    assert overtime.is_over(HOSTS, 0)


@pytest.mark.parametrize(("predicted_seconds", "limit_seconds"), [(0.0, 3600.0), (4.0, 120.0)])
def test_first_step_may_take_an_hour_or_thirty_times_as_long_as_predicted(
    clock: SimpleNamespace, predicted_seconds: float, limit_seconds: float
) -> None:
    detector = OvertimeDetector(5.0, predicted_seconds)
    detector.step_began()
    assert detector.limit_seconds == limit_seconds
    for seconds, is_slow, is_over in (
        (limit_seconds / 3, False, False),
        (0.1, True, False),
        (limit_seconds * 2 / 3 - 0.1, True, False),
        (0.1, True, True),
    ):
        clock.now += seconds
        assert detector.is_slow == is_slow
        assert detector.is_over(HOSTS, 0) == is_over


@pytest.mark.parametrize(
    ("computing", "received_bytes"), [([], 0), (HOSTS, 7)], ids=["waiting", "bytes arrive"]
)
def test_computing_counts_anew_after_progress(
    clock: SimpleNamespace, overtime: OvertimeDetector, computing: list[str], received_bytes: int
) -> None:
    overtime.step_ended()
    assert overtime.limit_seconds == 30.0, "quick steps leave at least six silences"
    clock.now += 29.0
    assert not overtime.is_over(computing, received_bytes)
    clock.now += 29.0
    assert not overtime.is_over(HOSTS, received_bytes)
    clock.now += 1.1
    assert overtime.is_over(HOSTS, received_bytes)


def test_evaluation_before_the_first_step_may_take_any_time(clock: SimpleNamespace) -> None:
    detector = OvertimeDetector(5.0, predicted_seconds=4.0)
    clock.now += 1e6
    assert not detector.is_over(["control-unit-0"], 0)
    assert not detector.is_slow
    assert detector.seconds == 0.0
    detector.step_began()
    assert not detector.is_over(["control-unit-0"], 0)
