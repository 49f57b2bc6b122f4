"""Lets one job at a time do what needs much memory, disk and time."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from collapipe.rpc import SIGN_OF_LIFE_SECONDS

_GRACE_SECONDS = 60.0
"""How long work goes on for which nobody waits. Whoever asks again after a broken connection then finds it."""


class HeavyWork:
    """The turn of the job that makes or exports a whole model. Commits need no turn."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._job_id = self._content = ""
        self._waiting: list[str] = []
        """The jobs that wait for their turn. A call that asks again for the work that has the turn waits, too."""
        self._wanted_at = 0.0
        """When somebody was last seen to wait for the work that has the turn."""
        self._is_given_up = self._is_over = False

    @contextmanager
    def turn(
        self,
        job_id: str,
        check: Callable[[], None],
        tell: Callable[[str], None] = lambda job_id: None,
        content: str = "",
    ) -> Iterator[None]:
        """Waits for the turn of a job, and keeps it.

        Args:
            check: Called again and again while the job waits. Its error ends the waiting.
            tell: Told which job has the turn, once a second.
            content: What the work is made of, for `give_up`.
        """
        self._waiting.append(job_id)
        try:
            while not self._lock.acquire(timeout=SIGN_OF_LIFE_SECONDS):
                check()
                tell(self._job_id)
        finally:
            self._waiting.remove(job_id)
        try:
            self._job_id, self._content, self._is_given_up = job_id, content, False
            self._wanted_at = time.monotonic()
            check()
            yield
        finally:
            self._job_id = ""
            self._lock.release()

    def is_wanted(self, *, has_caller: bool) -> bool:
        """Returns whether the work that has the turn is to go on.

        Without its caller, it goes on while another call asks for the same. If no job waits, it also goes on for `_GRACE_SECONDS`.
        """
        if self._is_given_up or self._is_over:
            return False
        waiting = list(self._waiting)
        if has_caller or self._job_id in waiting:
            self._wanted_at = time.monotonic()
            return True
        return not waiting and time.monotonic() - self._wanted_at < _GRACE_SECONDS

    def give_up(self, job_id: str, unless: str | None = None) -> None:
        """Ends the work of a job at once, because it was cancelled, or asks for something else now.

        Args:
            unless: What the work must be made of to go on.
        """
        if self._job_id == job_id and self._content != unless:
            self._is_given_up = True

    def end(self) -> None:
        """Ends all work at once, because this service ends."""
        self._is_over = True
