"""Plans that differ from a plan by one step: what the segment programme may have missed, for links have fixed shares there."""

from collections.abc import Iterator
from dataclasses import replace

from collapipe.allocation.round_model.problem import (
    ClusterPlan,
    ClusterProblem,
    RoundPlan,
    RoundProblem,
)


def neighbours(problem: RoundProblem, plans: RoundPlan) -> Iterator[RoundPlan]:
    """Yields plans in which one cluster has the next larger or smaller M, or one device less.

    Shares and powers are left as they are; links of a plan with a device less are the first ones.
    """
    for n, (cluster, plan) in enumerate(zip(problem.clusters, plans, strict=True)):
        for other in (*_other_micro_batches(cluster, plan), *_without_a_device(plan)):
            yield (*plans[:n], other, *plans[n + 1 :])


def with_largest_windows(problem: RoundProblem, plans: RoundPlan) -> RoundPlan:
    """Gives every stage but the last the largest window that memory and the job allow: design (10)."""
    return tuple(
        replace(
            plan,
            stages=(
                *(
                    replace(stage, in_flight=_largest_window(problem, cluster, plan, k))
                    for k, stage in enumerate(plan.stages[:-1])
                ),
                plan.stages[-1],
            ),
        )
        for cluster, plan in zip(problem.clusters, plans, strict=True)
    )


def _other_micro_batches(cluster: ClusterProblem, plan: ClusterPlan) -> Iterator[ClusterPlan]:
    options = cluster.micro_batch_options
    smaller = [option for option in options if option < plan.num_micro_batches]
    larger = [option for option in options if option > plan.num_micro_batches]
    for option in (*smaller[-1:], *larger[:1]):
        yield replace(plan, num_micro_batches=option)


def _without_a_device(plan: ClusterPlan) -> Iterator[ClusterPlan]:
    """Its blocks go to the device before it or to the one after it."""
    devices = range(1, len(plan.stages) - 1)
    for left in devices:
        gone = plan.stages[left]
        for heir in (left - 1, left + 1):
            if heir not in devices:
                continue
            stages = list(plan.stages)
            stages[heir] = replace(
                stages[heir],
                start_unit=min(stages[heir].start_unit, gone.start_unit),
                stop_unit=max(stages[heir].stop_unit, gone.stop_unit),
            )
            del stages[left]
            yield replace(plan, stages=tuple(stages), links=plan.links[:-1])


def _largest_window(
    problem: RoundProblem, cluster: ClusterProblem, plan: ClusterPlan, position: int
) -> int:
    stage = plan.stages[position]
    host = cluster.hosts[stage.host_id]
    size = problem.mini_batch / plan.num_micro_batches
    window = min(plan.num_micro_batches, problem.in_flight_limit or plan.num_micro_batches)
    if host.memory_bytes is not None:
        room = host.memory_bytes - host.base_bytes
        while window > 1 and (
            problem.model.memory_bytes(stage.start_unit, stage.stop_unit, window, size) > room
        ):
            window -= 1
    return window
