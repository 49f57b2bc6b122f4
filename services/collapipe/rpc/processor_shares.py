"""Limits the processor time that each caller of a server may use with its calls. Otherwise one caller could slow down all jobs.

Python runs one thread at a time, so the time that a thread uses for one caller is missing for all others.
"""

import math
import threading
import time
from collections import Counter
from collections.abc import Callable

from collapipe.errors import PeerLostError

SHARE = 0.1
"""Part of a processor that one caller may use in the long run. Calls that run at the same time may use more for a while."""

SAVED_SECONDS = 2.0
"""Processor time that a caller may use at once, if it has used little before."""

LONGEST_WAIT_SECONDS = 8.0
"""A call for which the caller would have to wait longer is refused. A host that asks for a probe gives up after 10 s."""

REFUSED_AFTER_SECONDS = 2.0
"""How long a refusal is delayed. Otherwise, a caller that tries again at once would cost more than before."""

MOST_WAITING = 2
"""Calls of one caller to one method that wait at a time. The others are refused at once, because those that wait keep threads of the
method from other callers."""

CALL_SECONDS = 0.0005
"""What a call counts at least. gRPC uses as much in other threads, as measured with calls that are refused."""

_MOST_OWED_SECONDS = SAVED_SECONDS + 60 * SHARE
"""More is forgotten. So after a single call that takes long, the caller is free again within a minute."""

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
        self._waiting: Counter[tuple[str, str]] = Counter()
        """Number of calls that wait, by caller and method."""

    def begin(self, caller: str, method: str, advance_seconds: float) -> None:
        """Waits until a caller may go on, and counts what its call uses at least.

        Raises:
            PeerLostError: The wait would be too long, or `MOST_WAITING` calls of the caller to this method wait already.
        """
        seconds = self._seconds_to_wait(caller)
        if seconds <= 0:
            self.used(caller, advance_seconds)
            return
        may_wait = seconds <= LONGEST_WAIT_SECONDS
        wait = seconds if may_wait else REFUSED_AFTER_SECONDS
        if self._wait(caller, method, wait) and may_wait:
            self.used(caller, advance_seconds)
            return
        self.used(caller, CALL_SECONDS)
        raise PeerLostError(
            "",
            f"{caller} has used more than its share of processor time in this service, which is {SHARE:.0%} of one processor: call less "
            f"often, and try again in {math.ceil(seconds)} s",
        )

    def refuse(self, caller: str, method: str) -> None:
        """Counts a call that is refused. Returns late if the caller owes much."""
        self.used(caller, CALL_SECONDS)
        if self._seconds_to_wait(caller) > 0:
            self._wait(caller, method, REFUSED_AFTER_SECONDS)

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

    def _wait(self, caller: str, method: str, seconds: float) -> bool:
        """Waits, unless `MOST_WAITING` calls of the caller to this method do. Returns whether it has waited."""
        key = caller, method
        with self._lock:
            if self._waiting[key] >= MOST_WAITING:
                return False
            self._waiting[key] += 1
        try:
            self._sleep(seconds)
        finally:
            with self._lock:
                self._waiting[key] -= 1
                if not self._waiting[key]:
                    del self._waiting[key]
        return True


class Meter:
    """Counts the processor time of one call for its caller. One thread works on the call.

    Args:
        advance_seconds: What was counted when the call began.
        counted_seconds: For how long it counts after the first answer; `None` for all of its time.
    """

    def __init__(
        self,
        shares: ProcessorShares,
        caller: str,
        advance_seconds: float,
        counted_seconds: float | None = None,
    ) -> None:
        self._shares, self._caller = shares, caller
        self._advance_seconds = advance_seconds
        self._counted_seconds = counted_seconds
        self._counts_until: float | None = None
        self._used = time.thread_time()

    def count(self) -> None:
        """Counts what the thread has used since the last time."""
        before, self._used = self._used, time.thread_time()
        if self._counted_seconds is not None:
            now = time.monotonic()
            if self._counts_until is None:
                self._counts_until = now + self._counted_seconds
            if now > self._counts_until:
                return
        used = self._used - before
        covered = min(used, self._advance_seconds)
        self._advance_seconds -= covered
        if used > covered:
            self._shares.used(self._caller, used - covered)
