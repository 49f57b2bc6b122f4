"""Lets one job at a time do what needs much memory, disk and time."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from collapipe.rpc import SIGN_OF_LIFE_SECONDS


class HeavyWork:
    """The turn of the job that makes or exports a whole model. Commits need no turn."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._job_id = ""

    @contextmanager
    def turn(
        self,
        job_id: str,
        check: Callable[[], None],
        tell: Callable[[str], None] = lambda job_id: None,
    ) -> Iterator[None]:
        """Waits for the turn of a job, and keeps it.

        Args:
            check: Called again and again while the job waits. Its error ends the waiting.
            tell: Told which job has the turn, once a second.
        """
        while not self._lock.acquire(timeout=SIGN_OF_LIFE_SECONDS):
            check()
            tell(self._job_id)
        try:
            check()
            self._job_id = job_id
            yield
        finally:
            self._lock.release()
