"""Finds the best plans of all clusters: a Pareto front for each cluster, then one plan from each front.

The front of a cluster leaves out plans that could not beat the best known decision, even if all other
clusters had their best plans.
"""

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from collapipe.allocation.round_model.problem import RoundProblem
from collapipe.allocation.search.arrays import Floats
from collapipe.allocation.search.device_order import promising_rows
from collapipe.allocation.search.joint_clusters import (
    Candidates,
    Chosen,
    choose,
    fair_weights,
    least_other_loads,
)
from collapipe.allocation.search.link_tables import AssumedLinks
from collapipe.allocation.search.pareto_front import ParetoFront, PipelineChoice, pareto_front
from collapipe.allocation.search.segment_bounds import (
    Bound,
    Bounds,
    bottleneck_grid,
    cluster_bounds,
)
from collapipe.allocation.search.segment_costs import ClusterCosts, cluster_costs

EXACT_DEVICES = 6
"""Up to this number of devices the search compares all orders of the devices, and is exact."""
FIRST_WIDTH = 50
"""Labels of each row and layer in the first, narrow search."""

_WIDTH = 200
"""Labels of each row and layer in the full search with more than `EXACT_DEVICES` devices."""
_NUM_CELLS = 24
_SLACK = 0.03
"""The first search keeps plans up to this part above the upper bound, to find better fair weights."""
_ROUNDING = 1e-11

Order = tuple[int, ...]
"""Devices by their index in the order of registration."""


def search(
    problem: RoundProblem,
    assumed_links: Sequence[AssumedLinks],
    upper_bound: float,
    orders: Sequence[Sequence[Order]],
) -> list[PipelineChoice] | None:
    """Finds the best plans of all clusters that beat a known decision, or `None` if nothing beats it.

    The first search keeps few labels. It finds a good decision, and how each cluster can trade delay for
    energy. This gives the time weights with which the bounds of the second, full search are tightest.

    Args:
        upper_bound: Objective of the known decision; infinite if there is none.
        orders: Orders of devices in known plans of each cluster.
    """
    upper_bound -= problem.penalty_weight * problem.fixed_seconds / problem.reference_seconds
    one_cluster = len(problem.clusters) == 1
    tables = [
        cluster_costs(problem, cluster, assumed, one_cluster=one_cluster)
        for cluster, assumed in zip(problem.clusters, assumed_links, strict=True)
    ]
    if any(not costs.num_rows for costs in tables):
        return None
    searches = [
        _ClusterSearch(
            costs,
            least_bottleneck,
            (1.0,) if one_cluster else (1.0, 0.0),
            known,
            improve_orders=math.isinf(upper_bound),
        )
        for costs, least_bottleneck, known in zip(
            tables, _least_bottlenecks(tables), orders, strict=True
        )
    ]
    found: list[PipelineChoice] | None = None
    for final in (False, True):
        slack = 0.0 if final or math.isinf(upper_bound) else _SLACK * abs(upper_bound)
        fronts = _fronts(problem, searches, upper_bound + slack, final=final)
        if fronts is None:
            for one in searches:
                one.improve_orders(1.0)
            continue
        chosen = _choose(problem, fronts, upper_bound)
        if chosen is not None:
            upper_bound = chosen.value
            found = [front.choice(index) for front, index in zip(fronts, chosen.plans, strict=True)]
        if final or all(
            one.exact and front.complete for one, front in zip(searches, fronts, strict=True)
        ):
            break
        weights = fair_weights([(front.delay_costs(), front.plans.summed_cost) for front in fronts])
        for n, one in enumerate(searches):
            one.set_fair_weight(weights[n], [found[n].order] if found else [])
    return found


