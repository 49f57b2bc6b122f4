"""Limits which part of a process each caller may take with its questions. Otherwise one of them could slow down all jobs.

Python runs one thread at a time, so the time that a thread uses for one caller is missing for all others.
"""

import threading
import time
from collections.abc import Callable

from collapipe.errors import PeerLostError

SHARE = 0.1
"""Part of a processor that one caller may use in the long run."""

SAVED_SECONDS = 2.0
"""Processor time that a caller may use at once, if it has used little before."""

LONGEST_WAIT_SECONDS = 10.0
"""A call for which the caller would have to wait longer is refused."""

REFUSED_AFTER_SECONDS = 2.0
"""A refusal comes so late, because a caller may try again at once."""

_MOST_OWED_SECONDS = SAVED_SECONDS + 6 * LONGEST_WAIT_SECONDS * SHARE
"""More is forgotten. So after a single call that takes long, the caller is free again within a minute."""

_COUNTED_SECONDS = 5.0
"""A stream counts for so long. After that, it only sends what is new, which is limited where it arises."""

_FEW_CALLERS = 1024
"""With more callers, those that owe nothing are forgotten, so that the table stays small."""


class ProcessorShares:
    """What the callers of a server have used of its processor.

    Args:
        clock: Returns a time in seconds from any fixed start.
        sleep: Waits for some seconds.
    """

    def __init__(
        self,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._clock = clock
        self._sleep = sleep
        self._lock = threading.Lock()
        self._free_at: dict[str, float] = {}
        """When each caller owes nothing any more. It owes what it used, and `SHARE` of each second pays it back."""

    def wait(self, caller: str) -> None:
        """Waits until a caller may go on; raises `PeerLostError` if that would take too long."""
        seconds = self._seconds_to_wait(caller)
        if seconds > LONGEST_WAIT_SECONDS:
            self._sleep(REFUSED_AFTER_SECONDS)
            raise PeerLostError(
                "",
                f"{caller} has used more than its share of this process, which is {SHARE:.0%} of a processor: call less often, and try "
                f"again in {seconds:.0f} s",
            )
        if seconds > 0:
            self._sleep(seconds)

    def used(self, caller: str, seconds: float) -> None:
        """Counts processor time for a caller."""
        with self._lock:
            now = self._clock()
            if len(self._free_at) >= _FEW_CALLERS and caller not in self._free_at:
                self._free_at = {name: at for name, at in self._free_at.items() if at > now}
            free_at = max(self._free_at.get(caller, now), now) + seconds / SHARE
            self._free_at[caller] = min(free_at, now + _MOST_OWED_SECONDS / SHARE)

    def _seconds_to_wait(self, caller: str) -> float:
        with self._lock:
            owed = self._free_at.get(caller, 0.0) - self._clock()
        return owed - SAVED_SECONDS / SHARE


class Meter:
    """Counts the processor time of one call for its caller. One thread works on the call.

    Args:
        call_seconds: What is counted for the call itself, at once.
    """

    def __init__(self, shares: ProcessorShares, caller: str, call_seconds: float) -> None:
        self._shares, self._caller = shares, caller
        self._counts_until = time.monotonic() + _COUNTED_SECONDS
        self._used = time.thread_time()
        shares.used(caller, call_seconds)

    def count(self) -> None:
        """Counts what the thread has used since the last time."""
        before, self._used = self._used, time.thread_time()
        if time.monotonic() < self._counts_until:
            self._shares.used(self._caller, self._used - before)
