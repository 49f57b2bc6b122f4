"""Decides whether a round is repeated or goes on without a cluster that failed, and when the cluster is tried again."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

PATIENCE = 3.0
"""So many failures of a cluster repeat the round. After that, the round goes on without it."""
PATIENCE_OF_ROUND = 0.1
"""What a round that the cluster ends adds to its patience, up to that of the beginning. So whoever fails and succeeds in turns
costs the others one attempt in ten rounds."""
LONGEST_PAUSE = 31


@dataclass(frozen=True)
class FailingClusters:
    """The failures of the clusters of one job, in all its attempts. All keys are indices of clusters.

    Args:
        patience: How many more failures repeat the round. `PATIENCE` if it is missing.
        num_left_out: How often in a row a round has left each cluster out because it failed.
        pauses: For each cluster that failed, the first round without it, and the first round with it again. A repeated round from
            before the pause runs with it.
    """

    patience: Mapping[int, float] = field(default_factory=dict)
    num_left_out: Mapping[int, int] = field(default_factory=dict)
    pauses: Mapping[int, tuple[int, int]] = field(default_factory=dict)

    def pausing(self, round_index: int) -> list[int]:
        """Returns the clusters that are not tried in a round, because they have failed before."""
        return [
            i for i in self.num_left_out if self.pauses[i][0] <= round_index < self.pauses[i][1]
        ]


def after_failure(
    failing: FailingClusters, cluster: int, *, is_faulty: bool
) -> tuple[FailingClusters, bool]:
    """Returns the state after a failure of a cluster, and whether its round should go on without it, and not be repeated.

    Args:
        is_faulty: Whether its control unit has given a wrong answer, made no progress, or refused its work.
    """
    left = failing.patience.get(cluster, PATIENCE)
    if is_faulty or left < 1:
        return failing, True
    return replace(failing, patience={**failing.patience, cluster: left - 1}), False


def leave_out(
    failing: FailingClusters, cluster: int, round_index: int
) -> tuple[FailingClusters, int]:
    """Returns the state after a round that goes on without a cluster, and the index of the round in which it is tried again.

    The pauses are 0, 1, 3, 7, 15 and then 31 rounds.
    """
    number = failing.num_left_out.get(cluster, 0)
    again = round_index + 1 + min(2**number - 1, LONGEST_PAUSE)
    left_out = replace(
        failing,
        num_left_out={**failing.num_left_out, cluster: number + 1},
        pauses={**failing.pauses, cluster: (round_index, again)},
    )
    return left_out, again


def after_round(failing: FailingClusters, cluster: int, round_index: int) -> FailingClusters:
    """Returns the state after a round of a cluster that counts. Rounds from before its last failure, which are repeated, change nothing."""
    _, again = failing.pauses.get(cluster, (0, 0))
    if round_index < again:
        return failing
    patience = failing.patience.get(cluster, PATIENCE) + PATIENCE_OF_ROUND
    return replace(
        failing,
        patience={**failing.patience, cluster: min(patience, PATIENCE)},
        num_left_out={i: number for i, number in failing.num_left_out.items() if i != cluster},
    )
