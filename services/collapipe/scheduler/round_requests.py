"""Makes the requests with which control units train their parts of rounds."""

from collections.abc import Mapping

from collapipe.planning.decisions import RoundDecision
from collapipe.rpc import grant_of, sign_grant
from collapipe.scheduler.attempt_tools import AttemptTools
from collapipe.scheduler.job_documents import RoundDocument
from collapipe.v1 import control_unit_pb2, plan_pb2


class RoundRequests:
    """The requests of one attempt, each with its signed grant.

    Args:
        restore_point: That of the last commit.
    """

    def __init__(self, tools: AttemptTools, restore_point: plan_pb2.Commit) -> None:
        self._tools = tools
        self.restore_point = restore_point
        self.previous_plans: list[plan_pb2.Plan | None] = [None] * tools.job.clusters
        """The plan of the last round of each cluster for which it was not late: these hosts have its optimizer states."""
        self._holders: dict[int, Mapping[str, str]] = {}
        """The processes of these hosts, by the index of the cluster and by host id."""

    @property
    def state_holders(self) -> dict[str, str]:
        """The processes whose memory has optimizer states that the next round needs, by host id."""
        return {id: process for held in self._holders.values() for id, process in held.items()}

    def remember(self, plan: plan_pb2.Plan, processes: Mapping[str, str] | None = None) -> None:
        """Takes the plan by which a cluster has ended a round.

        Args:
            processes: Those of its hosts, by host id; without it, the present ones.
        """
        if processes is None:
            hosts = self._tools.hosts.by_id
            processes = {stage.host_id: hosts[stage.host_id].incarnation for stage in plan.stages}
        self.previous_plans[plan.cluster_index] = plan
        self._holders[plan.cluster_index] = processes

    def forget(self, cluster: int) -> None:
        """Takes note that the optimizer states of a cluster are lost."""
        self.previous_plans[cluster] = None
        self._holders.pop(cluster, None)

    def make(
        self,
        plan: plan_pb2.Plan,
        decision: RoundDecision,
        round_index: int,
        base: plan_pb2.ClusterState,
        document: RoundDocument,
        anew_since: int,
    ) -> control_unit_pb2.RunRoundRequest:
        """Returns the request that trains a round of one cluster, without an evaluation or a copy.

        Args:
            base: The state from which the cluster begins.
            anew_since: That of the last commit.
        """
        index, tools, progress = plan.cluster_index, self._tools, self._tools.progress
        edge_server, previous = tools.hosts.edge_server, self.previous_plans[index]
        request = control_unit_pb2.RunRoundRequest(
            attempt=progress.attempt(round_index, plan.plan_id),
            job=progress.spec,
            model=tools.prepared.model,
            plan=plan,
            base=base,
            labels=progress.document.labels,
            local_steps=document.ended_early.get(index, tools.job.training.local_steps),
            previous_stages=previous.stages if previous else (),
            edge_address=edge_server.address,
            edge_host_id=edge_server.host_id,
            vocabulary=tools.prepared.vocabulary,
            restore_point=self.restore_point.clusters[index],
            restore_num_rounds=self.restore_point.num_rounds,
            total_steps=document.total_steps,
            anew_since=anew_since,
            predicted_step_seconds=tools.planner.predicted_step_seconds(decision, index),
        )
        grant = grant_of(request, tools.job, progress.jobs.grants.next())
        request.grant.CopyFrom(sign_grant(tools.calls.channels.security, grant))
        return request
