"""Makes one evaluation of what the clusters of a job count on their held-out rows."""

import threading

from collapipe.evaluation import add_sums, make_evaluation
from collapipe.telemetry import metrics
from collapipe.v1 import job_pb2


class Evaluations:
    """Collects the counts of a job's clusters. Several threads may use it."""

    def __init__(self, task_kind: str, num_clusters: int) -> None:
        self._task_kind = task_kind
        self._num_clusters = num_clusters
        self._lock = threading.Lock()
        self._num_rounds = 0
        """Committed rounds of the current model."""
        self._counted: dict[int, dict[str, float]] = {}
        """What each cluster that has evaluated the current model has counted, by its index."""

    def add(
        self, cluster_index: int, counted: job_pb2.EvaluationSums, num_rounds: int
    ) -> job_pb2.Evaluation | None:
        """Adds what a cluster has counted. Returns the evaluation if it was the last cluster, and one has rows.

        Args:
            counted: Empty for a cluster that fails. What it has counted before stays.
            num_rounds: Committed rounds of the evaluated model.
        """
        with self._lock:
            if (
                num_rounds != self._num_rounds
            ):  # A late cluster may not have evaluated the model before.
                self._num_rounds, self._counted = num_rounds, {}
            if counted.sums or cluster_index not in self._counted:
                self._counted[cluster_index] = dict(counted.sums)
            if len(self._counted) < self._num_clusters:
                return None
            sums = add_sums(self._counted.values())
            self._counted = {}
        if not sums:
            return None
        evaluation = make_evaluation(self._task_kind, sums, num_rounds)
        values = {evaluation.metric: evaluation.value, **evaluation.other_metrics}
        for name, value in values.items():
            metrics.JOB_METRIC.labels(name).set(value)
        return evaluation
