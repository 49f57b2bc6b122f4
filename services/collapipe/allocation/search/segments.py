"""Finds segments, order, micro-batches, windows and codecs of all clusters for given shares and powers.

These are steps 1 and 2 of docs/scheduling.md, "How a round is solved".
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise

from collapipe.allocation.round_model.in_flight_windows import WINDOW_SLACK, window_slack
from collapipe.allocation.round_model.limits import violations
from collapipe.allocation.round_model.prediction import parts_in_window, predict
from collapipe.allocation.round_model.problem import (
    ClusterPlan,
    ClusterProblem,
    RoundPlan,
    RoundProblem,
    StagePlan,
)
from collapipe.allocation.search.infeasible import why_infeasible
from collapipe.allocation.search.joint_search import search
from collapipe.allocation.search.link_tables import AssumedLinks
from collapipe.allocation.search.pareto_front import PipelineChoice
from collapipe.errors import InfeasibleError, InvalidInputError

MOST_DEVICES = 40
"""The search numbers sets of devices with 64 bits, together with rows, blocks and devices."""


def place_segments(
    problem: RoundProblem,
    assumed_links: Sequence[AssumedLinks],
    *,
    starts: Sequence[RoundPlan] = (),
    is_late: Callable[[], bool] = lambda: False,
) -> RoundPlan:
    """Finds the plans that minimise docs/scheduling.md (13) for given shares and powers.

    During the search, windows are as large as memory and the job allow. The result has the smallest windows
    that cost no time, and a little slack.

    Args:
        assumed_links: For each cluster, every link that may be used. Their codecs do not matter.
        starts: Known plans, like those of the previous round. The result is at least as good as each feasible
            one.
        is_late: Returns whether to end soon with the best plans so far.

    Raises:
        InvalidInputError: A cluster has more than `MOST_DEVICES` devices.
        InfeasibleError: No plan keeps the limits. The message says which limit, and what to change.
    """
    for index, cluster in enumerate(problem.clusters):
        if len(cluster.devices) > MOST_DEVICES:
            raise InvalidInputError(
                f"cluster {index} has {len(cluster.devices)} devices, and dssra decides for at most {MOST_DEVICES}: split "
                "the cluster"
            )
    best, value = None, math.inf
    for start in starts:
        if _is_pipeline(problem, start) and not violations(problem, start):
            objective = predict(problem, start).objective
            if objective < value:
                best, value = start, objective
    found = search(problem, assumed_links, best, is_late)
    if found is not None:
        plans = tuple(
            _cluster_plan(problem, cluster, assumed, choice)
            for cluster, assumed, choice in zip(problem.clusters, assumed_links, found, strict=True)
        )
        plans = _with_head_windows(problem, plans)
        if predict(problem, plans).objective < value:
            best = plans
    if best is None:
        raise InfeasibleError(why_infeasible(problem, assumed_links))
    return with_least_windows(problem, best)


def _cluster_plan(
    problem: RoundProblem,
    cluster: ClusterProblem,
    assumed: AssumedLinks,
    choice: PipelineChoice | ClusterPlan,
) -> ClusterPlan:
    """Converts a choice to a plan with the largest windows. A known plan stays as it is."""
    if isinstance(choice, ClusterPlan):
        return choice
    costs, row, head = choice.costs, choice.row, problem.model.num_blocks + 1
    first, num_slices = choice.starts[0], int(costs.num_slices[row])
    window = _in_micro_batches(int(costs.first.window[row, first]), num_slices)
    name, recompute = cluster.control_unit.host_id, problem.recomputes_by_default
    stages = [StagePlan(name, 0, first + 1, window, recompute)]
    for device, (start, stop), c in zip(
        choice.devices, pairwise(choice.starts), choice.options, strict=True
    ):
        parts = int(costs.window[row, device, start % problem.model.period, stop - start, c])
        window = _in_micro_batches(parts, num_slices)
        host_id = cluster.devices[device].host_id
        recompute = problem.recompute_options[c]
        stages.append(StagePlan(host_id, start + 1, stop + 1, window, recompute))
    stages.append(StagePlan(cluster.edge_server.host_id, choice.starts[-1] + 1, head + 1, 1))
    senders = (costs.num_devices, *choice.devices)
    receivers = (*choice.devices, costs.num_devices)
    links = tuple(
        replace(
            assumed[stages[i].host_id, stages[i + 1].host_id],
            codec=problem.codecs[costs.link_codec[row, senders[i], receivers[i], choice.codecs[i]]],
        )
        for i in range(len(senders))
    )
    upload_codec = cluster.upload_codecs[costs.upload_codec[row]]
    return ClusterPlan(
        tuple(stages),
        int(costs.num_micro_batches[row]),
        links,
        upload_codec,
        num_slices=num_slices,
    )


def _in_micro_batches(window: int, num_slices: int) -> int:
    """Returns a window in micro-batches: the inverse of `parts_in_window`."""
    return 1 + (window - 1) // num_slices


def _with_head_windows(problem: RoundProblem, plans: RoundPlan) -> RoundPlan:
    """Gives the last stages as much slack as the memory of the edge server allows, which all clusters share.

    One micro-batch would be enough for the model, because the loop of a head is only its own compute time.
    """
    head = problem.clusters[0].edge_server
    most = problem.in_flight_limit or 1 + WINDOW_SLACK
    for roomy in range(min(most, 1 + WINDOW_SLACK), 0, -1):
        windows = [
            1 if problem.update_per_micro_batch else min(roomy, plan.num_micro_batches)
            for plan in plans
        ]
        needs = [
            problem.model.memory_bytes(
                plan.stages[-1].start_unit,
                plan.stages[-1].stop_unit,
                window,
                problem.mini_batch / plan.num_micro_batches,
                num_slices=plan.num_slices,
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
    """Reduces each window to the smallest one that keeps the cluster's bottleneck, plus `WINDOW_SLACK`.

    A larger window would only reserve memory. Real times vary more than those of the model, so some slack
    stays.
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
                loop.window_seconds / parts_in_window(window, plan.num_slices)
                > wide.bottleneck_seconds
            ):
                window += 1
            slack = window_slack(loop.deferred_seconds, plan.num_slices)
            roomy = min(stage.in_flight, window + slack)
            stages.append(replace(stage, in_flight=roomy))
        result.append(replace(plan, stages=tuple(stages)))
    return tuple(result)


def _is_pipeline(problem: RoundProblem, plans: RoundPlan) -> bool:
    """Returns whether the search could find plans of this form."""
    if len(plans) != len(problem.clusters):
        return False
    head = problem.model.num_blocks + 1
    for cluster, plan in zip(problem.clusters, plans, strict=True):
        if len(plan.stages) < 2:
            return False
        first, *between, last = plan.stages
        if (first.host_id, last.host_id) != (
            cluster.control_unit.host_id,
            cluster.edge_server.host_id,
        ) or not first.stop_unit >= 1 <= last.start_unit <= head:
            return False
        if (first.stop_unit > 1 and not problem.blocks_on_control_unit) or (
            last.start_unit < head and not problem.blocks_on_edge_server
        ):
            return False
        names = [stage.host_id for stage in between]
        devices = {device.host_id for device in cluster.devices}
        if len(set(names)) < len(names) or not devices.issuperset(names):
            return False
        limit = problem.in_flight_limit or plan.num_micro_batches
        if any(stage.in_flight > limit for stage in plan.stages):
            return False
    return True
