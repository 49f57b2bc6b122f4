"""Plans that differ from a plan by one small change.

`place_segments` may miss them, because it assumes fixed shares. With fewer links, each link would get a
larger share.
"""

import itertools
from collections.abc import Iterator
from dataclasses import replace

from collapipe.allocation.round_model.problem import (
    ClusterPlan,
    ClusterProblem,
    RoundPlan,
    RoundProblem,
)


def local_changes(problem: RoundProblem, plans: RoundPlan) -> Iterator[RoundPlan]:
    """Yields plans in which one cluster has the next larger or smaller M, one device less, or an idle device for another.

    The links keep shares and powers that fit the old plan, so the caller replaces them.
    """
    for n, (cluster, plan) in enumerate(zip(problem.clusters, plans, strict=True)):
        first, last = problem.blocks_on_control_unit, problem.blocks_on_edge_server
        takers = range(0 if first else 1, len(plan.stages) - (0 if last else 1))
        for changed in (
            *_with_other_micro_batches(cluster, plan),
            *_without_a_device(cluster, plan, takers),
            *_with_an_idle_device(cluster, plan),
        ):
            yield (*plans[:n], changed, *plans[n + 1 :])


def with_largest_windows(problem: RoundProblem, plans: RoundPlan) -> RoundPlan:
    """Gives every stage but the last one the largest window that memory and the job allow."""
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


def _with_other_micro_batches(cluster: ClusterProblem, plan: ClusterPlan) -> Iterator[ClusterPlan]:
    options = cluster.micro_batch_options
    smaller = [option for option in options if option < plan.num_micro_batches]
    larger = [option for option in options if option > plan.num_micro_batches]
    for option in (*smaller[-1:], *larger[:1]):
        yield replace(plan, num_micro_batches=option)


def _without_a_device(
    cluster: ClusterProblem, plan: ClusterPlan, takers: range
) -> Iterator[ClusterPlan]:
    """Yields plans without one device, whose blocks move to the stage before it or after it if that may take them."""
    for removed in range(1, len(plan.stages) - 1):
        before, after = plan.stages[removed - 1].host_id, plan.stages[removed + 1].host_id
        if (before, after) not in cluster.links or (after, before) not in cluster.links:
            continue
        units = plan.stages[removed]
        for taker in (removed - 1, removed + 1):
            if taker not in takers:
                continue
            stages = list(plan.stages)
            stages[taker] = replace(
                stages[taker],
                start_unit=min(stages[taker].start_unit, units.start_unit),
                stop_unit=max(stages[taker].stop_unit, units.stop_unit),
            )
            del stages[removed]
            yield replace(plan, stages=tuple(stages), links=plan.links[:-1])


def _with_an_idle_device(cluster: ClusterProblem, plan: ClusterPlan) -> Iterator[ClusterPlan]:
    """Yields plans in which an idle device takes the place of another one, if the neighbours have links to it."""
    used = {stage.host_id for stage in plan.stages}
    for position in range(1, len(plan.stages) - 1):
        for device in cluster.devices:
            stages = list(plan.stages)
            stages[position] = replace(stages[position], host_id=device.host_id)
            pairs = itertools.pairwise(stage.host_id for stage in stages)
            if device.host_id not in used and all(
                pair in cluster.links and pair[::-1] in cluster.links for pair in pairs
            ):
                yield replace(plan, stages=tuple(stages))


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
            problem.model.memory_bytes(
                stage.start_unit, stage.stop_unit, window, size, recompute=stage.recompute
            )
            > room
        ):
            window -= 1
    return window
