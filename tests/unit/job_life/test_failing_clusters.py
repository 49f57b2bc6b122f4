"""When a job repeats a round with a cluster that failed, and when it goes on without it."""

from collapipe.job_life.failing_clusters import (
    FailingClusters,
    after_failure,
    after_round,
    leave_out,
)

NONE = FailingClusters()


def fail(failing: FailingClusters, cluster: int, times: int) -> tuple[FailingClusters, list[bool]]:
    """Lets a cluster fail, and returns whether the round goes on without it, each time."""
    goes_on = []
    for _ in range(times):
        failing, decided = after_failure(failing, cluster, is_faulty=False)
        goes_on.append(decided)
    return failing, goes_on


def test_wrong_answer_leaves_a_cluster_out_at_once_and_other_failures_the_fourth_time() -> None:
    assert after_failure(NONE, 1, is_faulty=True) == (NONE, True)
    failing, goes_on = fail(NONE, 1, 5)
    assert goes_on == [False] * 3 + [True] * 2
    assert fail(failing, 0, 1)[1] == [False], "another cluster has its own patience"
    assert fail(NONE, 1, 1)[1] == [False], "the first state has not changed"


def test_cluster_that_fails_and_succeeds_in_turns_costs_few_attempts() -> None:
    failing, num_repeated = NONE, 0
    for index in range(1000):
        failing, (goes_on,) = fail(failing, 1, 1)
        num_repeated += not goes_on
        failing = after_round(failing, 1, index)
    assert num_repeated <= 103


def test_pause_doubles_up_to_a_limit_until_the_cluster_ends_a_round() -> None:
    failing, tried, again = NONE, [], 0
    for index in range(150):
        if 1 not in failing.pausing(index):
            assert index == again
            tried.append(index)
            failing, again = leave_out(failing, 1, index)
    assert tried == [0, 1, 3, 7, 15, 31, 63, 95, 127]
    failing = after_round(failing, 1, 159)
    assert failing.pausing(160) == []
    assert leave_out(failing, 1, 160)[1] == 161


def test_cluster_that_pauses_takes_part_in_earlier_rounds_that_are_repeated() -> None:
    failing, _ = leave_out(NONE, 1, 20)
    failing, again = leave_out(failing, 1, 21)
    assert again == 23
    failing = after_round(failing, 1, 10)
    assert [index for index in range(30) if 1 in failing.pausing(index)] == [21, 22]
