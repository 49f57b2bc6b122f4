"""Which jobs and uses of models begin, and for which of the others the rest waits."""

from collections.abc import Sequence
from dataclasses import dataclass

from collapipe.scheduler.turns import turns


@dataclass(frozen=True)
class Entry:
    job_id: str
    host_clusters: frozenset[int]


def entry(name: str, *clusters: int) -> Entry:
    return Entry(name, frozenset(clusters))


A, B, BOTH = entry("a", 0), entry("b", 1), entry("both", 0, 1)


def names(entries: Sequence[Entry]) -> str:
    return " ".join(one.job_id for one in entries)


def begin(queue: Sequence[Entry], running: Sequence[Entry] = (), most: int = 8) -> str:
    """Names the entries that begin."""
    return names([turn.entry for turn in turns(queue, running, most) if turn.may_begin])


def waits_for(queue: Sequence[Entry], running: Sequence[Entry] = (), most: int = 8) -> list[str]:
    """Names what each entry of the queue waits for."""
    return [names(turn.ahead) for turn in turns(queue, running, most)]


def test_entries_without_a_common_cluster_begin_together() -> None:
    assert begin([A, B]) == "a b"
    assert begin([A, entry("a2", 0), B]) == "a b"
    assert begin([B], [A]) == "b"
    assert begin([A], [BOTH]) == ""


def test_entry_that_waits_is_not_overtaken_by_one_that_wants_its_clusters() -> None:
    later = [BOTH, B, entry("c", 2)]
    assert begin(later, [A]) == "c"
    assert waits_for(later, [A]) == ["a", "both", ""]
    assert begin(later) == "both c"


def test_entry_waits_for_all_before_it_that_want_one_of_its_clusters() -> None:
    assert waits_for([BOTH, entry("again", 0)], [A, B]) == ["a b", "a both"]


def test_only_so_many_run_at_once() -> None:
    queue = [entry(str(index), index) for index in range(4)]
    assert begin(queue, most=3) == "0 1 2"
    running, waiting = queue[:3], queue[3:]
    assert begin(waiting, running, most=3) == ""
    assert waits_for(waiting, running, most=3) == ["0 1 2"]


def test_held_job_keeps_its_place() -> None:
    first, second, other = turns([A, entry("a2", 0), B], [], 8, held={"a"})
    assert (first.may_begin, first.ahead) == (False, ())
    assert (second.may_begin, second.ahead) == (False, (A,))
    assert other.may_begin
