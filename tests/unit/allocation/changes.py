"""Changed copies of problems."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from collapipe.allocation import Host, RoundPlan, RoundProblem


def with_cluster(problem: RoundProblem, index: int = 0, **changes: Any) -> RoundProblem:
    """Returns the problem with other values of one cluster."""
    clusters = list(problem.clusters)
    clusters[index] = replace(clusters[index], **changes)
    return replace(problem, clusters=tuple(clusters))


def with_hosts(problem: RoundProblem, change: Callable[[Host], Host]) -> RoundProblem:
    """Returns the problem with a change of every host."""
    clusters = tuple(
        replace(
            cluster,
            control_unit=change(cluster.control_unit),
            devices=tuple(map(change, cluster.devices)),
            edge_server=change(cluster.edge_server),
        )
        for cluster in problem.clusters
    )
    return replace(problem, clusters=clusters)


def with_devices(problem: RoundProblem, prefix: str = "device", **changes: Any) -> RoundProblem:
    """Returns the problem with other values of the devices whose ids begin with a prefix."""
    return with_hosts(
        problem,
        lambda host: replace(host, **changes) if host.host_id.startswith(prefix) else host,
    )


def with_links(plans: RoundPlan, **changes: Any) -> RoundPlan:
    """Returns the plans with other values of every link."""
    return tuple(
        replace(plan, links=tuple(replace(link, **changes) for link in plan.links))
        for plan in plans
    )
