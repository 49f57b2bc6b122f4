"""Decides where an attempt at a job begins: after which commit, and with which results of the attempt before."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

_MOST_FAILURES = 3
"""After so many failed attempts with kept results, all clusters repeat the rounds since the restore point. Only rounds that all
repeat are committed, and so move the restore point on."""
_MOST_PERIODS = 3
"""If the restore point is older than so many times `training.replicate_every`, all clusters go back to it. Otherwise the edge server
would keep ever more commits."""


@dataclass(frozen=True)
class Commits:
    """The commits of a job that the edge server keeps. A commit is named by its attempt and its number of rounds.

    Args:
        last: The last one.
        restorable: Rounds of the restore point, which has optimizer states on disks.
        anew_since: The attempt since which recorded rounds count. Earlier ones were before a return to a commit without optimizer states.
        kept: Rounds of the last commit and of each one in its history. Some have more rounds than the last one if rounds are repeated.
    """

    last: tuple[int, int]
    restorable: int
    anew_since: int
    kept: frozenset[int]

    @property
    def num_rounds(self) -> int:
        """Rounds of the last commit."""
        return self.last[1]

    @property
    def furthest(self) -> int:
        """The most rounds of a commit that is kept."""
        return max(self.kept)


@dataclass(frozen=True)
class Kept:
    """The results of a round that clusters have ended, when its attempt failed because of others.

    Args:
        commit: The commit from which the round began.
        edge_process: The process of the edge server, which has the weights.
        processes: The processes that have the optimizer states, by the index of the cluster and by host id.
        num_failures: Failed attempts that had begun with these results.
    """

    commit: tuple[int, int]
    edge_process: str
    processes: Mapping[int, Mapping[str, str]]
    num_failures: int = 0


def usable(
    kept: Kept, last: tuple[int, int], edge_process: str, present: Mapping[str, str]
) -> Kept | None:
    """Returns the results that another attempt can use; `None` if there are none.

    Args:
        last: The last commit.
        edge_process: The process of the edge server of that attempt.
        present: The processes of all its hosts, by host id.
    """
    if kept.commit != last or kept.edge_process != edge_process:
        return None
    processes = {
        index: of_cluster
        for index, of_cluster in kept.processes.items()
        if of_cluster.items() <= present.items()
    }
    if not processes or kept.num_failures >= _MOST_FAILURES:
        return None
    return replace(kept, processes=processes)


def can_catch_up(
    commits: Commits, replicate_every: int, recorded: Sequence[int | None], rounds_left: int
) -> bool:
    """Returns whether some clusters can repeat the rounds from the restore point to the last commit alone.

    Args:
        replicate_every: Rounds after which optimizer states are copied.
        recorded: By which attempt each of these rounds was recorded; `None` without a record. Empty skips this check.
        rounds_left: How many more rounds the privacy account allows.
    """
    numbers = range(commits.restorable + 1, commits.num_rounds + 1)
    if not commits.kept.issuperset(numbers) or len(numbers) > _MOST_PERIODS * replicate_every:
        return False
    if commits.furthest - commits.num_rounds >= rounds_left:
        return False  # The furthest commit is evaluated, and no round follows.
    return all(attempt is not None and attempt >= commits.anew_since for attempt in recorded)


@dataclass(frozen=True)
class Beginning:
    """Where an attempt begins.

    Args:
        num_rounds: Rounds of the commit from which it goes on.
        kept: The results of the next round that it uses.
        num_repeated: Committed rounds that all clusters repeat.
        is_trained: Whether only the evaluation of that commit is missing.
    """

    num_rounds: int
    kept: Kept | None = None
    num_repeated: int = 0
    is_trained: bool = False


def where_to_begin(
    commits: Commits, kept: Kept | None, num_rounds: int, rounds_left: int
) -> Beginning:
    """Decides where an attempt begins.

    Args:
        kept: The results that it uses; `None` if there are none, or if other clusters cannot catch up.
        num_rounds: Rounds of the whole job.
        rounds_left: How many more rounds the privacy account allows. Repeated rounds count, too.
    """
    if kept is not None:
        return Beginning(commits.num_rounds, kept)
    # An attempt that failed while it repeated rounds has left the commit that it did not reach.
    repeated = commits.furthest - commits.restorable
    if commits.furthest >= num_rounds or rounds_left <= repeated:
        return Beginning(commits.furthest, is_trained=True)
    return Beginning(commits.restorable, num_repeated=repeated)
