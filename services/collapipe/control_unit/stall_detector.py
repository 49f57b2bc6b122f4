"""Notices a pipeline that makes no progress: every stage waits for another one, or a stage computes without an end."""

import time
from collections.abc import Sequence

_TIMES_THE_LONGEST_STEP = 10
_LEAST_SILENCES = 6
"""A stage may compute for at least this many times the allowed silence."""
_TIMES_THE_PREDICTION = 30
_FIRST_STEP_SECONDS = 3600.0
"""How long a stage may compute before any step of the round is done, if nothing is predicted. A single host that runs all units
receives nothing during a whole step."""
_SLOW_SHARE = 1 / 3
"""A stage is shown as slow after this share of the time that it may compute."""


class StallDetector:
    """Compares each report of the stages with the previous one."""

    def __init__(self, silence_seconds: float) -> None:
        self._silence_seconds = silence_seconds
        self._last_report = ("", 0)
        self._progress_at = time.monotonic()

    def is_stalled(self, waiting_for: str, received_bytes: int) -> bool:
        """Returns whether nothing has changed for longer than the allowed silence.

        Args:
            waiting_for: What the stages wait for, in words. Empty while some stage computes or is idle.
            received_bytes: Bytes that have arrived over all links, so that a slow link counts as progress.
        """
        report = (waiting_for, received_bytes)
        if report != self._last_report or not waiting_for:
            self._last_report, self._progress_at = report, time.monotonic()
        return time.monotonic() - self._progress_at > self._silence_seconds


class OvertimeDetector:
    """Compares how long stages compute, while nothing moves, with the longest training step of the round so far.

    In the first step, it compares with the prediction. Before that step begins, nothing is compared: an evaluation may take
    any time.

    Args:
        predicted_seconds: Predicted time of a step; 0 if there is no prediction.
    """

    def __init__(self, silence_seconds: float, predicted_seconds: float = 0.0) -> None:
        self._least_seconds = _LEAST_SILENCES * silence_seconds
        self._predicted_seconds = predicted_seconds
        self._longest_step_seconds: float | None = None
        self._step_began_at: float | None = None
        self._progress_at = time.monotonic()
        self._received_bytes = 0

    @property
    def limit_seconds(self) -> float:
        """How long a stage may compute while nothing moves."""
        if self._longest_step_seconds is None:
            first = _TIMES_THE_PREDICTION * self._predicted_seconds or _FIRST_STEP_SECONDS
            return max(self._least_seconds, first)
        return max(self._least_seconds, _TIMES_THE_LONGEST_STEP * self._longest_step_seconds)

    def step_began(self) -> None:
        """Tells that the first step of the round begins."""
        self._step_began_at = self._progress_at = time.monotonic()

    def step_ended(self) -> None:
        """Tells that a step has ended, and the next one begins."""
        if self._step_began_at is not None:
            seconds = time.monotonic() - self._step_began_at
            self._longest_step_seconds = max(self._longest_step_seconds or 0.0, seconds)
        self.step_began()

    def is_over(self, computing: Sequence[str], received_bytes: int) -> bool:
        """Returns whether stages have computed for too long.

        Args:
            computing: The hosts that compute. Nobody computes for too long if it is empty.
            received_bytes: Bytes that have arrived over all links.
        """
        if received_bytes != self._received_bytes or not computing:
            self._received_bytes, self._progress_at = received_bytes, time.monotonic()
        return self.seconds > self.limit_seconds

    @property
    def seconds(self) -> float:
        """How long stages have computed while nothing moved; 0 before the first step."""
        return 0.0 if self._step_began_at is None else time.monotonic() - self._progress_at

    @property
    def is_slow(self) -> bool:
        """Whether stages have computed for so long that a person should see it."""
        return self.seconds > _SLOW_SHARE * self.limit_seconds
