"""Explains why a round has no plan: which limit forbids it, and what to change."""

from collections.abc import Sequence

import numpy as np

from collapipe.allocation.round_model.problem import ClusterProblem, Host, RoundProblem
from collapipe.allocation.search.arrays import Ints
from collapipe.allocation.search.link_tables import AssumedLinks
from collapipe.allocation.search.segment_bounds import least_error
from collapipe.allocation.search.segment_costs import ClusterCosts, cluster_costs
from collapipe.byte_sizes import say_bytes


def why_infeasible(problem: RoundProblem, assumed_links: Sequence[AssumedLinks]) -> str:
    """Returns the first reason that it finds, with the remedy."""
    least_term, head_bytes = 0.0, 0.0
    num_blocks = problem.model.num_blocks
    for index, (cluster, assumed) in enumerate(zip(problem.clusters, assumed_links, strict=True)):
        if not cluster.devices:
            return f"cluster {index} has no devices: a pipeline needs at least 1"
        control_unit, edge_server = cluster.control_unit, cluster.edge_server
        if not (control_unit.push_bps and control_unit.fetch_bps):
            return (
                f"cluster {index}: no weights can move between {control_unit.host_id} and {edge_server.host_id}, "
                "because the rate of the link is 0: repair the link"
            )
        costs = cluster_costs(problem, cluster, assumed, one_cluster=False)
        most = max(cluster.micro_batch_options)
        for host, first, last, recompute in (
            (control_unit, 0, 1, problem.recomputes_by_default),
            (edge_server, num_blocks + 1, num_blocks + 2, False),
        ):
            need = host.base_bytes + problem.model.memory_bytes(
                first,
                last,
                1,
                problem.mini_batch / most,
                num_slices=min(cluster.slice_options),
                recompute=recompute,
            )
            if host.memory_bytes is not None and need > host.memory_bytes:
                return _too_small(index, host, need, most)
        counts = np.arange(num_blocks + 1)
        held = np.max(np.where(costs.window > 0, counts[:, None], 0), axis=(2, 3, 4))
        ends = sum(
            np.max(np.where(end.window > 0, counts, 0), axis=1) for end in (costs.first, costs.last)
        )
        if int((held.sum(axis=1) + ends).max()) < num_blocks:
            return _no_room(problem, index, cluster, costs, held)
        error = least_error(costs)
        if not np.any(np.isfinite(error)):
            return (
                f"cluster {index}: no chain of working links leads from {cluster.control_unit.host_id} over "
                f"devices that hold {num_blocks} blocks to {cluster.edge_server.host_id}: give the links a share and "
                "power, or add links"
            )
        least_term += float(np.min(costs.convergence_term + error))
        head_bytes += float(np.min(costs.head_bytes))
    limit = problem.convergence.limit
    if least_term > limit:
        return (
            f"the convergence term is at least {least_term:g}, but its limit is {limit:g}: raise the limit, "
            "allow more exact codecs, or allow other numbers of micro-batches"
        )
    edge_server = problem.clusters[0].edge_server
    need = edge_server.base_bytes + head_bytes
    if edge_server.memory_bytes is not None and need > edge_server.memory_bytes:
        return (
            f"{edge_server.host_id} needs {say_bytes(need)} of memory for the heads of {len(problem.clusters)} clusters "
            f"and has {say_bytes(edge_server.memory_bytes)}: raise it, or allow more and smaller micro-batches"
        )
    return (
        "no plan keeps both the memory limits and the limit of the convergence term, although each limit alone would "
        "allow a plan: raise one of them, or allow more numbers of micro-batches"
    )


def _too_small(index: int, host: Host, need: float, most: int) -> str:
    return (
        f"cluster {index}: {host.host_id} needs {say_bytes(need)} of memory for its own units with one of {most} "
        f"micro-batches in flight, and has {say_bytes(host.memory_bytes or 0)}: raise its --memory-bytes, or allow more and smaller "
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
    size = problem.mini_batch / int(costs.num_micro_batches[row])
    block = problem.model.memory_bytes(
        1,
        2,
        1,
        size,
        num_slices=int(costs.num_slices[row]),
        recompute=problem.recomputes_by_default,
    )
    return (
        f"cluster {index}: the {len(cluster.devices)} devices can hold {held[row].sum()} of "
        f"{problem.model.num_blocks} blocks with one of {costs.num_micro_batches[row]} micro-batches in flight ({each}); one block "
        f"needs {say_bytes(block)}: add devices or memory, allow more and smaller micro-batches, or use a smaller model"
    )
