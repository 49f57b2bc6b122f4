"""The offset of a clock comes from the shortest round trip, and its error has a bound."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from collapipe.telemetry.clock_offset import ClockOffset, RoundTrip, estimate_offset


def round_trip(asked: float, there: float, work: float, back: float, ahead: float) -> RoundTrip:
    """Returns the timestamps of a round trip to a host whose clock is some seconds ahead."""
    received = asked + there
    sent = received + work
    return RoundTrip(asked, received + ahead, sent + ahead, sent + back)


def test_shortest_round_trip_gives_the_offset() -> None:
    slow = round_trip(0.0, 0.9, 0.0, 0.1, ahead=5.0)
    fast = round_trip(10.0, 0.25, 1.0, 0.25, ahead=-3.0)
    assert estimate_offset([slow, fast, slow]) == ClockOffset(-3.0, 0.25)


seconds = st.floats(min_value=0.0, max_value=1.0)


@given(st.lists(st.tuples(seconds, seconds, seconds), min_size=1, max_size=8), st.floats(-1e3, 1e3))
def test_error_is_within_the_uncertainty_for_any_ways(
    ways: list[tuple[float, float, float]], ahead: float
) -> None:
    trips = [round_trip(10.0 * n, *way, ahead=ahead) for n, way in enumerate(ways)]
    offset = estimate_offset(trips)
    assert abs(offset.seconds - ahead) <= offset.uncertainty_seconds + 1e-9


def test_uncertainty_grows_with_the_time_since_the_measurement() -> None:
    offset = ClockOffset(0.0, 0.001)
    assert offset.uncertainty_after(0) == 0.001
    assert offset.uncertainty_after(-1000) == offset.uncertainty_after(1000) == pytest.approx(0.016)
