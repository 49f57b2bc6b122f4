"""Decides whether a job repeats the round in which a cluster failed, or goes on without the cluster, and when it tries it again."""

import threading
from collections import Counter, defaultdict

from collapipe.errors import CollapipeError, PeerFaultyError

PATIENCE = 3.0
"""Failures of a cluster after which all clusters repeat the round. Later ones leave the cluster out."""
PATIENCE_OF_ROUND = 0.1
"""What a round that the cluster ends adds to its patience, up to that of the beginning. So whoever fails and succeeds in turns
costs the others one attempt in ten rounds."""
LONGEST_PAUSE = 31


class FailingClusters:
    """The failures of the clusters of one job, in all its attempts. Several threads may use it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._patience: defaultdict[int, float] = defaultdict(lambda: PATIENCE)
        self._failed_rounds: Counter[int] = Counter()
        """Rounds in a row without each cluster."""
        self._pauses: dict[int, range] = {}
        """The indices of the rounds without each cluster that failed. Earlier rounds, if they are repeated, have it again."""

    def failed(self, cluster_index: int, error: CollapipeError) -> bool:
        """Tells that a cluster has failed. Returns whether its round should go on without it, and not be repeated."""
        if isinstance(error, PeerFaultyError):
            return True
        with self._lock:
            if self._patience[cluster_index] < 1:
                return True
            self._patience[cluster_index] -= 1
            return False

    def left_out(self, cluster_index: int, round_index: int) -> int:
        """Tells that a round goes on without a cluster. Returns the index of the round in which it is tried again.

        With each such round in a row, the pause doubles.
        """
        with self._lock:
            pause = min(2 ** self._failed_rounds[cluster_index] - 1, LONGEST_PAUSE)
            self._failed_rounds[cluster_index] += 1
            self._pauses[cluster_index] = range(round_index, round_index + 1 + pause)
            return self._pauses[cluster_index].stop

    def ended(self, cluster_index: int, round_index: int) -> None:
        """Tells that a cluster has ended a round that counts. Rounds from before its last failure, which are repeated, change nothing."""
        with self._lock:
            if round_index < self._pauses.get(cluster_index, range(0)).stop:
                return
            patience = self._patience[cluster_index] + PATIENCE_OF_ROUND
            self._patience[cluster_index] = min(patience, PATIENCE)
            del self._failed_rounds[cluster_index]

    def pausing(self, round_index: int) -> list[int]:
        """Returns the clusters that are not tried in a round, because they have failed before."""
        with self._lock:
            return [i for i in self._failed_rounds if round_index in self._pauses[i]]
