"""Lets a round go on without a cluster that has failed, and tells it."""

from collapipe.errors import CancelledError, CollapipeError, PeerFaultyError
from collapipe.scheduler.catching_up import forget_moments
from collapipe.scheduler.failing_clusters import FailingClusters
from collapipe.scheduler.job_progress import JobProgress
from collapipe.scheduler.late_clusters import LateClusters
from collapipe.scheduler.planner import Planner
from collapipe.v1 import control_unit_pb2, job_pb2, plan_pb2, scheduler_pb2


class GoingOn:
    """Decides for the rounds of one attempt whether they go on without a cluster. Several threads may use it.

    Args:
        failing: The clusters that have failed in this and in earlier attempts.
    """

    def __init__(self, progress: JobProgress, planner: Planner, failing: FailingClusters) -> None:
        self._progress = progress
        self._planner = planner
        self._failing = failing

    def without(
        self, index: int, error: CollapipeError, late: LateClusters, round_index: int
    ) -> bool:
        """Returns whether a round goes on without a cluster that has failed, and tells it."""
        if isinstance(error, CancelledError) or not self._failing.failed(index, error):
            return False
        if not late.goes_on_without(index):
            return False
        again = self._failing.left_out(index, round_index)
        self._progress.tell(
            scheduler_pb2.INCIDENT_CODE_HOST_LEFT_OUT,
            f"round {round_index + 1} goes on without cluster {index}, which is tried again in round {again + 1}: {error}",
            self._control_unit(index),
        )
        return True

    def commits_without(self, error: CollapipeError, late: LateClusters, round_index: int) -> bool:
        """Returns whether a round that cannot be committed because of one cluster can be committed without it."""
        index = error.cluster_index
        if index is None or index not in set(range(self._progress.job.clusters)) - late.late:
            return False
        unit = self._control_unit(index)
        error.args = (f"what {unit} has prepared cannot be committed: {error}",)
        return self.without(index, PeerFaultyError(unit, str(error)), late, round_index)

    def _control_unit(self, index: int) -> str:
        return self._planner.hosts.clusters[index].control_unit.host_id


def without_result(
    state: plan_pb2.ClusterState, prepared: control_unit_pb2.RoundPrepared
) -> control_unit_pb2.RoundPrepared:
    """Returns what a commit has of a cluster that has failed: the state from which it began, with new optimizer states."""
    summary = job_pb2.RoundSummary(stages=prepared.summary.stages)
    unprepared = control_unit_pb2.RoundPrepared(state=state, summary=summary)
    forget_moments(unprepared.state)
    return unprepared
