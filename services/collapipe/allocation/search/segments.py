"""Segments, order, micro-batches, windows and codecs of all clusters, for given shares and powers: design (13), 6 A, B and E.

Exact where every order of devices can be looked at; see `order` for more devices.
"""

import math
from collections.abc import Sequence
from dataclasses import replace

from collapipe.allocation.round_model.prediction import WINDOW_SLACK, predict, violations
from collapipe.allocation.round_model.problem import (
    ClusterPlan,
    ClusterProblem,
    RoundPlan,
    RoundProblem,
    StagePlan,
)
from collapipe.allocation.search.infeasible import why_infeasible
from collapipe.allocation.search.joint_search import ClusterChoice, search
from collapipe.allocation.search.link_tables import Offers
from collapipe.errors import InfeasibleError

LinkOffers = Sequence[Offers]
"""Share and powers of every possible link, one mapping a cluster; see `Offers`."""


def place_segments(
    problem: RoundProblem, offers: LinkOffers, *, starts: Sequence[RoundPlan] = ()
) -> RoundPlan:
    """Finds the plan that minimises design (13) for given shares and powers.

    Windows are as large as memory and the job allow while it searches, and as small as does no harm in the end.

    Args:
        problem: The round.
        offers: Share and powers of every link that may be used; their codecs do not matter.
        starts: Plans that are known, like the one in force; what is found is at least as good as each that is feasible.

    Raises:
        InfeasibleError: No plan keeps within the limits; says which one and what would be needed.
    """
    best, value = None, math.inf
    for start in starts:
        if _is_pipeline(problem, start) and not violations(problem, start):
            objective = predict(problem, start).objective
            if objective < value:
                best, value = start, objective
    found = search(problem, offers, value, _orders(problem, best))
    if found is not None:
        plans = tuple(
            _cluster_plan(problem, cluster, offer, one)
            for cluster, offer, one in zip(problem.clusters, offers, found, strict=True)
        )
        plans = _with_head_windows(problem, plans)
        if predict(problem, plans).objective < value:
            best = plans
    if best is None:
        raise InfeasibleError(why_infeasible(problem, offers))
    return with_least_windows(problem, best)


def _orders(problem: RoundProblem, best: RoundPlan | None) -> list[list[tuple[int, ...]]]:
    """Orders of devices, by index, in the plan in force and in the best one that is known."""
    orders = []
    for n, cluster in enumerate(problem.clusters):
        ids = [device.host_id for device in cluster.devices]
        plans = [cluster.previous, best[n] if best else None]
        orders.append(
            [
                tuple(ids.index(stage.host_id) for stage in plan.stages if stage.host_id in ids)
                for plan in plans
                if plan is not None
            ]
        )
    return orders


def _cluster_plan(
    problem: RoundProblem, cluster: ClusterProblem, offers: Offers, found: ClusterChoice
) -> ClusterPlan:
    """A choice in the contract's terms, with the largest windows."""
    costs, choice = found.costs, found.choice
    row, last = choice.row, problem.model.num_blocks + 1
    stops = (*choice.starts[1:], problem.model.num_blocks)
    stages = [StagePlan(cluster.control_unit.host_id, 0, 1, int(costs.entry_window[row]))]
    for device, start, stop in zip(choice.devices, choice.starts, stops, strict=True):
        window = int(costs.window[row, device, stop - start])
        host_id = cluster.devices[costs.devices[row, device]].host_id
        stages.append(StagePlan(host_id, start + 1, stop + 1, window))
    stages.append(StagePlan(cluster.edge_server.host_id, last, last + 1, 1))
    senders = (costs.num_devices, *choice.devices)
    receivers = (*choice.devices, costs.num_devices)
    links = tuple(
        replace(
            offers[stages[i].host_id, stages[i + 1].host_id],
            codec=problem.codecs[
                costs.link_codec[row, senders[i], receivers[i], choice.options[i]]
            ],
        )
        for i in range(len(senders))
    )
    return ClusterPlan(tuple(stages), int(costs.options[row]), links)


def _with_head_windows(problem: RoundProblem, plans: RoundPlan) -> RoundPlan:
    """Gives the last stages as much slack as the edge server's memory, which they share, allows.

    The model needs one micro-batch there, for a head's loop is its own compute.
    """
    head, last = problem.clusters[0].edge_server, problem.model.num_blocks + 1
    most = problem.in_flight_limit or 1 + WINDOW_SLACK
    for roomy in range(min(most, 1 + WINDOW_SLACK), 0, -1):
        windows = [
            1 if problem.update_per_micro_batch else min(roomy, plan.num_micro_batches)
            for plan in plans
        ]
        needs = [
            problem.model.memory_bytes(
                last, last + 1, window, problem.mini_batch / plan.num_micro_batches
            )
            for plan, window in zip(plans, windows, strict=True)
        ]
        if head.memory_bytes is None or head.base_bytes + sum(needs) <= head.memory_bytes:
            break
    return tuple(
        replace(plan, stages=(*plan.stages[:-1], replace(plan.stages[-1], in_flight=window)))
        for plan, window in zip(plans, windows, strict=True)
    )


def with_least_windows(problem: RoundProblem, plans: RoundPlan) -> RoundPlan:
    """Takes from each window what its cluster does not miss, so that no memory is set aside for nothing.

    Some slack stays: times are not as even as the model has them.
    """
    narrow = tuple(
        replace(plan, stages=tuple(replace(stage, in_flight=1) for stage in plan.stages))
        for plan in plans
    )
    if problem.update_per_micro_batch:
        return narrow
    now, then = predict(problem, plans), predict(problem, narrow)
    result = []
    for plan, wide, one in zip(plans, now.clusters, then.clusters, strict=True):
        stages = []
        for stage, loop in zip(plan.stages, one.stages, strict=True):
            window = 1
            while window < stage.in_flight and (
                loop.window_seconds / window > wide.bottleneck_seconds
            ):
                window += 1
            roomy = min(stage.in_flight, window + WINDOW_SLACK)
            stages.append(replace(stage, in_flight=roomy))
        result.append(replace(plan, stages=tuple(stages)))
    return tuple(result)


def _is_pipeline(problem: RoundProblem, plans: RoundPlan) -> bool:
    """Whether each plan leads from the control unit over known devices to the edge server, as the ones found here do."""
    if len(plans) != len(problem.clusters):
        return False
    for cluster, plan in zip(problem.clusters, plans, strict=True):
        first, *between, last = plan.stages
        devices = {device.host_id for device in cluster.devices}
        num_blocks = problem.model.num_blocks
        if (first.host_id, first.start_unit, first.stop_unit) != (
            cluster.control_unit.host_id,
            0,
            1,
        ) or (last.host_id, last.start_unit) != (cluster.edge_server.host_id, num_blocks + 1):
            return False
        names = [stage.host_id for stage in between]
        if len(set(names)) < len(names) or not devices.issuperset(names):
            return False
        limit = problem.in_flight_limit or plan.num_micro_batches
        if any(stage.in_flight > limit for stage in plan.stages):
            return False
    return True
