"""When a job goes on without a cluster that fails, and when it tries it again."""

from collapipe.errors import AttemptFailedError, PeerFaultyError
from collapipe.scheduler.failing_clusters import FailingClusters

LOST = AttemptFailedError("a device hangs")
WRONG = PeerFaultyError("control-unit-1", "control-unit-1 sent nonsense")


def test_wrong_answer_leaves_the_cluster_out_at_once() -> None:
    assert FailingClusters().failed(1, WRONG)


def test_other_failures_of_a_cluster_are_tried_again_three_times() -> None:
    failing = FailingClusters()
    assert [failing.failed(1, LOST) for _ in range(5)] == [False] * 3 + [True] * 2
    assert not failing.failed(0, LOST), "another cluster has its own patience"


def test_cluster_that_fails_and_succeeds_in_turns_costs_few_attempts() -> None:
    failing, repeated = FailingClusters(), 0
    for index in range(1000):
        repeated += not failing.failed(1, LOST)
        failing.ended(1, index)
    assert repeated <= 103


def test_pause_doubles_up_to_a_limit_until_the_cluster_ends_a_round() -> None:
    failing = FailingClusters()
    tried, again = [], 0
    for index in range(150):
        if 1 not in failing.pausing(index):
            assert index == again
            tried.append(index)
            again = failing.left_out(1, index)
    assert tried == [0, 1, 3, 7, 15, 31, 63, 95, 127]
    failing.ended(1, 159)
    assert failing.pausing(160) == []
    assert failing.left_out(1, 160) == 161


def test_cluster_that_pauses_takes_part_in_earlier_rounds_that_are_repeated() -> None:
    failing = FailingClusters()
    failing.left_out(1, 20)
    again = failing.left_out(1, 21)
    assert again == 23
    failing.ended(1, 10)
    assert [index for index in range(30) if 1 in failing.pausing(index)] == [21, 22]
