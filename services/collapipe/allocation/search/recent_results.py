"""Keeps the results of the last searches, so that what has not changed is not computed again."""

from collections import deque
from collections.abc import Callable, Hashable
from typing import Any, TypeVar

_Result = TypeVar("_Result")


class RecentResults:
    """Results of the last searches, by everything that they depend on.

    It needs as much memory as the results of `num_searches` searches, whatever the number of results. Threads may
    share it.
    """

    def __init__(self, num_searches: int) -> None:
        self._searches = deque[dict[Hashable, Any]]([{}], maxlen=num_searches)

    def begin_search(self) -> None:
        """Forgets what only the oldest search has used."""
        self._searches.appendleft({})

    def get(self, key: Hashable, compute: Callable[[], _Result]) -> _Result:
        """Returns the result for a key, which is computed if the last searches have not used it."""
        searches = tuple(self._searches)
        known = next((results for results in searches if key in results), None)
        result: _Result = compute() if known is None else known[key]
        searches[0][key] = result
        return result

    def clear(self) -> None:
        for results in self._searches:
            results.clear()
