"""What a planner keeps for the next one, and whether that one may use it."""

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import TypeAdapter, ValidationError

from collapipe.allocation import RoundPlan
from collapipe.errors import InvalidInputError
from collapipe.job import JobConfig
from collapipe.scheduler.host_registry import JobHosts
from collapipe.scheduler.knowledge import Knowledge

logger = logging.getLogger(__name__)

_PLANS = TypeAdapter(RoundPlan)


@dataclass(frozen=True)
class KeptState:
    """What an earlier planner of the job left."""

    strategy: str
    hosts: list[list[str]]
    knowledge: Knowledge
    in_force: RoundPlan | None

    def to_json(self) -> dict[str, Any]:
        """Returns a JSON document, which `read` takes."""
        return {
            "strategy": self.strategy,
            "hosts": self.hosts,
            "knowledge": self.knowledge.to_json(),
            "in_force": _PLANS.dump_python(self.in_force, mode="json") if self.in_force else None,
        }

    @classmethod
    def read(cls, document: Mapping[str, Any] | None) -> "KeptState | None":
        """Reads what `to_json` returned; what cannot be read is as good as nothing."""
        if document is None:
            return None
        try:
            knowledge = Knowledge.from_json(document["knowledge"])
            plans = document["in_force"]
            in_force = _PLANS.validate_python(plans) if plans else None
            return cls(document["strategy"], document["hosts"], knowledge, in_force)
        except (InvalidInputError, ValidationError, KeyError) as error:
            logger.warning(
                "what was kept of the hosts is left out, they are profiled anew: %s", error
            )
            return None

    def fits(self, job: JobConfig, hosts: JobHosts) -> bool:
        """Whether it was learnt of the same hosts, of all of them, by a strategy that asks for the same."""
        devices = {device.host_id for cluster in hosts.clusters for device in cluster.devices}
        return (
            self.strategy == job.schedule.strategy
            and self.hosts == members(hosts)
            and devices <= self.knowledge.hosts.keys()
        )


def members(hosts: JobHosts) -> list[list[str]]:
    """Who takes part, cluster by cluster, in an order that does not depend on who registered first."""
    clusters = [
        [c.control_unit.host_id, *sorted(d.host_id for d in c.devices)] for c in hosts.clusters
    ]
    return [[hosts.edge_server.host_id], *clusters]
