"""Starts a stage host: what the processes of devices, control units and edge servers have in common."""

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import grpc
import torch
from pydantic import Field

from collapipe.emulation.world import EmulationFile
from collapipe.errors import InvalidInputError, NotFoundError
from collapipe.neighbour_streams.link_probe import LinkServicer
from collapipe.rpc import ChannelPool, serve
from collapipe.service_process import Running, ServiceSettings
from collapipe.stage_host.registration import Registration
from collapipe.stage_host.session import HostResources
from collapipe.telemetry.sensors import SensorReader
from collapipe.traffic_shaping.pacing import PacedShaper, Shaper
from collapipe.traffic_shaping.radio import EmulatedRadioDriver, NoRadioDriver, RadioDriver
from collapipe.traffic_shaping.traffic_control import TrafficControlShaper
from collapipe.traffic_shaping.wireless import WifiRadioDriver
from collapipe.v1 import blob_pb2_grpc, link_pb2_grpc, scheduler_pb2
from collapipe.weights.blob_store import JobStores
from collapipe.weights.transfer import BlobServicer, Readable

logger = logging.getLogger(__name__)


class StageHostSettings(ServiceSettings):
    """Settings of every stage host."""

    scheduler: str = Field(description="Where the scheduler serves, host:port.")
    device: Literal["cpu", "cuda"] = Field(default="cpu", description="Where to compute.")
    max_transmit_watts: float = Field(
        default=0.1, gt=0, description="Largest transmit power of its radio; no matter on a wire."
    )
    emulation: Path | None = Field(
        default=None, description="JSON file of an emulated world; read again when it changes."
    )
    shaper: Literal["pacing", "tc"] = Field(
        default="pacing",
        description="What holds links to their rates: waiting in this process, or the kernel (needs CAP_NET_ADMIN).",
    )
    radio: Literal["none", "emulated", "iw"] = Field(
        default="emulated",
        description="What takes transmit powers: nothing, the radios of the emulated world if it has any, or Wi-Fi.",
    )
    interface: str = Field(
        default="", description="Network interface that --shaper tc or --radio iw drives."
    )


def start_stage_host(
    settings: StageHostSettings,
    metrics_address: str,
    host: scheduler_pb2.Host,
    stores: JobStores | None,
    add_services: Callable[[grpc.Server, HostResources, str], None],
) -> Running:
    """Serves blobs, measurements of links and what `add_services` adds, and registers with the scheduler.

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
    emulation = EmulationFile(settings.emulation)
    emulation.current()  # a file that cannot be used is refused now
    shaper, radio = choose_shaper(settings), choose_radio(settings, emulation)

    def add_all(server: grpc.Server, address: str) -> None:
        host.address = settings.advertise or address
        host.host_id = settings.host_id or f"host-{host.address}"
        host.metrics_address = _reachable(metrics_address, host.address)
        host.max_transmit_watts = settings.max_transmit_watts
        resources = HostResources(
            host.host_id,
            torch.device(settings.device),
            channels,
            emulation,
            stores.store if stores else None,
            shaper,
            radio,
        )

        def find(digest: str) -> Readable:
            try:
                return resources.held_blob(digest)
            except NotFoundError:
                if stores is None:
                    raise
                return stores.find(digest)

        blob_pb2_grpc.add_BlobServiceServicer_to_server(BlobServicer(find), server)
        link_pb2_grpc.add_LinkServiceServicer_to_server(
            LinkServicer(
                resources.host_id, resources.channels, resources.emulation, resources.link_to
            ),
            server,
        )
        add_services(server, resources, host.address)

    server = serve(settings.listen, settings.security, add_all)
    registration = Registration(host, settings.scheduler, channels)
    # an emulated device does not draw what this machine's sensors see
    sensors = None if host.host_id in emulation.current().devices else SensorReader()

    def drain() -> None:
        if sensors is not None:
            sensors.close()
        registration.close()
        server.drain()
        channels.close()
        shaper.close()

    return Running(server.address, drain)


def _reachable(metrics_address: str, address: str) -> str:
    """Where others read the metrics that are served on every address of this machine."""
    host, _, port = metrics_address.rpartition(":")
    if host in ("0.0.0.0", "[::]", ""):
        return f"{address.rpartition(':')[0]}:{port}" if port else ""
    return metrics_address


def choose_shaper(settings: StageHostSettings) -> Shaper:
    """The shaper that was asked for; pacing, with a warning, where the kernel refuses.

    Raises:
        InvalidInputError: No interface was named.
    """
    if settings.shaper == "pacing":
        return PacedShaper()
    _check_interface(settings, "--shaper tc")
    try:
        return TrafficControlShaper(settings.interface)
    except InvalidInputError as error:
        logger.warning("links are paced inside this process instead: %s", error)
        return PacedShaper()


def choose_radio(settings: StageHostSettings, emulation: EmulationFile) -> RadioDriver:
    """The radio that was asked for.

    Raises:
        InvalidInputError: No interface was named, or it is no radio.
    """
    if settings.radio == "iw":
        _check_interface(settings, "--radio iw")
        return WifiRadioDriver(settings.interface)
    return EmulatedRadioDriver(emulation) if settings.radio == "emulated" else NoRadioDriver()


def _check_interface(settings: StageHostSettings, option: str) -> None:
    if not settings.interface:
        raise InvalidInputError(f"{option} needs --interface NAME: `ip link` lists the interfaces")
