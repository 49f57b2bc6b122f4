"""The rule for in-flight windows: how many forward micro-batches a stage may hold.

A stage starts with the classical window of 1F1B. It gets the window that its latency loop needs, docs/scheduling.md
(4), and some slack, if that is wider, as far as memory and the job allow. Before the first round of a job no
transfer has been measured. The classical window then stands for the need. All strategies but `dssra` use this
rule. `dssra` chooses windows together with the segments, and adds the same slack.
"""

import math
from dataclasses import replace

from collapipe.allocation.round_model.prediction import (
    deferred_seconds,
    latency_loops,
    link_seconds,
    stage_memory_bytes,
    stage_seconds,
)
from collapipe.allocation.round_model.problem import ClusterPlan, ClusterProblem, RoundProblem

WINDOW_SLACK = 2
"""Micro-batches that a window gets beyond the need of docs/scheduling.md (4).

Without slack, one delay of a stage starves the next stage. Event simulation shows up to 18 % longer
mini-batches on wires than with windows that hold every micro-batch.
"""

_DEFERRED_SLACK = 2
"""Micro-batches that a window gets for deferred gradients of weights.

In the event simulation of the scenario `heterogeneous`, they make a round of `proportional` 2.1 % shorter, and windows
that hold every micro-batch only 0.4 % more.
"""

_ROUNDING = 1e-9
"""Excess over a whole number of micro-batches that is taken for a rounding error."""


def classical_window(problem: RoundProblem, num_micro_batches: int, num_segments: int) -> int:
    """Returns the window of 1F1B, or the window that the job sets in its place.

    `num_segments` counts the segments from this stage on. The head follows them.
    """
    return min(num_micro_batches, problem.in_flight_limit or num_segments + 1)


def window_slack(deferred_seconds: float, num_slices: int = 1) -> int:
    """Returns the micro-batches that a window gets beyond its need, for a stage that defers so much of each.

    With slices, it gets as many slices, rounded up to micro-batches.
    """
    return math.ceil((WINDOW_SLACK + (_DEFERRED_SLACK if deferred_seconds else 0)) / num_slices)


def widen_windows(problem: RoundProblem, cluster: ClusterProblem, plan: ClusterPlan) -> ClusterPlan:
    """Widens each window to the need of its latency loop and the slack, as far as memory and the job allow."""
    size, num_slices = problem.mini_batch / plan.num_parts, plan.num_slices
    computes = stage_seconds(problem, cluster, plan)
    # A link of token ids counts as if it carried activations. Its window may then be larger than needed.
    links = [
        link_seconds(problem, cluster, sender.host_id, receiver.host_id, link, size)
        for sender, receiver, link in zip(plan.stages, plan.stages[1:], plan.links, strict=False)
    ]
    bottleneck = max([*computes, *(link.load_seconds for link in links)])
    if not math.isfinite(bottleneck):
        return plan
    is_measured = bottleneck > 0 and any(link.loop_seconds for link in links)
    limit = min(plan.num_micro_batches, problem.in_flight_limit or plan.num_micro_batches)
    stages = list(plan.stages)
    deferred = deferred_seconds(problem, cluster, plan)
    for k, loop in enumerate(latency_loops(computes, deferred, links)[:-1]):
        stage, host = stages[k], cluster.hosts[stages[k].host_id]
        needed = stage.in_flight
        if is_measured:  # in micro-batches: the inverse of `parts_in_window`
            needed = 1 + math.ceil((math.ceil(loop / bottleneck - _ROUNDING) - 1) / num_slices)
        roomy = min(limit, needed + window_slack(deferred[k], num_slices))
        for window in range(roomy, stage.in_flight, -1):
            widened = replace(stage, in_flight=window)
            memory = stage_memory_bytes(problem, host, widened, plan.num_micro_batches, num_slices)
            if host.memory_bytes is None or memory <= host.memory_bytes:
                stages[k] = widened
                break
    return replace(plan, stages=tuple(stages))
