"""Plans that differ from a plan by one small change.

`place_segments` may miss them, because it assumes fixed shares. With fewer links, each link would get a
larger share.
"""

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from collapipe.allocation.round_model.problem import (
    ClusterPlan,
    ClusterProblem,
    RoundPlan,
    RoundProblem,
    StagePlan,
)


def local_changes(
    problem: RoundProblem, plans: RoundPlan, changing: Iterable[int]
) -> Iterator[RoundPlan]:
    """Yields plans in which one of the clusters `changing` differs by one change.

    It has the next larger or smaller M, one device less, an idle device in the place of another one, or one block on
    the stage before or after. The links keep shares and powers that fit the old plan, so the caller replaces them.
    """
    for n in changing:
        cluster, plan = problem.clusters[n], plans[n]
        first, last = problem.blocks_on_control_unit, problem.blocks_on_edge_server
        takers = range(0 if first else 1, len(plan.stages) - (0 if last else 1))
        for changed in (
            *_with_other_micro_batches(cluster, plan),
            *_without_a_device(cluster, plan, takers),
            *_with_an_idle_device(cluster, plan),
            *_with_a_moved_block(plan, takers),
        ):
            for wanted in (changed, *_with_other_recomputation(problem, plan, changed)):
                yield (*plans[:n], wanted, *plans[n + 1 :])


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
    """Yields plans in which one of two neighbours, or an idle device, takes the blocks of both."""
    ends, idle = {plan.stages[0].host_id, plan.stages[-1].host_id}, _idle(cluster, plan)
    able = {*idle, *(plan.stages[k].host_id for k in takers)}
    for k, (one, other) in enumerate(itertools.pairwise(plan.stages)):
        staying = ends & {one.host_id, other.host_id}
        names = staying or {one.host_id, other.host_id, *idle}
        for name in sorted(names & able if len(staying) < 2 else ()):
            kept = one if name == one.host_id else other
            merged = replace(
                kept, host_id=name, start_unit=one.start_unit, stop_unit=other.stop_unit
            )
            stages = (*plan.stages[:k], merged, *plan.stages[k + 2 :])
            if _is_linked(cluster, stages):
                yield replace(plan, stages=stages, links=plan.links[:-1])


def _with_a_moved_block(plan: ClusterPlan, takers: range) -> Iterator[ClusterPlan]:
    """Yields plans in which a stage gets one block of the stage before it or after it."""
    for first, second in itertools.pairwise(takers):
        stages = list(plan.stages)
        for blocks in (-1, 1):
            cut = stages[first].stop_unit + blocks
            if stages[first].start_unit < cut < stages[second].stop_unit:
                moved = list(stages)
                moved[first] = replace(stages[first], stop_unit=cut)
                moved[second] = replace(stages[second], start_unit=cut)
                yield replace(plan, stages=tuple(moved))


def _with_other_recomputation(
    problem: RoundProblem, plan: ClusterPlan, changed: ClusterPlan
) -> Iterator[ClusterPlan]:
    """Yields plans in which a device whose stage has changed recomputes if it did not, or the other way round."""
    if len(problem.recompute_options) == 1:
        return
    for k, stage in enumerate(changed.stages[1:-1], start=1):
        if stage not in plan.stages:
            stages = list(changed.stages)
            stages[k] = replace(stage, recompute=not stage.recompute)
            yield replace(changed, stages=tuple(stages))


def _with_an_idle_device(cluster: ClusterProblem, plan: ClusterPlan) -> Iterator[ClusterPlan]:
    """Yields plans in which an idle device takes the place of another one."""
    for position, name in itertools.product(range(1, len(plan.stages) - 1), _idle(cluster, plan)):
        stages = list(plan.stages)
        stages[position] = replace(stages[position], host_id=name)
        if _is_linked(cluster, stages):
            yield replace(plan, stages=tuple(stages))


def _idle(cluster: ClusterProblem, plan: ClusterPlan) -> list[str]:
    used = {stage.host_id for stage in plan.stages}
    return [device.host_id for device in cluster.devices if device.host_id not in used]


def _is_linked(cluster: ClusterProblem, stages: Sequence[StagePlan]) -> bool:
    pairs = itertools.pairwise(stage.host_id for stage in stages)
    return all(pair in cluster.links and pair[::-1] in cluster.links for pair in pairs)


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
                stage.start_unit,
                stage.stop_unit,
                window,
                size,
                num_slices=plan.num_slices,
                recompute=stage.recompute,
            )
            > room
        ):
            window -= 1
    return window
