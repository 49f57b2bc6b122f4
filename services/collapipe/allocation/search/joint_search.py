"""The search over all clusters: a front of plans for each, bounded by what the others need at least, and a choice of them."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from collapipe.allocation.round_model.problem import RoundProblem
from collapipe.allocation.search.device_order import promising_rows
from collapipe.allocation.search.joint_clusters import (
    Candidates,
    Chosen,
    choose,
    fair_weights,
    least_loads,
)
from collapipe.allocation.search.link_tables import Floats, Offers
from collapipe.allocation.search.pareto_front import Front, PipelineChoice, front
from collapipe.allocation.search.segment_bounds import Bound, Bounds, cluster_bounds, grid_over
from collapipe.allocation.search.segment_costs import ClusterCosts, cluster_costs

EXACT_DEVICES = 6
"""With so many devices every order is looked at."""

FIRST_WIDTH = 50
"""Labels of each M and layer in the first, narrow search."""

_WIDTH = 200
_GRID = 24
_SLACK = 0.03
_ROUNDING = 1e-11

Order = tuple[int, ...]


@dataclass(frozen=True)
class ClusterChoice:
    """What one cluster does: a plan by the tables that it is made of."""

    costs: ClusterCosts
    choice: PipelineChoice

    @property
    def order(self) -> Order:
        """Its devices, by index in registration order."""
        devices = self.costs.devices[self.choice.row]
        return tuple(int(devices[k]) for k in self.choice.devices)


def search(
    problem: RoundProblem,
    offers: Sequence[Offers],
    upper: float,
    orders: Sequence[Sequence[Order]],
) -> list[ClusterChoice] | None:
    """Finds the best plan of all clusters that is worth less than a known one.

    A narrow search finds a good plan and how time and cost trade in each cluster; that gives the weights with which
    the bounds of the full search are tightest.

    Args:
        problem: The round.
        offers: Share and powers of each cluster's links.
        upper: Objective of the known plan; infinite if there is none.
        orders: Of devices in each cluster's known plans.

    Returns:
        A choice a cluster; `None` if nothing is better.
    """
    upper -= problem.penalty_weight * problem.fixed_seconds / problem.reference_seconds
    one_cluster = len(problem.clusters) == 1
    tables = [
        cluster_costs(problem, cluster, offer, one_cluster=one_cluster)
        for cluster, offer in zip(problem.clusters, offers, strict=True)
    ]
    if any(not len(costs.options) for costs in tables):
        return None
    parts = [
        _Part(costs, floor, (1.0,) if one_cluster else (1.0, 0.0), known, cold=math.isinf(upper))
        for costs, floor, known in zip(tables, _floors(tables), orders, strict=True)
    ]
    found: list[ClusterChoice] | None = None
    for final in (False, True):
        slack = 0.0 if final or math.isinf(upper) else _SLACK * abs(upper)
        fronts = _fronts(problem, parts, upper + slack, final=final)
        if fronts is None:
            for part in parts:
                part.look_further()
            continue
        chosen = _choose(problem, fronts, upper)
        if chosen is not None:
            upper = chosen.value
            found = [
                ClusterChoice(one.costs, one.choice(index))
                for one, index in zip(fronts, chosen.plans, strict=True)
            ]
        if final or all(
            part.exact and one.complete for part, one in zip(parts, fronts, strict=True)
        ):
            break
        shares = fair_weights([_weighed(one) for one in fronts])
        for n, part in enumerate(parts):
            part.weigh(shares[n], [found[n].order] if found else [])
    return found


class _Part:
    """One cluster of the search: tables of the orders that are looked at, and their bounds."""

    def __init__(
        self,
        costs: ClusterCosts,
        floor: Floats,
        time_weights: tuple[float, ...],
        orders: Sequence[Order],
        *,
        cold: bool,
    ) -> None:
        self.exact = costs.num_devices <= EXACT_DEVICES
        self.share: float | None = None
        self._all, self._all_floor = costs, floor
        self._time_weights, self._orders = time_weights, list(orders)
        self.costs, self.floor, self.bounds = self._tables(1.0, improved=cold)

    def weigh(self, time_weight: float, orders: Sequence[Order]) -> None:
        """Makes bounds for another weight of the cluster's time, and looks for orders that are good with it."""
        self._orders.extend(orders)
        self.look_further(time_weight)
        self.share = time_weight
        self.bounds = self.bounds.first_weighed(self.costs, time_weight)

    def look_further(self, time_weight: float = 1.0) -> None:
        """Looks for better orders, where not all are looked at anyway."""
        if not self.exact:
            self.costs, self.floor, self.bounds = self._tables(time_weight, improved=True)

    def _tables(self, time_weight: float, *, improved: bool) -> tuple[ClusterCosts, Floats, Bounds]:
        costs, floor = self._all, self._all_floor
        if not self.exact:
            costs, floor = promising_rows(
                costs, floor, time_weight, self._orders, improved=improved
            )
        grid = grid_over(costs, floor, _GRID)
        bounds = cluster_bounds(costs, grid, self._time_weights, in_order=not self.exact)
        return costs, floor, bounds


