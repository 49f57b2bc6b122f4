"""Which samples are believed: those whose labels only name hosts, clusters, codecs and sensors that there are.

Otherwise a host could fill the memory of the scheduler with labels that change with every page.
"""

import logging
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from collapipe.codec_table import CODECS
from collapipe.telemetry import metrics
from collapipe.telemetry.host_estimates import ENERGY_SENSORS
from collapipe.telemetry.sources.samples import Labels

logger = logging.getLogger(__name__)

_SCHEDULER = "scheduler"
"""Hosts have a link to the scheduler, too."""
_SENSORS = (*ENERGY_SENSORS, "model")
_TOLD_SECONDS = 3600.0
"""Least time between two lines of the log about one host."""


@dataclass(frozen=True)
class KnownHost:
    """A host that has registered.

    Args:
        instance: The instance of its series: `TelemetrySource.instance_field` says which address that is. Maybe empty.
        cluster: `None` for an edge server.
    """

    host_id: str
    instance: str
    cluster: str | None


class KnownHosts:
    """The hosts of a deployment. Of two with one instance, the last one counts."""

    def __init__(self, hosts: Sequence[KnownHost]) -> None:
        self._hosts = {host.instance: host for host in hosts if host.instance}
        self._ids = {_SCHEDULER, *(host.host_id for host in hosts)}
        self._clusters = {host.cluster for host in hosts}
        # Each stage of a pipeline has a host of its own.
        self._stages = {str(number) for number in range(len(self._ids))}

    def host_id(self, instance: str) -> str | None:
        """Returns the host whose series have this instance, or `None`."""
        host = self._hosts.get(instance)
        return host.host_id if host else None

    def may_have(self, instance: str, labels: Labels) -> bool:
        """Returns whether a sample of a host may have these labels. An unknown host may have none."""
        host = self._hosts.get(instance)
        return host is not None and all(self._may_be(host, *label) for label in labels)

    def _may_be(self, host: KnownHost, name: str, value: str) -> bool:
        if name == "link":
            sender, _, receiver = value.partition(">")
            return host.host_id in (sender, receiver) and {sender, receiver} <= self._ids
        if name == "cluster":
            return value in self._clusters if host.cluster is None else value == host.cluster
        if name == "stage":
            return value in self._stages
        return value in CODECS if name == "codec" else name == "sensor" and value in _SENSORS


class DroppedSamples:
    """Counts the samples that were left out, and tells of each host seldom."""

    def __init__(self, source: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._counter = metrics.TELEMETRY_DROPPED.labels(source)
        self._clock = clock
        self._told: dict[str, float] = {}

    def count(self, host_id: str, dropped: Iterable[Labels]) -> None:
        """Counts samples of a known host by their labels."""
        listed = list(dropped)
        self._counter.inc(len(listed))
        now = self._clock()
        if listed and now - self._told.get(host_id, -_TOLD_SECONDS) >= _TOLD_SECONDS:
            self._told[host_id] = now
            logger.warning(
                "%d samples of %s were left out, because their labels name what is not known here, such as %.200r: look for "
                "a host that is gone for good, or check what runs on %s",
                len(listed),
                host_id,
                dict(listed[0]),
                host_id,
            )
