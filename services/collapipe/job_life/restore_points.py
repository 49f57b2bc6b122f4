"""Decides after which rounds the optimizer states are copied."""


def becomes_candidate(
    num_rounds: int, replicate_every: int, began_with: int, *, has_failed: bool
) -> bool:
    """Returns whether the optimizer states of a new commit are to be copied, so that it can become the restore point.

    If failures come faster than `replicate_every` rounds, a job still has to get on. So an attempt after a failure first
    copies after 1 round, then after 2, 4, 8 and so on more rounds, until the distance is `replicate_every`.

    Args:
        num_rounds: Committed rounds of the new commit.
        began_with: Committed rounds from which the attempt went on.
        has_failed: Whether there was an attempt before.
    """
    own = num_rounds - began_with
    is_early = has_failed and own < replicate_every and own & (own + 1) == 0  # 1, 3, 7, 15, ...
    return is_early or num_rounds % replicate_every == 0
