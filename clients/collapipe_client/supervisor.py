"""Starts the processes of a testbed again when they have ended by themselves."""

import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable

from typing_extensions import Self

from collapipe.errors import CollapipeError

_POLL_SECONDS = 0.2
_MOST_STARTS, _WINDOW_SECONDS = 5, 120.0
"""If this many starts within the window did not help, the cause is lasting, and the process is not started again."""


class Supervisor:
    """Watches processes in a thread of its own. Use it in `with`.

    Args:
        lost: Returns the names of the processes that have ended.
        restart: Starts one of them again. It may raise `CollapipeError` or `OSError`.
        say: Called with a message for the user.
    """

    def __init__(
        self,
        lost: Callable[[], list[str]],
        restart: Callable[[str], None],
        say: Callable[[str], None],
    ) -> None:
        self._lost, self._restart, self._say = lost, restart, say
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="supervisor", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._closed.set()
        self._thread.join()

    def _run(self) -> None:
        starts: defaultdict[str, deque[float]] = defaultdict(lambda: deque(maxlen=_MOST_STARTS))
        given_up: set[str] = set()
        while not self._closed.wait(_POLL_SECONDS):
            for name in set(self._lost()) - given_up:
                now = time.monotonic()
                if len(starts[name]) == _MOST_STARTS and now - starts[name][0] < _WINDOW_SECONDS:
                    given_up.add(name)
                    self._say(
                        f"{name} is not started again, because {_MOST_STARTS} starts within {_WINDOW_SECONDS:g} s did not help: "
                        "read its log, remove the cause, and run the command again with --resume"
                    )
                    continue
                starts[name].append(now)
                try:
                    self._restart(name)
                except (CollapipeError, OSError) as error:
                    self._say(f"{name} could not be started again: {error}")
