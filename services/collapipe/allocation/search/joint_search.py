"""Finds the best plans of all clusters: a Pareto front for each cluster, then one plan from each front.

The front of a cluster leaves out plans that could not beat the best known decision, even if all other
clusters had their best plans.
"""

import math
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple, TypeVar

import numpy as np

from collapipe.allocation.round_model.prediction import (
    RoundPrediction,
    other_edge_seconds,
    predict,
)
from collapipe.allocation.round_model.problem import ClusterPlan, RoundPlan, RoundProblem
from collapipe.allocation.search.arrays import Floats
from collapipe.allocation.search.joint_clusters import (
    Candidates,
    Chosen,
    choose,
    fair_weights,
    least_other_loads,
)
from collapipe.allocation.search.labels import first_labels, least_costs
from collapipe.allocation.search.link_tables import AssumedLinks
from collapipe.allocation.search.pareto_front import (
    ParetoFront,
    PipelineChoice,
    front_of_known_plan,
    pareto_front,
)
from collapipe.allocation.search.search_tables import SearchTables, search_tables
from collapipe.allocation.search.segment_bounds import cluster_bounds, with_weight
from collapipe.allocation.search.segment_costs import ClusterCosts, cluster_costs

FIRST_WIDTH = 50
"""Labels of each row and layer in the first, narrow search."""
_WIDTH = 20_000
"""Labels of each row and layer in the full search. In the measured clusters of up to `EXACT_DEVICES` devices there are
fewer, so the search is exact."""
EXACT_DEVICES = 12
_WIDTH_OF_MANY_DEVICES = 500
_NUM_CELLS = 16
_SLACK = 0.03
"""The first search keeps plans up to this part above the upper bound, to find better fair weights."""
_ROUNDING = 1e-11
EXACT_CLUSTERS = 3
"""Up to this number of clusters, the search is exact, if `choose` is."""
_WIDTH_OF_MANY_CLUSTERS = 300
"""Width of the second search with more clusters. It assumes the load of the edge server that the first led to."""
_LOAD_TOLERANCE = 1e-3

_Input = TypeVar("_Input")
_Output = TypeVar("_Output")


def search(
    problem: RoundProblem,
    assumed_links: Sequence[AssumedLinks],
    known: RoundPlan | None,
    is_late: Callable[[], bool],
) -> list[PipelineChoice | ClusterPlan] | None:
    """Finds the best plans of all clusters that beat a known decision, or `None` if nothing beats it.

    A cluster may keep its known plan.

    The first search keeps few labels. It finds a good decision, and how each cluster can trade delay for
    energy. This gives the time weights with which the bounds of the second, full search are tightest.

    All clusters load the edge server. With few clusters, the bounds assume the least load by the other clusters, so
    no best plan is lost. With more, each search assumes the load of the last decision.

    Args:
        known: Plans of the form that the search finds, within the limits.
        is_late: Returns whether to end soon. A late search keeps very few labels, and another one begins only if there
            are no plans. If there is a known decision, the function returns `None` when it is late before the first
            search.
    """
    if not all(cluster.devices for cluster in problem.clusters):
        return None
    tabulated = []
    for cluster, assumed in zip(problem.clusters, assumed_links, strict=True):
        if known and is_late():
            return None
        costs = cluster_costs(problem, cluster, assumed, one_cluster=len(assumed_links) == 1)
        tabulated.append(_Tabulated(costs, search_tables(costs)))
    tables = [one.costs for one in tabulated]
    if any(not costs.num_rows for costs in tables):
        return None
    prediction = predict(problem, known) if known else None
    upper_bound = prediction.objective if prediction else math.inf
    upper_bound -= problem.penalty_weight * problem.fixed_seconds / problem.reference_seconds
    weights = (1.0,) if all(_has_only_delays(costs) for costs in tables) else (1.0, 0.0)
    few = len(tables) <= EXACT_CLUSTERS
    other_loads = least_other_loads([costs.head_load for costs in tables])
    searches = _searches(tabulated, other_loads, weights)
    fronts: list[ParetoFront] | None = None
    if known and prediction and not few and len(weights) == 1:
        fronts = _known_fronts(problem, tables, known, prediction)
    chosen: Chosen | None = None
    found: list[PipelineChoice | ClusterPlan] | None = None
    for width in (FIRST_WIDTH, _WIDTH) if few else (FIRST_WIDTH, _WIDTH_OF_MANY_CLUSTERS, _WIDTH):
        has_plans = bool(known or found)
        if has_plans and (is_late() or (width == _WIDTH and not few)):
            break
        if fronts and chosen and not few:
            before, other_loads = other_loads, _other_loads(fronts, chosen)
            if not np.allclose(before, other_loads, rtol=_LOAD_TOLERANCE):
                searches = _searches(tabulated, other_loads, weights)
        if fronts and len(weights) > 1:
            _set_fair_weights(searches, fronts)
        slack = _SLACK * abs(upper_bound) if width == FIRST_WIDTH else 0.0
        found_fronts = _fronts(
            problem,
            searches,
            upper_bound + slack,
            width,
            None if few else fronts,
            is_late if has_plans or width == FIRST_WIDTH else lambda: False,
        )
        if found_fronts is None:
            continue
        fronts = found_fronts
        chosen = _choose(problem, fronts, upper_bound)
        if chosen is not None:
            upper_bound = chosen.value
            found = [front.choice(index) for front, index in zip(fronts, chosen.plans, strict=True)]
        if few and all(front.complete for front in fronts):
            break
    return found


