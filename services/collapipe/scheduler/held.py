"""Holds a state of `job_life` that several threads change."""

import threading
from collections.abc import Callable
from typing import Concatenate, Generic, ParamSpec, TypeVar

S = TypeVar("S")
R = TypeVar("R")
P = ParamSpec("P")


class Held(Generic[S]):
    """The present value of a state. A thread that asks for `now` may see an older one than another thread has just made."""

    def __init__(self, first: S) -> None:
        self.now = first
        self._lock = threading.Lock()

    def decide(
        self, decision: Callable[Concatenate[S, P], tuple[S, R]], *args: P.args, **more: P.kwargs
    ) -> R:
        """Takes the state that a decision returns, and returns the rest."""
        with self._lock:
            self.now, result = decision(self.now, *args, **more)
        return result

    def change(
        self, change: Callable[Concatenate[S, P], S], *args: P.args, **more: P.kwargs
    ) -> None:
        """Takes the state that a change returns."""
        with self._lock:
            self.now = change(self.now, *args, **more)
