"""What a round took, in parts."""

from collapipe.scheduler.round_sum import evaluation_delay
from collapipe.v1.job_pb2 import RoundSummary


def test_evaluation_delays_a_round_only_beyond_the_slowest_training() -> None:
    evaluates = RoundSummary(training_seconds=5.0, evaluation_seconds=10.0)
    trains = RoundSummary(training_seconds=14.0)
    assert evaluation_delay([evaluates]) == 10.0
    assert evaluation_delay([evaluates, trains]) == 1.0
    assert evaluation_delay([trains]) == evaluation_delay([]) == 0.0