def _other_loads(fronts: Sequence[ParetoFront], chosen: Chosen) -> Floats:
    """Returns the load of the edge server by all other clusters, for each cluster."""
    loads = [front.head_loads()[i] for front, i in zip(fronts, chosen.plans, strict=True)]
    return np.asarray(sum(loads) - np.array(loads))


def _set_fair_weights(searches: Sequence["_ClusterSearch"], fronts: Sequence[ParetoFront]) -> None:
    """Adds bounds for the weights with which each cluster can trade delay for energy."""
    fair = fair_weights([(front.delay_costs(), front.plans["summed_cost"]) for front in fronts])
    _in_parallel(lambda n: searches[n].set_fair_weight(fair[n]), range(len(fair)))


def _known_fronts(
    problem: RoundProblem,
    tables: Sequence[ClusterCosts],
    known: RoundPlan,
    prediction: RoundPrediction,
) -> list[ParetoFront] | None:
    """Returns a front for each known plan, if only delays count; `None` if a plan has no row in its table."""
    fronts, others = [], other_edge_seconds(problem, known)
    for n, (costs, plan) in enumerate(zip(tables, known, strict=True)):
        cluster, predicted = problem.clusters[n], prediction.clusters[n]
        codec = cluster.upload_codecs.index(plan.upload_codec)
        rows = np.flatnonzero(
            (costs.num_micro_batches == plan.num_micro_batches)
            & (costs.num_slices == plan.num_slices)
            & (costs.upload_codec == codec)
        )
        if not len(rows):
            return None
        row = int(rows[0])
        bottleneck = max(
            max(max(stage.compute_seconds, stage.window_seconds) for stage in predicted.stages),
            max(link.load_seconds for link in predicted.links),
        )
        delay_cost = problem.penalty_weight / problem.reference_seconds * predicted.round_seconds
        delay_cost -= costs.bottleneck_price[row] * predicted.bottleneck_seconds
        if plan.num_parts == 1:
            delay_cost -= costs.load_price[row] * others[n]
        fronts.append(front_of_known_plan(costs, plan, row, float(delay_cost), bottleneck))
    return fronts


def _has_only_delays(costs: ClusterCosts) -> bool:
    """Returns whether all plans of a cluster have the same summed cost, 0."""
    tables = (
        costs.fixed_summed_cost,
        costs.first.summed_cost,
        costs.last.summed_cost,
        costs.segment_summed_cost,
        costs.link_summed_cost,
    )
    return not any(np.any(table) for table in tables)


class _Tabulated(NamedTuple):
    costs: ClusterCosts
    tables: SearchTables


