"""Turns the telemetry of a time window into estimates."""

import logging
from collections.abc import Iterable
from dataclasses import dataclass

from collapipe.errors import CollapipeError
from collapipe.planning.job_hosts import JobHosts
from collapipe.planning.knowledge import Knowledge
from collapipe.scheduler.host_registry import EDGE_SERVER
from collapipe.telemetry import metrics
from collapipe.telemetry.estimates import Estimates, estimate
from collapipe.telemetry.known_hosts import KnownHost, KnownHosts
from collapipe.telemetry.sources import TelemetrySource
from collapipe.v1 import scheduler_pb2

logger = logging.getLogger(__name__)

MIN_SCRAPES = 4
"""A window spans at least this many scrapes, so that counters have a measurable increase."""


def known_hosts(hosts: Iterable[scheduler_pb2.Host], instance_field: str) -> KnownHosts:
    """Returns what the samples of a `TelemetrySource` with this `instance_field` may be about."""
    return KnownHosts(
        [
            KnownHost(
                host.host_id,
                getattr(host, instance_field),
                None if host.role == EDGE_SERVER else str(host.cluster_index),
            )
            for host in hosts
        ]
    )


@dataclass(frozen=True)
class Telemetry:
    """The scheduler's access to the measurements of its hosts.

    Args:
        interval_seconds: Least time between two scrapes of a host.
    """

    source: TelemetrySource
    interval_seconds: float

    def now(self) -> float:
        """Returns the present time on the clock of the samples, in Unix seconds."""
        return self.source.now()

    def estimates(
        self, hosts: JobHosts, knowledge: Knowledge, since: float, earliest: float
    ) -> Estimates | None:
        """Returns the estimates of a window that ends now, or `None` if the source does not answer.

        Args:
            since: Desired start of the window. It starts earlier if it would be shorter than `MIN_SCRAPES`
                scrapes.
            earliest: The window never starts before this time, unless the clock was set back to an earlier one.
        """
        end = self.now()
        min_seconds = MIN_SCRAPES * max(self.interval_seconds, self.source.pass_seconds)
        if earliest > end:
            earliest = end - min_seconds
        try:
            series = self.source.window(max(earliest, min(since, end - min_seconds)), end)
        except CollapipeError as error:
            metrics.TELEMETRY_FAILURES.labels(self.source.name).inc()
            logger.warning("no telemetry from %s: %s", self.source.name, error)
            return None
        instances = {
            host_id: getattr(host, self.source.instance_field)
            for host_id, host in hosts.by_id.items()
        }
        host_ids = {instance: host_id for host_id, instance in instances.items() if instance}
        return estimate(
            series,
            host_ids,
            knowledge.host_priors(),
            end=end,
            max_age_seconds=max(min_seconds, self.source.max_gap_seconds),
            # The edge server may work for other jobs, too.
            clusters={str(cluster.host_cluster) for cluster in hosts.clusters},
        )
