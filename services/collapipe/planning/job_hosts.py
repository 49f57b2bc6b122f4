"""The hosts that take part in a job."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from collapipe.v1 import scheduler_pb2


@dataclass(frozen=True)
class ClusterHosts:
    """The hosts of one cluster that take part in a job; devices are in registration order."""

    control_unit: scheduler_pb2.Host
    devices: tuple[scheduler_pb2.Host, ...]

    @property
    def host_cluster(self) -> int:
        """The cluster of the deployment."""
        return self.control_unit.cluster_index


@dataclass(frozen=True)
class JobHosts:
    """The hosts that take part in a job."""

    edge_server: scheduler_pb2.Host
    clusters: tuple[ClusterHosts, ...]

    @property
    def devices(self) -> list[scheduler_pb2.Host]:
        """The devices of all clusters."""
        return [device for cluster in self.clusters for device in cluster.devices]

    @cached_property
    def by_id(self) -> Mapping[str, scheduler_pb2.Host]:
        """All hosts of the job, by host id."""
        hosts = [self.edge_server, *(c.control_unit for c in self.clusters), *self.devices]
        return {host.host_id: host for host in hosts}
