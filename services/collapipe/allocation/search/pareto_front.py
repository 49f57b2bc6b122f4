"""The Pareto front of a cluster: every plan of the cluster that a best decision for all clusters may need.

This is a label-setting algorithm for a shortest-path problem with several costs. A *label* is a partial plan:
the stages from some device to the head. The algorithm builds plans from the head backwards, because the
latency loop of a stage, docs/scheduling.md (4), is a sum over what comes after the stage. In each layer it
extends all labels with the same number of devices. It drops a label

- if it is *dominated*: another label with the same devices and blocks is at least as good in every respect;
- if its lower bound is too high: every plan that extends it costs more than a known decision.

So the front is complete unless the caller limits the number of labels in a layer.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from collapipe.allocation.round_model.problem import ClusterPlan
from collapipe.allocation.search.arrays import Floats, Ints, Records
from collapipe.allocation.search.labels import (
    LABEL,
    first_labels,
    undominated,
    with_links,
    with_segments,
)
from collapipe.allocation.search.search_tables import SearchTables
from collapipe.allocation.search.segment_bounds import Bounds
from collapipe.allocation.search.segment_costs import ClusterCosts

_LATE_WIDTH = 5
"""Labels of each row that a layer keeps when no time is left."""


@dataclass(frozen=True)
class PipelineChoice:
    """One plan of a front: its devices in pipeline order, and the codecs of all links.

    All numbers are indices in the cost tables. `starts` has the first block of each device, and then that of the
    edge server. `options` say whether each device recomputes: see `RoundProblem.recompute_options`.
    """

    costs: ClusterCosts
    row: int
    devices: tuple[int, ...]
    starts: tuple[int, ...]
    codecs: tuple[int, ...]
    options: tuple[int, ...]


@dataclass(frozen=True)
class ParetoFront:
    """Plans of one cluster. No plan dominates another plan of the same row.

    Args:
        costs: The tables that the plans refer to.
        plans: One label for each plan; `device` is the first device of the pipeline.
        layers: All labels by their number of devices; `choice` follows their parents.
        num_devices: Number of devices of each plan.
        complete: Whether the front has every plan that a best decision may need.
        known: The only plan of the front, if another search has found it.
    """

    costs: ClusterCosts
    plans: Records
    layers: tuple[Records, ...]
    num_devices: Ints
    complete: bool
    known: ClusterPlan | None = None

    def delay_costs(self) -> Floats:
        """Returns the delay cost of each plan, if the load of the edge server is as low as possible."""
        plans = self.plans
        price = self.costs.bottleneck_price[plans["row"]]
        return np.asarray(plans["delay_cost"] + price * plans["bottleneck"])

    def head_loads(self) -> Floats:
        """Returns the load of the edge server by each plan, in seconds of its processor for a mini-batch."""
        return np.asarray(self.costs.head_load[self.plans["row"], self.plans["last"]])

    def choice(self, index: int) -> PipelineChoice | ClusterPlan:
        """Follows the parents of one plan to find its devices, segments and codecs."""
        if self.known is not None:
            return self.known
        plan, depth = self.plans[index], int(self.num_devices[index])
        devices, starts, codecs, options = [], [], [int(plan["codec"])], []
        at = int(plan["parent"])
        for labels in self.layers[depth:0:-1]:
            devices.append(int(labels["device"][at]))
            starts.append(int(labels["start"][at]))
            codecs.append(int(labels["codec"][at]))
            options.append(int(labels["option"][at]))
            at = int(labels["parent"][at])
        starts.append(self.costs.num_blocks - int(plan["last"]))
        row = int(plan["row"])
        return PipelineChoice(
            self.costs, row, tuple(devices), tuple(starts), tuple(codecs), tuple(options)
        )


def pareto_front(
    costs: ClusterCosts,
    tables: SearchTables,
    least_bottleneck: Floats,
    bounds: Bounds,
    error_limits: Floats,
    *,
    width: int,
    is_late: Callable[[], bool],
    most_other_load: float | None,
) -> ParetoFront:
    """Finds the Pareto front of a cluster.

    Args:
        least_bottleneck: As in `first_labels`.
        bounds: Lower bounds, and the cost of the best known decision.
        error_limits: The most that the errors of codecs may add to the convergence term. Shape: (rows,).
        width: Number of labels of each row that a layer keeps, those with the least bounds.
        is_late: Returns whether to end soon: the next layers then keep only `_LATE_WIDTH` labels.
        most_other_load: If only the fastest plan of each row matters, the largest load of the edge server by all
            other clusters, in seconds of its processor for a mini-batch. Otherwise `None`.
    """
    layer = first_labels(costs, least_bottleneck)
    layers: list[Records] = []
    finished: list[Records] = []
    complete = True
    for depth in range(costs.num_devices + 1):
        if depth:
            linked = with_links(tables, bounds, error_limits, layer, False)
            layer = with_segments(tables, bounds, _undominated(tables, linked, whole=False))
            if not len(layer):
                break
            most = _LATE_WIDTH if is_late() else width
            if len(layer) > most:
                # What a label exceeds a limit by is a lower bound on what decisions with it exceed the best
                # known one by.
                order = np.lexsort((layer["excess"], layer["row"]))
                row = layer["row"][order]
                kept = order[np.arange(len(row)) - np.searchsorted(row, row) < most]
                complete &= len(kept) == len(layer)
                layer = layer[kept]
        layers.append(layer)
        whole = with_links(tables, bounds, error_limits, layer, True)
        finished.append(whole)
        if most_other_load is not None:
            bounds = _with_known_plans(costs, whole, bounds, most_other_load)
    plans = np.concatenate(finished)
    plans["start"] = np.repeat(np.arange(len(finished)), [len(whole) for whole in finished])
    plans = _undominated(tables, plans, whole=True)
    return ParetoFront(costs, plans, tuple(layers), plans["start"], complete)


def _undominated(tables: SearchTables, labels: Records, *, whole: bool) -> Records:
    """Returns the labels that no other label of the same group dominates, in the order of the groups.

    A group has the same row, device, start and mask; `whole` plans are grouped by row.
    """
    group = labels["row"]
    cost = labels["delay_cost"] + tables.rows["bottleneck_price"][group] * labels["bottleneck"]
    if not whole:
        num_devices, num_starts = tables.moves.shape[1:3]
        group = (labels["mask"] * len(tables.rows) + group) * num_devices + labels["device"]
        group = group * num_starts + labels["start"]
    order = np.lexsort((cost + labels["summed_cost"], group))
    changes = np.diff(group[order], prepend=-1) != 0
    return undominated(tables, labels[order], np.cumsum(changes) - 1)


def front_of_known_plan(
    costs: ClusterCosts, known: ClusterPlan, row: int, delay_cost: float, bottleneck: float
) -> ParetoFront:
    """Returns a front with one plan that another search has found; `LABEL` explains the fields."""
    last = costs.num_blocks + 1 - known.stages[-1].start_unit
    plan = np.zeros(1, LABEL)
    plan["row"], plan["last"] = row, last
    plan["delay_cost"], plan["bottleneck"] = delay_cost, bottleneck
    return ParetoFront(costs, plan, (), plan["start"], complete=False, known=known)


def _with_known_plans(
    costs: ClusterCosts, whole: Records, bounds: Bounds, most_other_load: float
) -> Bounds:
    """Lowers the limit of the delay in each row to the fastest of these plans, at the largest load."""
    row = whole["row"]
    load = costs.edge_bottleneck(most_other_load)[row, whole["last"]]
    bottleneck = np.maximum(whole["bottleneck"], load)
    best = np.full(costs.num_rows, np.inf)
    np.minimum.at(best, row, whole["delay_cost"] + costs.bottleneck_price[row] * bottleneck)
    if costs.one_cluster:
        best[:] = np.min(best)
    return bounds._replace(limits=np.minimum(bounds.limits, best * (1 + 1e-12)))
