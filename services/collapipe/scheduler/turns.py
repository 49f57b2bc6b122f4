"""Decides which jobs and uses of models begin: those whose clusters no earlier one has or wants."""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar


class TakesTurns(Protocol):
    """A job, or a use of a model."""

    @property
    def job_id(self) -> str: ...

    @property
    def host_clusters(self) -> frozenset[int]:
        """The clusters of the deployment that it needs for itself alone."""
        ...


T = TypeVar("T", bound=TakesTurns)


@dataclass(frozen=True)
class Turn(Generic[T]):
    """One entry of the queue.

    Args:
        ahead: What must end before: all that run or wait before it and need one of its clusters. If there are none,
            all that run, if these are as many as may.
        may_begin: Whether its turn has come.
    """

    entry: T
    ahead: tuple[T, ...]
    may_begin: bool


def turns(
    queue: Sequence[T], running: Sequence[T], most: int, held: Collection[str] = ()
) -> Iterator[Turn[T]]:
    """Yields the turn of each entry of the queue, in its order.

    An entry that waits reserves its clusters, so that later ones which share a cluster with it do not overtake it. Others
    may.

    Args:
        most: How many may run at once.
        held: Ids of jobs that must not begin yet.
    """
    before, begun = list(running), list[T]()
    for entry in queue:
        ahead = tuple(one for one in before if one.host_clusters & entry.host_clusters)
        is_full = len(running) + len(begun) >= most
        may_begin = not ahead and not is_full and entry.job_id not in held
        if is_full and not ahead:
            ahead = tuple(running) + tuple(begun)
        yield Turn(entry, ahead, may_begin)
        before.append(entry)
        if may_begin:
            begun.append(entry)