class _ClusterSearch:
    """The search of one cluster: its tables and their bounds, for a load of the edge server by the other clusters."""

    def __init__(
        self, tabulated: _Tabulated, other_load: float, time_weights: tuple[float, ...]
    ) -> None:
        self.fair_weight: float | None = None
        self.costs, self.tables = tabulated.costs, tabulated.tables
        self.other_load = other_load
        self.least_bottleneck = self.costs.edge_bottleneck(other_load)
        self._bounds = cluster_bounds(
            self.costs, self.tables, self.least_bottleneck, _NUM_CELLS, time_weights
        )
        self.bounds = self._bounds

    def set_fair_weight(self, time_weight: float) -> None:
        """Adds bounds for the fair weight."""
        self.fair_weight, self.bounds = time_weight, self._bounds
        if time_weight not in (0.0, 1.0):
            self.bounds = with_weight(self.tables, self._bounds, time_weight)

    def fastest(self, front: ParetoFront) -> float:
        """Returns the least delay cost of the plans of a front."""
        plans = front.plans
        row, last = plans["row"], plans["last"]
        bottleneck = np.maximum(plans["bottleneck"], self.least_bottleneck[row, last])
        delays = plans["delay_cost"] + self.costs.bottleneck_price[row] * bottleneck
        return float(np.min(delays))

    def least_costs(self) -> dict[float, float]:
        """Returns lower bounds on the weighted cost of every plan, by time weight."""
        first = first_labels(self.costs, self.least_bottleneck)
        least = least_costs(self.tables, self.bounds, first)
        return dict(zip(self.bounds.weights.tolist(), least.tolist(), strict=True))


def _searches(
    tabulated: Sequence[_Tabulated], other_loads: Floats, time_weights: tuple[float, ...]
) -> list[_ClusterSearch]:
    return _in_parallel(
        lambda n: _ClusterSearch(tabulated[n], float(other_loads[n]), time_weights),
        range(len(tabulated)),
    )


def _fronts(
    problem: RoundProblem,
    searches: Sequence[_ClusterSearch],
    upper_bound: float,
    width: int,
    known: Sequence[ParetoFront] | None,
    is_late: Callable[[], bool],
) -> list[ParetoFront] | None:
    """Finds the front of each cluster; returns `None` as soon as nothing can be better than `upper_bound`.

    The function starts with the slowest cluster, or with the largest fair weight. A complete front tightens the
    limits of the others. So batches of 1, 2, 4 and more clusters follow each other, on any number of processors, and
    those of a batch are searched in parallel. If only delays matter, a cluster keeps its known front if that is fast
    enough.
    """
    if math.isfinite(upper_bound):
        upper_bound -= _ROUNDING * abs(upper_bound)
    least = [one.least_costs() for one in searches]
    most_other_loads = _most_other_loads(problem, searches)
    error_limits = _error_limits(problem, [one.costs for one in searches])
    only_delays = known is not None and most_other_loads[0] is not None
    delays = [
        one.fastest(known[n]) if known and only_delays else one.fair_weight or 0.0
        for n, one in enumerate(searches)
    ]

    def front_of(n: int) -> ParetoFront:
        one = searches[n]
        others = [i for i in range(len(searches)) if i != n]
        limits = _limits(
            one, [searches[i] for i in others], [least[i] for i in others], upper_bound
        )
        by_weight = [[limits[weight]] for weight in one.bounds.weights.tolist()]
        bounds = one.bounds._replace(limits=np.repeat(by_weight, one.costs.num_rows, axis=1))
        return pareto_front(
            one.costs,
            one.tables,
            one.least_bottleneck,
            bounds,
            error_limits[n],
            width=min(width, _WIDTH_OF_MANY_DEVICES)
            if one.costs.num_devices > EXACT_DEVICES
            else width,
            is_late=is_late,
            most_other_load=most_other_loads[n],
        )

    fronts = dict(enumerate(known)) if known and only_delays else {}
    slowest = -math.inf
    rest, size = sorted(range(len(searches)), key=lambda n: -delays[n]), 1
    while rest:
        batch, rest, size = rest[:size], rest[size:], 2 * size
        batch = [n for n in batch if n not in fronts or delays[n] > slowest]
        for n, front in zip(batch, _in_parallel(front_of, batch), strict=True):
            if not len(front.plans):
                return None
            fronts[n] = front
            slowest = max(slowest, searches[n].fastest(front))
            if front.complete:
                time, cost = front.delay_costs(), front.plans["summed_cost"]
                for weight, least_cost in least[n].items():
                    least[n][weight] = max(least_cost, float(np.min(weight * time + cost)))
    return [fronts[n] for n in range(len(searches))]


