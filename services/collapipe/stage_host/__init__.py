"""Stage hosts run stages and serve them on the network: control units, devices and edge servers."""

from collapipe.stage_host.host import StageHostSettings, start_stage_host
from collapipe.stage_host.host_resources import HostResources
from collapipe.stage_host.servicer import StageServicer
from collapipe.stage_host.session import StageSession

__all__ = [
    "HostResources",
    "StageHostSettings",
    "StageServicer",
    "StageSession",
    "start_stage_host",
]
