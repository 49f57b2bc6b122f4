"""The order of attempts."""

from collapipe.v1 import plan_pb2


def order(attempt: plan_pb2.Attempt) -> tuple[int, int]:
    """Returns what compares attempts of one job: a newer one has a larger value.

    A resumed job may repeat rounds, so the run of the job counts before the round.
    """
    return attempt.attempt, attempt.round_index
