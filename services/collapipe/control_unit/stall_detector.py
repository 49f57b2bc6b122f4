"""Notices a pipeline in which every stage waits for another one."""

import time


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
