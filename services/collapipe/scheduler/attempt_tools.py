"""What the parts of one attempt at a job share."""

from dataclasses import dataclass

from collapipe.job import JobConfig
from collapipe.planning.job_hosts import JobHosts
from collapipe.scheduler.host_calls import HostCalls
from collapipe.scheduler.job_preparation import PreparedJob
from collapipe.scheduler.job_progress import JobProgress
from collapipe.scheduler.planner import Planner
from collapipe.v1 import scheduler_pb2


@dataclass(frozen=True)
class AttemptTools:
    """What the parts of one attempt at a job share.

    Args:
        planner: Has the hosts that take part. Its owner may change them between two rounds.
    """

    progress: JobProgress
    prepared: PreparedJob
    planner: Planner
    calls: HostCalls

    @property
    def job(self) -> JobConfig:
        return self.progress.job

    @property
    def hosts(self) -> JobHosts:
        return self.planner.hosts

    def control_unit(self, cluster: int) -> scheduler_pb2.Host:
        """Returns the control unit of a cluster."""
        return self.hosts.clusters[cluster].control_unit