class _ClusterSearch:
    """The search of one cluster: the tables of the orders that it compares, and their bounds."""

    def __init__(
        self,
        costs: ClusterCosts,
        least_bottleneck: Floats,
        time_weights: tuple[float, ...],
        orders: Sequence[Order],
        *,
        improve_orders: bool,
    ) -> None:
        self.exact = costs.num_devices <= EXACT_DEVICES
        self.fair_weight: float | None = None
        self._registered = costs, least_bottleneck
        self._time_weights, self._orders = time_weights, list(orders)
        self.costs, self.least_bottleneck, self.bounds = self._tables(1.0, improve_orders)

    def set_fair_weight(self, time_weight: float, orders: Sequence[Order]) -> None:
        """Adds bounds for the fair weight, and looks for orders that are good with it."""
        self._orders.extend(orders)
        self.improve_orders(time_weight)
        self.fair_weight = time_weight
        self.bounds = self.bounds.with_first_weight(self.costs, time_weight)

    def improve_orders(self, time_weight: float) -> None:
        """Looks for better orders, if the search does not compare all orders anyway."""
        if not self.exact:
            self.costs, self.least_bottleneck, self.bounds = self._tables(time_weight, True)

    def _tables(
        self, time_weight: float, improve_orders: bool
    ) -> tuple[ClusterCosts, Floats, Bounds]:
        costs, least_bottleneck = self._registered
        if not self.exact:
            costs, least_bottleneck = promising_rows(
                costs, least_bottleneck, time_weight, self._orders, improve=improve_orders
            )
        grid = bottleneck_grid(costs, least_bottleneck, _NUM_CELLS)
        bounds = cluster_bounds(costs, grid, self._time_weights, in_order=not self.exact)
        return costs, least_bottleneck, bounds


def _fronts(
    problem: RoundProblem, searches: Sequence[_ClusterSearch], upper_bound: float, *, final: bool
) -> list[ParetoFront] | None:
    """Finds the front of each cluster; returns `None` as soon as nothing can be better than `upper_bound`.

    The function starts with the cluster that has the largest fair weight. A complete front tightens the
    limits of the others.
    """
    if math.isfinite(upper_bound):
        upper_bound -= _ROUNDING * abs(upper_bound)
    least = [
        {bound.time_weight: _least_cost(one.costs, bound) for bound in one.bounds.weighted}
        for one in searches
    ]
    error_limits = _error_limits(problem, [one.costs for one in searches])
    fronts: dict[int, ParetoFront] = {}
    for n in sorted(range(len(searches)), key=lambda n: -(searches[n].fair_weight or 0.0)):
        one = searches[n]
        others = [i for i in range(len(searches)) if i != n]
        limits = _limits(
            one, [searches[i] for i in others], [least[i] for i in others], upper_bound
        )
        weighted = tuple(
            replace(bound, limit=limits[bound.time_weight]) for bound in one.bounds.weighted
        )
        width = (None if one.exact else _WIDTH) if final else FIRST_WIDTH
        front = pareto_front(
            one.costs,
            one.least_bottleneck,
            replace(one.bounds, weighted=weighted),
            error_limits[n],
            width=width,
        )
        if not len(front.plans):
            return None
        fronts[n] = front
        if front.complete:
            time, cost = front.delay_costs(), front.plans.summed_cost
            for weight, known in least[n].items():
                least[n][weight] = max(known, float(np.min(weight * time + cost)))
    return [fronts[n] for n in range(len(searches))]


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
    if not others:
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


def _least_cost(costs: ClusterCosts, bound: Bound) -> float:
    """Returns a lower bound on the weighted cost of every plan of a cluster."""
    whole = bound.from_cell[:, 0, costs.num_devices, costs.num_blocks]
    fixed = bound.time_weight * costs.fixed_delay_cost + costs.fixed_summed_cost
    return float(np.min(fixed + whole))


def _least_bottlenecks(tables: Sequence[ClusterCosts]) -> list[Floats]:
    """Returns the least bottleneck of each row of each cluster.

    That is the load of the edge server if all other clusters need as little of it as possible.
    """
    others = least_other_loads([costs.head_load for costs in tables])
    return [
        (costs.head_load + load) / costs.num_micro_batches
        for costs, load in zip(tables, others, strict=True)
    ]


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
        costs, plans, row = front.costs, front.plans, front.plans.row
        candidates.append(
            Candidates(
                delay_cost=plans.delay_cost,
                bottleneck_price=costs.bottleneck_price[row],
                bottleneck=plans.bottleneck,
                num_micro_batches=costs.num_micro_batches[row],
                summed_cost=plans.summed_cost,
                head_load=costs.head_load[row],
                uses=np.stack([costs.convergence_term[row] + plans.error, costs.head_bytes[row]]),
            )
        )
    edge_server = problem.clusters[0].edge_server
    memory = (
        math.inf
        if edge_server.memory_bytes is None
        else edge_server.memory_bytes - edge_server.base_bytes
    )
    limits = np.array([problem.convergence.limit * (1 + 1e-9), memory])
    return choose(candidates, limits, upper_bound)
