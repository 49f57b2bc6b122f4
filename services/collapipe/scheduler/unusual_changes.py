"""Tells when a cluster changes the model far more than the others do."""

import statistics
from collections.abc import Mapping, Sequence

from collapipe.scheduler.job_progress import JobProgress
from collapipe.v1 import plan_pb2, scheduler_pb2

MOST_TIMES = 3.0
"""A larger change than this multiple of the median of the clusters is unusual."""

_EFFECTS = {
    "mean": "its change counts in full, and in a new job another averaging.rule would bound it",
    "clipped_mean": "its change was scaled down to the median of each unit",
    "trimmed_mean": "the largest and the smallest values were left out",
    "median": "only the middle values count",
}


def unusual_clusters(changes: Mapping[int, float]) -> dict[int, float]:
    """Returns the clusters with an unusual change, and by how many times it exceeds the median.

    With fewer than three clusters, no change is unusual.

    Args:
        changes: Euclidean norm of what each cluster has changed in the whole model.
    """
    median = statistics.median_low(changes.values()) if len(changes) > 2 else 0.0
    if not median:
        return {}
    times = {cluster: change / median for cluster, change in changes.items()}
    return {cluster: each for cluster, each in times.items() if each > MOST_TIMES}


class UnusualChanges:
    """Tells of each cluster when its changes become unusual, and not again while they stay so."""

    def __init__(self, progress: JobProgress) -> None:
        self._progress = progress
        self._told: set[int] = set()

    def look_at(
        self, round_index: int, changes: Mapping[int, float], plans: Sequence[plan_pb2.Plan]
    ) -> None:
        """Looks at the changes of one round.

        Args:
            changes: As in `unusual_clusters`. It is empty if they are not known.
        """
        unusual = unusual_clusters(changes)
        hosts = {plan.cluster_index: plan.stages[0].host_id for plan in plans}
        for cluster in unusual.keys() - self._told:
            self._progress.tell(
                scheduler_pb2.INCIDENT_CODE_UNUSUAL_CHANGE,
                f"cluster {cluster} changed the model in round {round_index + 1} by {changes[cluster]:.3g}, {unusual[cluster]:.1f} times the "
                f"median of the clusters (limit: {MOST_TIMES:g}): {_EFFECTS[self._progress.job.averaging.rule]}. Check its data and its "
                "devices",
                hosts[cluster],
            )
        self._told = set(unusual)