def _fronts(
    problem: RoundProblem, parts: Sequence[_Part], upper: float, *, final: bool
) -> list[Front] | None:
    """The front of each cluster; `None` as soon as one shows that nothing is worth less than `upper`.

    The cluster whose time weighs most comes first, and what its front says holds for the bounds of the others.
    """
    if math.isfinite(upper):
        upper -= _ROUNDING * abs(upper)
    least = [
        {one.time_weight: _least(part.costs, one) for one in part.bounds.weighed} for part in parts
    ]
    term_limits = _term_limits(problem, [part.costs for part in parts])
    fronts: dict[int, Front] = {}
    for n in sorted(range(len(parts)), key=lambda n: -(parts[n].share or 0.0)):
        part = parts[n]
        others = [i for i in range(len(parts)) if i != n]
        limits = _limits(part, [parts[i] for i in others], [least[i] for i in others], upper)
        weighed = tuple(replace(one, limit=limits[one.time_weight]) for one in part.bounds.weighed)
        width = (None if part.exact else _WIDTH) if final else FIRST_WIDTH
        found = front(
            part.costs,
            part.floor,
            replace(part.bounds, weighed=weighed),
            term_limits[n],
            width=width,
        )
        if not len(found.plans):
            return None
        fronts[n] = found
        if found.complete:
            time, cost = _weighed(found)
            for weight, known in least[n].items():
                least[n][weight] = max(known, float(np.min(weight * time + cost)))
    return [fronts[n] for n in range(len(parts))]


def _limits(
    part: _Part, others: Sequence[_Part], least: Sequence[dict[float, float]], upper: float
) -> dict[float, float]:
    """What a cluster may be worth in each weighing, when all others do as well as they can.

    The maximum of all times is at least any mean of them: its own time alone, another's alone, or the fair mean.
    """
    if not others:
        return {1.0: upper}
    cheapest = sum(one[0.0] for one in least)
    limits = {
        1.0: upper - cheapest,
        0.0: upper - cheapest - max(one[1.0] - one[0.0] for one in least),
    }
    if part.share is not None:
        fair = sum(
            one[other.share]
            for other, one in zip(others, least, strict=True)
            if other.share is not None
        )
        limits[part.share] = min(limits.get(part.share, math.inf), upper - fair)
    return limits


def _least(costs: ClusterCosts, bound: Bound) -> float:
    """Least weighed total of a cluster."""
    whole = bound.beyond[:, 0, costs.num_devices, costs.num_blocks]
    return float(np.min(bound.time_weight * costs.end_price + costs.end_cost + whole))


def _weighed(found: Front) -> tuple[Floats, Floats]:
    """Priced time and cost of a front's plans."""
    plans = found.plans
    return plans.price + found.costs.stall_price[plans.row] * plans.stall, plans.cost


def _floors(tables: Sequence[ClusterCosts]) -> list[Floats]:
    """Least bottleneck of each row: the edge server's load when all other clusters ask for as little as they can."""
    others = least_loads([costs.head_load for costs in tables])
    return [
        (costs.head_load + load) / costs.options for costs, load in zip(tables, others, strict=True)
    ]


def _term_limits(problem: RoundProblem, tables: Sequence[ClusterCosts]) -> list[Floats]:
    """What codecs' errors may add in each cluster, by M."""
    limit = problem.convergence.limit
    if math.isinf(limit):
        return [np.full(len(costs.options), math.inf) for costs in tables]
    least = [float(np.min(costs.term)) for costs in tables]
    return [
        limit * (1 + 1e-9) - costs.term - (sum(least) - own)
        for costs, own in zip(tables, least, strict=True)
    ]


def _choose(problem: RoundProblem, fronts: Sequence[Front], upper: float) -> Chosen | None:
    """One plan a cluster, within the limits that they share."""
    candidates = []
    for one in fronts:
        row, plans = one.plans.row, one.plans
        candidates.append(
            Candidates(
                price=plans.price,
                stall_price=one.costs.stall_price[row],
                stall=plans.stall,
                micro_batches=one.costs.options[row],
                cost=plans.cost,
                head_load=one.costs.head_load[row],
                uses=np.stack([one.costs.term[row] + plans.error, one.costs.head_bytes[row]]),
            )
        )
    head = problem.clusters[0].edge_server
    memory = math.inf if head.memory_bytes is None else head.memory_bytes - head.base_bytes
    limits = np.array([problem.convergence.limit * (1 + 1e-9), memory])
    return choose(candidates, limits, upper)
