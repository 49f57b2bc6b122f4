"""A stage host on the network: what device agents, control units and edge servers share."""

from collapipe.stage_service.blobs import BlobServicer, fetch_blob, store_blob
from collapipe.stage_service.host import StageHostSettings, start_stage_host
from collapipe.stage_service.servicer import StageServicer
from collapipe.stage_service.session import HostResources, StageSession

__all__ = [
    "BlobServicer",
    "HostResources",
    "StageHostSettings",
    "StageServicer",
    "StageSession",
    "fetch_blob",
    "start_stage_host",
    "store_blob",
]
