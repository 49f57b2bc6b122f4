"""Estimates how far the clock of another host is ahead, from round trips."""

from collections.abc import Iterable
from dataclasses import dataclass

_DRIFT = 15e-6
"""Most seconds that two clocks drift apart in each second: PHI of RFC 5905."""


@dataclass(frozen=True)
class RoundTrip:
    """The four timestamps of a question and its answer, in seconds.

    Args:
        asked: Clock of the caller, as for `answered`.
        received: Clock of the other host, as for `sent`.
    """

    asked: float
    received: float
    sent: float
    answered: float

    @property
    def delay_seconds(self) -> float:
        """Time on the network, both ways."""
        return (self.answered - self.asked) - (self.sent - self.received)


@dataclass(frozen=True)
class ClockOffset:
    """How far the clock of the other host is ahead.

    Args:
        uncertainty_seconds: Largest error of `seconds` at the time of the measurement.
    """

    seconds: float
    uncertainty_seconds: float

    def uncertainty_after(self, seconds: float) -> float:
        """Returns the largest error some seconds before or after the measurement, because clocks drift."""
        return self.uncertainty_seconds + _DRIFT * abs(seconds)


def estimate_offset(round_trips: Iterable[RoundTrip]) -> ClockOffset:
    """Returns the offset by the clock filter of RFC 5905: only the round trip with the least delay counts.

    The error is largest if one way took all of the delay. So it is at most half of the delay.
    """
    best = min(round_trips, key=lambda trip: trip.delay_seconds)
    seconds = ((best.received - best.asked) + (best.sent - best.answered)) / 2
    return ClockOffset(seconds, max(best.delay_seconds, 0.0) / 2)
