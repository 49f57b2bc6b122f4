"""Holds a state of `job_life` that several threads change."""

import threading
from collections.abc import Callable
from typing import Concatenate, Generic, ParamSpec, TypeVar

S = TypeVar("S")
R = TypeVar("R")
P = ParamSpec("P")


class Held(Generic[S]):
    """A state. A thread that reads `now` may miss a change that another thread is making."""

    def __init__(self, first: S) -> None:
        self.now = first
        self._lock = threading.Lock()

    def decide(
        self, decision: Callable[Concatenate[S, P], tuple[S, R]], *args: P.args, **more: P.kwargs
    ) -> R:
        """Replaces the state by the one that `decision` returns, and returns the result of the decision."""
        with self._lock:
            self.now, result = decision(self.now, *args, **more)
        return result

    def change(
        self, change: Callable[Concatenate[S, P], S], *args: P.args, **more: P.kwargs
    ) -> None:
        """Replaces the state by the one that `change` returns."""
        with self._lock:
            self.now = change(self.now, *args, **more)
