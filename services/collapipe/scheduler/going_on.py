"""Lets a round go on without a cluster that has failed, and tells it."""

from collapipe.errors import CancelledError, CollapipeError, PeerFaultyError
from collapipe.job_life.failing_clusters import FailingClusters, after_failure, leave_out
from collapipe.job_life.round_clusters import RoundClusters, fail
from collapipe.scheduler.catching_up import forget_moments
from collapipe.scheduler.held import Held
from collapipe.scheduler.job_progress import JobProgress
from collapipe.scheduler.planner import Planner
from collapipe.v1 import control_unit_pb2, job_pb2, plan_pb2, scheduler_pb2


class GoingOn:
    """Decides for the rounds of one attempt whether they go on without a cluster. Several threads may use it.

    Args:
        failing: The clusters that have failed in this and in earlier attempts.
    """

    def __init__(
        self, progress: JobProgress, planner: Planner, failing: Held[FailingClusters]
    ) -> None:
        self._progress = progress
        self._planner = planner
        self._failing = failing

    def without(
        self, index: int, error: CollapipeError, late: Held[RoundClusters], round_index: int
    ) -> bool:
        """Returns whether a round goes on without a cluster that has failed, and tells it."""
        if isinstance(error, CancelledError) or not self.has_no_patience(index, error):
            return False
        if not late.decide(fail, index):
            return False
        again = self._failing.decide(leave_out, index, round_index)
        self._progress.tell(
            scheduler_pb2.INCIDENT_CODE_HOST_LEFT_OUT,
            f"round {round_index + 1} goes on without cluster {index}, which is tried again in round {again + 1}: {error}",
            self._control_unit(index),
        )
        return True

    def has_no_patience(self, index: int, error: CollapipeError) -> bool:
        """Counts a failure of a cluster. Returns whether its round should go on without it, and not be repeated."""
        is_faulty = isinstance(error, PeerFaultyError)
        return self._failing.decide(after_failure, index, is_faulty=is_faulty)

    def commits_without(
        self, error: CollapipeError, late: Held[RoundClusters], round_index: int
    ) -> bool:
        """Returns whether a round that cannot be committed because of one cluster can be committed without it."""
        index = error.cluster_index
        if index is None or index not in set(range(self._progress.job.clusters)) - late.now.late:
            return False
        unit = self._control_unit(index)
        error.prepared_by = unit
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
