"""What the planner of a job stores for its successor after a restart of the scheduler."""

from typing import Literal

from pydantic import BaseModel, ConfigDict

from collapipe.allocation import RoundPlan
from collapipe.job import JobConfig
from collapipe.scheduler.host_registry import JobHosts
from collapipe.scheduler.knowledge import Knowledge


class PlannerState(BaseModel):
    """The stored state of a planner."""

    model_config = ConfigDict(extra="forbid", ser_json_inf_nan="constants")

    version: Literal[4] = 4
    """Format version. Increase it when an older document can no longer be read."""
    strategy: str
    host_ids: list[list[str]]
    """The result of `host_ids` for the job."""
    knowledge: Knowledge
    current_plans: RoundPlan
    """The plans of the last committed round; empty before the first one."""

    def fits(self, job: JobConfig, hosts: JobHosts) -> bool:
        """Returns whether the state covers the same hosts, all of their devices, and the same strategy."""
        return (
            self.strategy == job.schedule.strategy
            and self.host_ids == host_ids(hosts)
            and {device.host_id for device in hosts.devices} <= self.knowledge.hosts.keys()
        )


def host_ids(hosts: JobHosts) -> list[list[str]]:
    """Returns the ids of the edge server and of each cluster's hosts, whatever their registration order."""
    clusters = [
        [c.control_unit.host_id, *sorted(d.host_id for d in c.devices)] for c in hosts.clusters
    ]
    return [[hosts.edge_server.host_id], *clusters]
