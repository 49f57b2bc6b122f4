"""Computes estimates of hosts, clusters and links from raw samples.

The same samples give the same estimates to the last bit, in any order. A value without samples is `None`,
never 0. An implausible value is left out, and `rejected` says so. Each estimate says how
much work was measured for it. If that is little, its reader can use the profile instead.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from pydantic import ConfigDict

from collapipe.telemetry.cluster_estimates import ClusterEstimate, estimate_clusters
from collapipe.telemetry.host_estimates import HostEstimate, HostPrior, estimate_host
from collapipe.telemetry.link_estimates import LinkEstimate, estimate_links
from collapipe.telemetry.sample_window import SampleWindow
from collapipe.telemetry.sources.samples import Series

_MOST_REJECTED = 20
"""A host may send thousands of invalid values, and each decision is stored with the sentences about them."""

__all__ = ["ClusterEstimate", "Estimates", "HostEstimate", "HostPrior", "LinkEstimate", "estimate"]


@dataclass(frozen=True)
class Estimates:
    """All estimates of one window; the scheduler stores them with the decision that used them."""

    __pydantic_config__ = ConfigDict(extra="forbid")

    end: float
    """End of the window, in Unix seconds."""
    hosts: dict[str, HostEstimate] = field(default_factory=dict)
    """By host id, for hosts with fresh samples."""
    clusters: dict[str, ClusterEstimate] = field(default_factory=dict)
    """By the index of the cluster."""
    links: dict[str, LinkEstimate] = field(default_factory=dict)
    """By "sender>receiver"."""
    missing: tuple[str, ...] = ()
    """Hosts without fresh samples; older samples of them are not used."""
    rejected: tuple[str, ...] = ()
    """One sentence for each value that was left out because it is implausible, at most the first ones and how many more."""


def estimate(
    series: Sequence[Series],
    hosts: Mapping[str, str],
    priors: Mapping[str, HostPrior],
    *,
    end: float,
    max_age_seconds: float,
    clusters: Collection[str] | None = None,
) -> Estimates:
    """Computes all estimates of a window; `priors` are the profiles by host id.

    The other arguments are those of `SampleWindow` and `estimate_host`.
    """
    window = SampleWindow(series, hosts, end=end, max_age_seconds=max_age_seconds)
    hosts_measured = {
        host: estimate_host(window, host, priors.get(host, HostPrior()), clusters)
        for host in window.hosts
    }
    clusters_measured, links = estimate_clusters(window), estimate_links(window)
    rejected = window.rejected[:_MOST_REJECTED]
    if more := len(window.rejected) - len(rejected):
        rejected.append(f"{more} more")
    return Estimates(
        end=end,
        hosts=hosts_measured,
        clusters=clusters_measured,
        links=links,
        missing=tuple(sorted(set(hosts.values()) - set(window.hosts))),
        rejected=tuple(rejected),
    )
