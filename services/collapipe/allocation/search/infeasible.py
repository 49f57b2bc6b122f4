"""Why a round has no plan: which limit forbids it, and what would be needed."""

from collections.abc import Sequence

import numpy as np

from collapipe.allocation.round_model.problem import ClusterProblem, Host, RoundProblem
from collapipe.allocation.search.link_tables import Floats, Offers
from collapipe.allocation.search.segment_bounds import cheapest_fronts, error_steps
from collapipe.allocation.search.segment_costs import ClusterCosts, Ints, cluster_costs


def why_infeasible(problem: RoundProblem, offers: Sequence[Offers]) -> str:
    """Says it in words; the first reason that is found."""
    terms, heads = 0.0, 0.0
    num_blocks = problem.model.num_blocks
    for index, (cluster, offer) in enumerate(zip(problem.clusters, offers, strict=True)):
        if not cluster.devices:
            return f"cluster {index} has no devices: a pipeline needs at least 1"
        costs = cluster_costs(problem, cluster, offer, one_cluster=False)
        size = problem.mini_batch / max(cluster.micro_batch_options)
        for host, first, last in (
            (cluster.control_unit, 0, 1),
            (cluster.edge_server, num_blocks + 1, num_blocks + 2),
        ):
            need = host.base_bytes + problem.model.memory_bytes(first, last, 1, size)
            if host.memory_bytes is not None and need > host.memory_bytes:
                return _too_small(index, host, need, max(cluster.micro_batch_options))
        held = np.max(np.where(costs.window > 0, np.arange(num_blocks + 1), 0), axis=2)
        if int(held.sum(axis=1).max()) < num_blocks:
            return _no_room(problem, index, cluster, costs, held)
        chain = _least_error(costs)
        if not np.any(np.isfinite(chain)):
            return (
                f"cluster {index}: no chain of links that carry something leads from "
                f"{cluster.control_unit.host_id} over devices that hold {num_blocks} blocks to "
                f"{cluster.edge_server.host_id}: give links a share and power, or add links"
            )
        terms += float(np.min(costs.term + chain))
        heads += float(np.min(costs.head_bytes))
    limit = problem.convergence.limit
    if terms > limit:
        return (
            f"the convergence term is at least {terms:g} of at most {limit:g}: raise the limit, "
            "allow more exact codecs, or other numbers of micro-batches"
        )
    head = problem.clusters[0].edge_server
    if head.memory_bytes is not None and head.base_bytes + heads > head.memory_bytes:
        return (
            f"{head.host_id} needs {head.base_bytes + heads:.0f} bytes of memory for the heads of "
            f"{len(problem.clusters)} clusters and has {head.memory_bytes}: raise it, or have more and smaller micro-batches"
        )
    return (
        "no plan keeps within memory and the convergence limit together, though each alone would allow one: "
        "raise one of them, or allow more numbers of micro-batches"
    )


def _too_small(index: int, host: Host, need: float, most: int) -> str:
    return (
        f"cluster {index}: {host.host_id} needs {need:.0f} bytes of memory for its own units with one of {most} "
        f"micro-batches in flight and has {host.memory_bytes}: raise its --memory-bytes, or allow more and smaller "
        "micro-batches"
    )


def _no_room(
    problem: RoundProblem,
    index: int,
    cluster: ClusterProblem,
    costs: ClusterCosts,
    held: Ints,
) -> str:
    row = int(np.argmax(held.sum(axis=1)))
    each = ", ".join(
        f"{device.host_id} {blocks}"
        for device, blocks in zip(cluster.devices, held[row], strict=True)
    )
    size = problem.mini_batch / int(costs.options[row])
    block = problem.model.memory_bytes(1, 2, 1, size)
    return (
        f"cluster {index}: the {len(cluster.devices)} devices can hold {held[row].sum()} of "
        f"{problem.model.num_blocks} blocks with one of {costs.options[row]} micro-batches in flight ({each}); one block "
        f"needs {block:.0f} bytes: add devices or memory, allow more and smaller micro-batches, or use a smaller model"
    )


def _least_error(costs: ClusterCosts) -> Floats:
    """Least error of codecs over any chain, by M; infinite where there is no chain."""
    grid = np.full((len(costs.options), 1), np.inf)
    into = cheapest_fronts(error_steps(costs), grid, in_order=False)
    result: Floats = into[:, 0, -1, -1]
    return result
