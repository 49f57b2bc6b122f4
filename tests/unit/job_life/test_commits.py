"""Where an attempt begins, and which results of clusters it can use."""

from dataclasses import replace

import pytest

from collapipe.job_life.commits import (
    Beginning,
    Commits,
    Kept,
    can_catch_up,
    usable,
    where_to_begin,
)

PRESENT = {name: f"first {name}" for name in ("device-0", "device-1", "edge-server")}
ROOM = 100
"""So many rounds are left."""


def usable_of(
    last: tuple[int, int] = (2, 7), *restarted: str, num_failures: int = 0
) -> frozenset[int]:
    """Returns the clusters whose results can be used when these hosts have restarted. Each has one device."""
    present = PRESENT | dict.fromkeys(restarted, "another")
    processes = {
        index: {name: f"first {name}"} for index, name in enumerate(("device-0", "device-1"))
    }
    all_kept = Kept((2, 7), "first edge-server", processes, num_failures)
    kept = usable(all_kept, last, present["edge-server"], present)
    if kept is None:
        return frozenset()
    assert kept == replace(all_kept, processes={i: processes[i] for i in kept.processes})
    return frozenset(kept.processes)


def test_results_are_lost_with_the_processes_of_their_hosts_or_of_the_edge_server() -> None:
    assert usable_of() == {0, 1}
    assert usable_of((2, 7), "device-0") == {1}
    assert usable_of((2, 7), "device-0", "device-1") == set()
    assert usable_of((2, 7), "edge-server") == set()


def test_results_are_given_up_after_other_clusters_have_failed_three_times_on_their_way() -> None:
    found = [bool(usable_of(num_failures=number)) for number in range(4)]
    assert found == [True, True, True, False]


@pytest.mark.parametrize("last", [(3, 7), (2, 6)])
def test_results_of_another_round_are_not_used(last: tuple[int, int]) -> None:
    assert usable_of(last) == set()


COMMITS = Commits((2, 7), 4, 1, frozenset({4, 5, 6, 7}))


@pytest.mark.parametrize(
    ("commits", "every", "recorded", "rounds_left", "expected"),
    [
        (COMMITS, 1, [1, 1, 2], ROOM, True),
        (replace(COMMITS, kept=frozenset({4, 6, 7})), 1, [1, 1, 2], ROOM, False),
        (replace(COMMITS, restorable=3, kept=frozenset(range(8))), 1, [1] * 4, ROOM, False),
        (replace(COMMITS, restorable=3, kept=frozenset(range(8))), 2, [1] * 4, ROOM, True),
        (COMMITS, 1, [0, 1, 2], ROOM, False),  # before a return
        (COMMITS, 1, [None, 1, 2], ROOM, False),
        (COMMITS, 1, [1, 1, 2], 1, True),
        (COMMITS, 1, [1, 1, 2], 0, False),
        (replace(COMMITS, kept=COMMITS.kept | {9}), 1, [1, 1, 2], 2, False),
        (replace(COMMITS, kept=COMMITS.kept | {9}), 1, [1, 1, 2], 3, True),
    ],
)
def test_clusters_catch_up_alone_if_all_that_they_need_is_kept(
    commits: Commits, every: int, recorded: list[int | None], rounds_left: int, expected: bool
) -> None:
    assert can_catch_up(commits, every, recorded, rounds_left) is expected


def test_attempt_begins_with_kept_results_or_at_the_restore_point_or_only_evaluates() -> None:
    kept = Kept((2, 7), "first edge-server", {0: {}})
    assert where_to_begin(COMMITS, kept, 9, ROOM) == Beginning(7, kept)
    assert where_to_begin(COMMITS, None, 9, ROOM) == Beginning(4, num_repeated=3)
    further = replace(COMMITS, kept=COMMITS.kept | {8})
    assert where_to_begin(further, None, 9, ROOM) == Beginning(4, num_repeated=4)
    assert where_to_begin(further, None, 8, ROOM) == Beginning(8, is_trained=True)
    # The rounds that are repeated would use up what is left, and no other one may follow.
    assert where_to_begin(COMMITS, None, 9, 3) == Beginning(7, is_trained=True)
    assert where_to_begin(COMMITS, None, 9, 4) == Beginning(4, num_repeated=3)
