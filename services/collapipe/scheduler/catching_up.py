"""Repeats committed rounds with some clusters only, after others have kept the results of the next round."""

from collections.abc import Callable, Collection, Sequence

from collapipe.scheduler.attempt_tools import AttemptTools
from collapipe.scheduler.round_requests import RoundRequests
from collapipe.v1 import control_unit_pb2, plan_pb2, scheduler_pb2


def catch_up(
    tools: AttemptTools,
    run: Callable[[control_unit_pb2.RunRoundRequest], control_unit_pb2.RoundPrepared],
    requests: RoundRequests,
    commit: plan_pb2.Commit,
    behind: Collection[int],
) -> list[int]:
    """Repeats the committed rounds since the restore point with the clusters that kept no result. They push nothing.

    Args:
        run: Lets a control unit run a round.
        commit: The last commit.
        behind: Indices of the clusters that have kept no result of the round after it.

    Returns:
        The clusters that have other optimizer states than before, because their hosts compute differently.

    Raises:
        CollapipeError: A cluster failed.
    """
    progress = tools.progress
    kept = [i for i in range(tools.job.clusters) if i not in behind]
    num_repeated = commit.num_rounds - requests.restore_point.num_rounds
    before = f"{committed_rounds(num_repeated)} and " if num_repeated else ""
    progress.tell(
        scheduler_pb2.INCIDENT_CODE_ROUNDS_REPEATED,
        f"repeats {before}round {commit.num_rounds + 1} without {_named(kept)}, whose results of this round are kept",
    )
    restore_point = plan_pb2.Commit()
    restore_point.CopyFrom(requests.restore_point)
    states = {index: restore_point.clusters[index] for index in behind}
    for committed in weights_since_restore_point(commit):
        round_index = committed.num_rounds - 1
        recorded = progress.jobs.round(progress.job_id, round_index)
        plans, decision = tools.planner.decide(round_index, recorded.plans)
        running = set(behind) - set(recorded.late_clusters)
        plans = [plan for plan in plans if plan.cluster_index in running]
        repeated = []
        for plan in plans:
            base = states[plan.cluster_index]
            request = requests.make(plan, decision, round_index, base, recorded, commit.anew_since)
            request.is_committed = True
            repeated.append(request)
        prepared = tools.calls.in_parallel(run, repeated)
        for plan, result in zip(plans, prepared, strict=True):
            states[plan.cluster_index] = result.state
            requests.remember(plan)
        for index in states.keys() & set(recorded.failed_clusters):
            forget_moments(states[index])
            requests.forget(index)
        for state in states.values():
            for unit, weights in zip(state.units, committed.global_units, strict=True):
                unit.weights_digest = weights.weights_digest
                unit.frozen_digest = weights.frozen_digest
    return [i for i, state in states.items() if _moments(state) != _moments(commit.clusters[i])]


def weights_since_restore_point(last: plan_pb2.Commit) -> Sequence[plan_pb2.Commit]:
    """Returns the commits from the one after the restore point to the last one, in order. All must be kept."""
    kept = {commit.num_rounds: commit for commit in (*last.history, last)}
    return [
        kept[number] for number in range(last.restore_point.num_rounds + 1, last.num_rounds + 1)
    ]


def _moments(state: plan_pb2.ClusterState) -> list[str]:
    return [unit.optimizer_digest for unit in state.units]


def forget_moments(state: plan_pb2.ClusterState) -> None:
    """Makes a cluster begin its next round with new optimizer states."""
    for unit in state.units:
        unit.optimizer_digest = ""


def committed_rounds(number: int) -> str:
    """Returns a number of rounds in words, such as "2 committed rounds"."""
    return f"{number} committed round{'' if number == 1 else 's'}"


def _named(clusters: Collection[int]) -> str:
    """Returns clusters in words, such as "clusters 0, 2"."""
    indices = ", ".join(map(str, sorted(clusters)))
    return f"cluster{'' if len(clusters) == 1 else 's'} {indices}"
