"""Finds the best plan of a round by exhaustive enumeration. It is slow, and shares no code with the search.

For each combination of the clusters' numbers of micro-batches, it predicts every plan of each cluster once.
If blocks run on devices only, nothing else couples the times of clusters. So the objective of a combination follows
from these predictions, and only the best combination is predicted as a whole.
"""

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import numpy as np

from collapipe.allocation import (
    ClusterPlan,
    ClusterProblem,
    LinkPlan,
    RoundPlan,
    RoundProblem,
    StagePlan,
    predict,
    violations,
)
from collapipe.allocation.round_model.prediction import convergence_term

AssumedLinks = Mapping[tuple[str, str], LinkPlan]


def best_plan(
    problem: RoundProblem,
    assumed_links: Sequence[AssumedLinks],
    *,
    all_windows: bool = False,
) -> RoundPlan | None:
    """Returns the best feasible plan, or `None` if there is none.

    Args:
        assumed_links: Share and powers of each cluster's links.
        all_windows: Try every window, not only the largest ones.
    """
    best, value = None, math.inf
    for chosen in itertools.product(*(cluster.micro_batch_options for cluster in problem.clusters)):
        plans = [
            list(_plans(problem, cluster, assumed, num, all_windows))
            for cluster, assumed, num in zip(problem.clusters, assumed_links, chosen, strict=True)
        ]
        if not all(plans):
            continue
        coupled = problem.blocks_on_edge_server
        combine = _best_of_all_combinations if coupled else _best_combination
        found = combine(problem, plans)
        if found is not None:
            objective = predict(problem, found).objective
            if objective < value:
                best, value = found, objective
    return best


def _plans(
    problem: RoundProblem,
    cluster: ClusterProblem,
    assumed: AssumedLinks,
    num_micro_batches: int,
    all_windows: bool,
) -> Iterator[ClusterPlan]:
    for count in range(len(cluster.devices) + 1):
        for devices in itertools.permutations(cluster.devices, count):
            names = [
                cluster.control_unit.host_id,
                *(device.host_id for device in devices),
                cluster.edge_server.host_id,
            ]
            pairs = list(itertools.pairwise(names))
            back = [pair[::-1] for pair in pairs]
            if not (assumed.keys() >= {*pairs} and cluster.links.keys() >= {*pairs, *back}):
                continue
            for edges, slices in itertools.product(_edges(problem, count), cluster.slice_options):
                sizes = (num_micro_batches, slices)
                choices = [
                    list(_stages(problem, cluster, name, units, sizes, all_windows))
                    for name, units in zip(names, itertools.pairwise(edges), strict=True)
                ]
                codecs = itertools.product(problem.codecs, repeat=len(pairs))
                for stages, each, upload in itertools.product(
                    itertools.product(*choices), codecs, cluster.upload_codecs
                ):
                    links = tuple(
                        replace(assumed[pair], codec=codec)
                        for pair, codec in zip(pairs, each, strict=True)
                    )
                    yield ClusterPlan(stages, num_micro_batches, links, upload, num_slices=slices)


def _edges(problem: RoundProblem, num_devices: int) -> Iterator[list[int]]:
    """Yields the first unit of every stage, and the number of units at the end."""
    num_blocks = problem.model.num_blocks
    for cuts in itertools.combinations_with_replacement(range(num_blocks + 1), num_devices + 1):
        if len(set(cuts)) <= num_devices:
            continue  # A device without a block takes part in no pipeline.
        if (not cuts[0] or problem.blocks_on_control_unit) and (
            cuts[-1] == num_blocks or problem.blocks_on_edge_server
        ):
            yield [0, *(cut + 1 for cut in cuts), num_blocks + 2]


