"""Starts a stage host: what the processes of devices, control units and edge servers have in common."""

from collections.abc import Callable
from typing import Literal

import grpc
import torch
from pydantic import Field

from collapipe.errors import InvalidInputError, NotFoundError
from collapipe.process import Running, ServiceSettings
from collapipe.rpc import ChannelPool, serve
from collapipe.stage_service.blobs import BlobServicer, Readable
from collapipe.stage_service.registration import Registration
from collapipe.stage_service.session import HostResources
from collapipe.storage import JobStores
from collapipe.v1 import blob_pb2_grpc, scheduler_pb2


class StageHostSettings(ServiceSettings):
    """Settings of every stage host."""

    scheduler: str = Field(description="Where the scheduler serves, host:port.")
    device: Literal["cpu", "cuda"] = Field(default="cpu", description="Where to compute.")


def start_stage_host(
    settings: StageHostSettings,
    metrics_address: str,
    host: scheduler_pb2.Host,
    stores: JobStores | None,
    add_services: Callable[[grpc.Server, HostResources, str], None],
) -> Running:
    """Serves blobs and what `add_services` adds, and registers with the scheduler.

    Args:
        settings: Of the process.
        metrics_address: Where it serves /metrics.
        host: What to register; identity and addresses are filled in here.
        stores: The disk of the host, if it keeps state.
        add_services: Adds the services of the role; is given the server, the host's resources and its address.

    Raises:
        InvalidInputError: The settings ask for what this machine does not have.
    """
    if settings.device == "cuda" and not torch.cuda.is_available():
        raise InvalidInputError(
            f"--device cuda: torch {torch.__version__} finds no CUDA device here; install a build of torch for "
            "it, or use --device cpu"
        )
    if not settings.advertise and settings.listen.startswith(("0.0.0.0:", "[::]:")):
        raise InvalidInputError(
            f"--listen {settings.listen} is every address of this machine, which no peer can call: say by "
            "--advertise HOST:PORT how peers reach it"
        )
    torch.set_num_threads(settings.threads)
    channels = ChannelPool(settings.security)

    def add_all(server: grpc.Server, address: str) -> None:
        host.address = settings.advertise or address
        host.host_id = settings.host_id or f"host-{host.address}"
        host.metrics_address = metrics_address
        resources = HostResources(
            host.host_id, torch.device(settings.device), channels, stores.store if stores else None
        )

        def find(digest: str) -> Readable:
            try:
                return resources.held_blob(digest)
            except NotFoundError:
                if stores is None:
                    raise
                return stores.find(digest)

        blob_pb2_grpc.add_BlobServiceServicer_to_server(BlobServicer(find), server)
        add_services(server, resources, host.address)

    server = serve(settings.listen, settings.security, add_all)
    registration = Registration(host, settings.scheduler, channels)

    def drain() -> None:
        registration.close()
        server.drain()
        channels.close()

    return Running(server.address, drain)
