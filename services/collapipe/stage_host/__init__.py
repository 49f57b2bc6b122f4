"""A host that runs a stage and serves it on the network: what devices, control units and edge servers share."""

from collapipe.stage_host.host import StageHostSettings, start_stage_host
from collapipe.stage_host.servicer import StageServicer
from collapipe.stage_host.session import HostResources, StageSession

__all__ = [
    "HostResources",
    "StageHostSettings",
    "StageServicer",
    "StageSession",
    "start_stage_host",
]
