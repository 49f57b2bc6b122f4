"""Bounds the calls that have sent no message yet. Otherwise anybody could hold all threads of a method by saying nothing."""

import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import grpc

from collapipe.errors import CancelledError, PeerLostError

FIRST_MESSAGE_SECONDS = 60.0
"""A caller has so long for its first message. At 64 kbit/s, full queues delay a message by 8 s."""

MOST_SILENT_CALLS = 16
"""Calls of one caller to one method that may wait for their first message at the same time. It comes with the call, so an honest
caller has few. A method that takes a single message has 64 threads."""


@dataclass(eq=False)
class _SilentCall:
    context: grpc.ServicerContext
    gives_up_at: float
    is_given_up: bool = False


class SilentCalls:
    """The calls of a server that have sent no message yet."""

    def __init__(
        self, seconds: float = FIRST_MESSAGE_SECONDS, most_of_a_caller: int = MOST_SILENT_CALLS
    ) -> None:
        self._seconds = seconds
        self._most = most_of_a_caller
        self._changed = threading.Condition()
        self._calls: dict[_SilentCall, None] = {}
        """Oldest first. All have the same time, so they are given up in this order."""
        self._numbers: Counter[tuple[str, str]] = Counter()
        self._closed = False
        threading.Thread(target=self._give_up, name="silent calls", daemon=True).start()

    @contextmanager
    def waiting(self, method: str, caller: str, context: grpc.ServicerContext) -> Iterator[None]:
        """Counts a call as silent within the block, and ends it if that takes too long.

        Raises:
            PeerLostError: The caller has too many silent calls at the moment.
            CancelledError: The first message did not come in time.
        """
        call = _SilentCall(context, time.monotonic() + self._seconds)
        with self._changed:
            if self._numbers[method, caller] >= self._most:
                raise PeerLostError(
                    "",
                    f"{caller} has {self._most} calls of {method} that have sent no message, and may not have more: send a "
                    "message right after opening a call, and try again",
                )
            self._numbers[method, caller] += 1
            self._calls[call] = None
            if len(self._calls) == 1:
                self._changed.notify()
        try:
            yield
        finally:
            with self._changed:
                self._calls.pop(call, None)
                self._numbers[method, caller] -= 1
                if not self._numbers[method, caller]:
                    del self._numbers[method, caller]
            if call.is_given_up:
                raise CancelledError(
                    f"{caller} called {method}, but sent no message within {self._seconds:g} s: send one right after opening a "
                    "call"
                )

    def close(self) -> None:
        """Ends the thread that gives up calls."""
        with self._changed:
            self._closed = True
            self._changed.notify()

    def _give_up(self) -> None:
        while True:
            with self._changed:
                while not (self._calls or self._closed):
                    self._changed.wait()
                if self._closed:
                    return
                oldest = next(iter(self._calls))
                left = oldest.gives_up_at - time.monotonic()
                if left > 0:
                    self._changed.wait(left)
                    continue
                del self._calls[oldest]
                oldest.is_given_up = True
            oldest.context.cancel()