def _in_parallel(function: Callable[[_Input], _Output], inputs: Sequence[_Input]) -> list[_Output]:
    """Applies a function to each input, on all processors of the process: compiled functions release the interpreter."""
    affinity = getattr(os, "sched_getaffinity", None)
    num_threads = min(len(inputs), len(affinity(0)) if affinity else os.cpu_count() or 1)
    if num_threads < 2:
        return list(map(function, inputs))
    with ThreadPoolExecutor(num_threads) as pool:
        return list(pool.map(function, inputs))


def _limits(
    one: _ClusterSearch,
    others: Sequence[_ClusterSearch],
    least: Sequence[dict[float, float]],
    upper_bound: float,
) -> dict[float, float]:
    """Returns the largest weighted cost that a plan of one cluster may have, for each time weight.

    The largest delay cost is at least any weighted mean of all delay costs. Three means give limits: only
    this cluster's delay counts, only the delay of one other cluster counts, or all count with their fair
    weights. `least` has the least weighted cost of each other cluster for each time weight.
    """
    if one.bounds.weights.tolist() == [1.0]:
        return {1.0: upper_bound}
    cheapest = sum(costs[0.0] for costs in least)
    limits = {
        1.0: upper_bound - cheapest,
        0.0: upper_bound - cheapest - max(costs[1.0] - costs[0.0] for costs in least),
    }
    if one.fair_weight is not None:
        fair = sum(
            costs[other.fair_weight]
            for other, costs in zip(others, least, strict=True)
            if other.fair_weight is not None
        )
        limits[one.fair_weight] = min(limits.get(one.fair_weight, math.inf), upper_bound - fair)
    return limits


def _most_other_loads(
    problem: RoundProblem, searches: Sequence[_ClusterSearch]
) -> list[float | None]:
    """Returns the largest load of the edge server by all other clusters, if only the fastest plans matter.

    Otherwise a slower plan may cost less, or leave more of something that the clusters share. Then the entries are
    `None`.
    """
    loads = [one.costs.head_load for one in searches]
    finite = [load[np.isfinite(load)] for load in loads]
    bytes_ = sum(float(np.max(one.costs.head_bytes[one.costs.last.window > 0])) for one in searches)
    if (
        any(not _has_only_delays(one.costs) for one in searches)
        or math.isfinite(problem.convergence.limit)
        or bytes_ > _edge_memory(problem)
    ):
        return [None] * len(searches)
    if len(searches) > EXACT_CLUSTERS or len(searches) == 1:
        return [one.other_load for one in searches]
    if any(len(np.unique(row[np.isfinite(row)])) > 1 for load in loads for row in load):
        return [None] * len(searches)
    most = [float(np.max(load)) for load in finite]
    return [sum(most) - own for own in most]


def _edge_memory(problem: RoundProblem) -> float:
    """Returns what the edge server may use for the last stages of all clusters, in bytes."""
    edge_server = problem.clusters[0].edge_server
    if edge_server.memory_bytes is None:
        return math.inf
    return edge_server.memory_bytes - edge_server.base_bytes


def _error_limits(problem: RoundProblem, tables: Sequence[ClusterCosts]) -> list[Floats]:
    """Returns for each row of each cluster what the errors of codecs may add to the convergence term."""
    limit = problem.convergence.limit
    if math.isinf(limit):
        return [np.full(costs.num_rows, math.inf) for costs in tables]
    least = [float(np.min(costs.convergence_term)) for costs in tables]
    return [
        limit * (1 + 1e-9) - costs.convergence_term - (sum(least) - own)
        for costs, own in zip(tables, least, strict=True)
    ]


def _choose(
    problem: RoundProblem, fronts: Sequence[ParetoFront], upper_bound: float
) -> Chosen | None:
    """Chooses one plan of each front, within the limits that the clusters share."""
    candidates = []
    for front in fronts:
        costs, plans, row = front.costs, front.plans, front.plans["row"]
        candidates.append(
            Candidates(
                delay_cost=plans["delay_cost"],
                bottleneck_price=costs.bottleneck_price[row],
                bottleneck=plans["bottleneck"],
                load_price=costs.load_price[row],
                last_seconds=costs.last.seconds[row, plans["last"]],
                summed_cost=plans["summed_cost"],
                head_load=front.head_loads(),
                uses=np.stack(
                    [
                        costs.convergence_term[row] + plans["error"],
                        costs.head_bytes[row, plans["last"]],
                    ]
                ),
            )
        )
    limits = np.array([problem.convergence.limit * (1 + 1e-9), _edge_memory(problem)])
    return choose(candidates, limits, upper_bound)
