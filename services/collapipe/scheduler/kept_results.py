"""What clusters that have ended a round keep when another cluster fails, so that only that one repeats its work."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from collapipe.allocation import ClusterPlan
from collapipe.scheduler.evaluations import Evaluations
from collapipe.scheduler.host_registry import JobHosts
from collapipe.v1 import control_unit_pb2, plan_pb2

_MOST_FAILURES = 3
"""Attempts that may fail while clusters are on their way back to the round. Then all clusters repeat the rounds since the restore
point: each repeated round that succeeds moves the restore point on, which rounds of some clusters cannot do."""


@dataclass(frozen=True)
class KeptResult:
    """The result of one cluster: its weights are on the edge server, its optimizer states in the memory of its hosts.

    Args:
        message: The plan by which the cluster ran its round.
        plan: The same plan, as the planner knows it.
        incarnations: The processes that have the optimizer states, by host id.
    """

    prepared: control_unit_pb2.RoundPrepared
    message: plan_pb2.Plan
    plan: ClusterPlan
    incarnations: Mapping[str, str]


@dataclass
class KeptResults:
    """The results of a round that is not committed yet.

    Args:
        last_commit: The attempt and the number of committed rounds of the commit from which the round began.
        edge_server: The process of the edge server that has the weights.
        evaluations: What clusters have counted at the beginning of the round.
        results: By cluster index.
        num_failures: Attempts that have failed while other clusters were on their way back to this round.
    """

    last_commit: tuple[int, int]
    edge_server: str
    evaluations: Evaluations
    results: dict[int, KeptResult] = field(default_factory=dict)
    num_failures: int = 0

    def usable(self, last: plan_pb2.Commit, hosts: JobHosts) -> "KeptResults | None":
        """Returns the results that another attempt can use; `None` if there are none.

        Args:
            last: The last commit.
            hosts: The hosts of that attempt.
        """
        present = {host_id: host.incarnation for host_id, host in hosts.by_id.items()}
        is_same = self.last_commit == (last.attempt, last.num_rounds)
        if not is_same or hosts.edge_server.incarnation != self.edge_server:
            return None
        results = {
            index: kept
            for index, kept in self.results.items()
            if kept.incarnations.items() <= present.items()
        }
        if not results or self.num_failures >= _MOST_FAILURES:
            return None
        return replace(self, results=results)


def weights_since_restore_point(last: plan_pb2.Commit) -> Sequence[plan_pb2.Commit] | None:
    """Returns the commits from the one after the restore point to the last one, in order; `None` if one is not kept."""
    kept = {commit.num_rounds: commit for commit in (*last.history, last)}
    wanted = range(last.restore_point.num_rounds + 1, last.num_rounds + 1)
    return [kept[number] for number in wanted] if kept.keys() >= set(wanted) else None


def furthest_rounds(last: plan_pb2.Commit) -> int:
    """Returns the most rounds of a commit that the edge server keeps. It is not the last one if rounds were being repeated."""
    return max(kept.num_rounds for kept in (last, *last.history))