def _stages(
    problem: RoundProblem,
    cluster: ClusterProblem,
    host_id: str,
    units: tuple[int, int],
    sizes: tuple[int, int],
    all_windows: bool,
) -> Iterator[StagePlan]:
    """Yields the stages that memory and the job allow: with the largest window, or with `all_windows`.

    Args:
        sizes: The numbers of micro-batches and of slices.
    """
    host, (num_micro_batches, slices) = cluster.hosts[host_id], sizes
    size = problem.mini_batch / num_micro_batches
    flight = 1 if problem.update_per_micro_batch else num_micro_batches
    options = problem.recompute_options
    if host_id == cluster.control_unit.host_id:
        options = options[:1]
    elif host_id == cluster.edge_server.host_id:
        options = (False,)
    for recompute in options:
        most = min(flight, problem.in_flight_limit or flight)
        while most and host.memory_bytes is not None:
            need = problem.model.memory_bytes(
                *units, most, size, num_slices=slices, recompute=recompute
            )
            if host.base_bytes + need <= host.memory_bytes:
                break
            most -= 1
        least = 1 if all_windows else most
        if host_id == cluster.edge_server.host_id and not all_windows:
            # The loop of the last stage is its own compute time, so 1 is enough.
            least, most = 1, min(most, 1)
        for window in range(max(least, 1), most + 1):
            yield StagePlan(host_id, *units, window, recompute)


def _best_combination(
    problem: RoundProblem, plans: Sequence[Sequence[ClusterPlan]]
) -> RoundPlan | None:
    first = tuple(several[0] for several in plans)
    head = problem.clusters[0].edge_server.host_id
    if any(text.startswith(f"{head} needs") for text in violations(problem, first)):
        return None
    seconds = [np.full(len(several), math.inf) for several in plans]
    drift = [np.zeros(len(several)) for several in plans]
    terms = [np.zeros(len(several)) for several in plans]
    first_term = convergence_term(problem, first)
    for i in range(max(map(len, plans))):
        together = tuple(several[i % len(several)] for several in plans)
        predicted = predict(problem, together)
        for n, cluster in enumerate(problem.clusters):
            if i >= len(plans[n]):
                continue
            hosts = cluster.hosts
            seconds[n][i] = predicted.clusters[n].round_seconds
            drift[n][i] = sum(
                hosts[stage.host_id].joule_weight * stage.energy_joules
                for stage in predicted.clusters[n].stages
                if hosts[stage.host_id].joule_weight
            )
            if np.isfinite(problem.convergence.limit) or problem.convergence.weight:
                alone = (*first[:n], together[n], *first[n + 1 :])
                terms[n][i] = convergence_term(problem, alone) - first_term
    keep = [_undominated(*columns) for columns in zip(seconds, drift, terms, strict=True)]
    time = _outer([seconds[n][keep[n]] for n in range(len(plans))], np.maximum)
    term = first_term + _outer([terms[n][keep[n]] for n in range(len(plans))], np.add)
    total = problem.penalty_weight * (
        time / problem.reference_seconds + problem.convergence.weight * term
    ) + _outer([drift[n][keep[n]] for n in range(len(plans))], np.add)
    total = np.where(term <= problem.convergence.limit * (1 + 1e-9), total, math.inf)
    if not np.isfinite(total.min()):
        return None
    where = np.unravel_index(int(np.argmin(total)), total.shape)
    best = tuple(plans[n][keep[n][i]] for n, i in enumerate(where))
    assert math.isclose(
        predict(problem, best).objective,
        float(total.min())
        + problem.penalty_weight * problem.fixed_seconds / problem.reference_seconds,
        rel_tol=1e-9,
        abs_tol=1e-12,
    )
    assert not violations(problem, best)
    return best


def _best_of_all_combinations(
    problem: RoundProblem, plans: Sequence[Sequence[ClusterPlan]]
) -> RoundPlan | None:
    """Predicts every combination, because blocks on the edge server load it for all clusters."""
    allowed = [chosen for chosen in itertools.product(*plans) if not violations(problem, chosen)]
    return min(allowed, key=lambda chosen: predict(problem, chosen).objective, default=None)


def _undominated(*columns: np.ndarray) -> np.ndarray:
    """Returns the indices of plans that no other plan dominates; of equal plans, the first one."""
    table = np.stack(columns)
    kept: list[int] = []
    for i in np.lexsort(table[::-1]):
        if math.isfinite(table[0, i]) and not any(np.all(table[:, j] <= table[:, i]) for j in kept):
            kept.append(int(i))
    return np.array(kept, dtype=int)


def _outer(columns: Sequence[np.ndarray], combine: np.ufunc) -> np.ndarray:
    result = columns[0]
    for column in columns[1:]:
        result = combine.outer(result, column)
    return result
