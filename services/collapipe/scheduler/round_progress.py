"""Bounds how long a control unit may send signs of life about a round without progress.

Only values that rise count, and each has a largest value: the steps, the beginning of the training, the evaluation, the copy of the
candidate, and thousandths of the bytes and of the held-out rows. With S steps, a round ends after at most (S + 2,004) times
`limit_seconds`, whatever the control unit tells. With `schedule.round_deadline_seconds` and `schedule.min_clusters`, the round of the
other clusters ends earlier.
"""

import time
from collections.abc import Callable

from collapipe.job_life.stage_progress import first_limit_seconds
from collapipe.v1 import control_unit_pb2

_TIMES_THE_UNITS_LIMIT = 3
"""The control unit has a limit of its own. It names the host that hangs, so it should be first. It is not if a step of the round took
more than nine times the prediction: an unlimited time would let a control unit that lies hold a job for ever."""
_PARTS = 1000
"""Bytes and rows count in so many parts. Otherwise each byte would be progress."""
_TIMES_THE_WEIGHTS = 6
"""A round moves at most so many times the trained weights: two moments and a residual, the fetched and the pushed weights, and a
copy of the moments. Bytes beyond this are no progress."""


def limit_seconds(silence_seconds: float, predicted_step_seconds: float) -> float:
    """Returns how long nothing may rise.

    Args:
        predicted_step_seconds: 0 if nothing is predicted.
    """
    return _TIMES_THE_UNITS_LIMIT * first_limit_seconds(silence_seconds, predicted_step_seconds)


class RoundProgress:
    """The progress of one cluster in one attempt at a round.

    Args:
        weights_bytes: Size of the trained weights of the model.
        frozen_bytes: Size of its frozen weights.
        held_out_rows: Rows that the cluster evaluates.
        clock: Returns a time in seconds from any fixed start.
    """

    def __init__(
        self,
        request: control_unit_pb2.RunRoundRequest,
        limit: float,
        weights_bytes: int,
        frozen_bytes: int,
        held_out_rows: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.limit_seconds = limit
        self._local_steps = request.local_steps
        self._most_bytes = max(_TIMES_THE_WEIGHTS * weights_bytes + frozen_bytes, 1)
        self._held_out_rows = max(held_out_rows, 1)
        self._clock = clock
        self._first_bytes: int | None = None
        self._reached = [0] * 6
        self._risen_at = clock()

    def take(self, response: control_unit_pb2.RunRoundResponse) -> bool:
        """Takes what the control unit tells. Returns whether nothing has risen for too long."""
        told = response.progress
        if response.HasField("progress") and self._first_bytes is None:
            self._first_bytes = told.moved_bytes
        moved = max(told.moved_bytes - (self._first_bytes or 0), 0)
        values = (
            min(told.steps_done, self._local_steps),
            told.training_began,
            told.candidate_copied,
            response.HasField("evaluation"),
            min(_PARTS * moved // self._most_bytes, _PARTS),
            min(_PARTS * told.evaluated_rows // self._held_out_rows, _PARTS),
        )
        now = self._clock()
        is_over = now - self._risen_at > self.limit_seconds
        for index, value in enumerate(values):
            if value > self._reached[index]:
                self._reached[index], self._risen_at = value, now
        return is_over
