"""Starts a stage host: the part that devices, control units and edge servers have in common."""

import logging
import os
import uuid
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Literal

import grpc
import torch
from pydantic import Field

from collapipe.certificates import Role
from collapipe.certificates.identity import OF_THIS_MACHINE
from collapipe.documents import no_permission
from collapipe.emulation.device_profiles import DeviceProfile, device_profile
from collapipe.emulation.emulation_file import EmulationFile
from collapipe.errors import InvalidInputError
from collapipe.neighbour_streams.link_probe import LinkServicer
from collapipe.rpc import ChannelPool, serve
from collapipe.service_process import Running, ServiceSettings
from collapipe.stage_host.host_resources import HostResources
from collapipe.stage_host.profile_servicer import ProfileServicer
from collapipe.stage_host.registration import Registration
from collapipe.stage_runtime.accelerator import choose_device
from collapipe.telemetry import metrics
from collapipe.telemetry.sensors import SensorReader
from collapipe.telemetry_service import TelemetryServicer
from collapipe.trace_service import TraceServicer
from collapipe.traffic_shaping.outgoing_links import OutgoingLinks
from collapipe.traffic_shaping.pacing import PacedShaper, Shaper
from collapipe.traffic_shaping.radio_driver import EmulatedRadioDriver, RadioDriver
from collapipe.traffic_shaping.shaper_process.status import why_unshaped
from collapipe.traffic_shaping.tc.service_shaper import TrafficControlShaper
from collapipe.traffic_shaping.wifi_radio import WifiRadioDriver
from collapipe.v1 import (
    blob_pb2_grpc,
    link_pb2_grpc,
    profile_pb2_grpc,
    scheduler_pb2,
    telemetry_pb2_grpc,
    trace_pb2_grpc,
)
from collapipe.weights.blob_cache import BlobCache
from collapipe.weights.blob_store import JobStores
from collapipe.weights.transfer import BlobServicer

logger = logging.getLogger(__name__)


class StageHostSettings(ServiceSettings):
    """Settings of every stage host."""

    scheduler: str = Field(description="Address of the scheduler, host:port.")
    device: Literal["cpu", "cuda"] = Field(default="cpu", description="Processor that computes.")
    memory_bytes: int | None = Field(
        default=None,
        ge=0,
        description="Memory for training; 0 for no limit. By default the memory of the emulated device, else no limit.",
    )
    speed: float = Field(
        default=0.0,
        ge=0,
        description="Samples that one block processes in a second, until rounds measure it; 0 measures it before the first round.",
    )
    energy_budget_joules: float = Field(
        default=0.0,
        ge=0,
        description="Average energy that a round may cost; 0 for a host on mains power.",
    )
    busy_watts: float = Field(
        default=0.0,
        ge=0,
        description="Power beyond idle while it computes, where no sensor measures it. By default that of the emulated "
        "device, else unknown.",
    )
    idle_watts: float = Field(
        default=0.0,
        ge=0,
        description="Power that the energy budget pays for during the whole round; 0 if the budget is for training only.",
    )
    max_transmit_watts: float = Field(
        default=0.1, gt=0, description="Largest transmit power of its radio. Ignored on a wire."
    )
    emulation: Path | None = Field(
        default=None,
        description="JSON file of emulated devices and links. It is read again when it changes.",
    )
    shaper: Literal["pacing", "tc"] = Field(
        default="pacing",
        description="What limits links to their rates: pauses in this process, or the kernel (needs CAP_NET_ADMIN).",
    )
    radio: Literal["none", "emulated", "iw"] = Field(
        default="emulated",
        description="What sets transmit powers: nothing, the radios of --emulation if it has any, or Wi-Fi.",
    )
    interface: str = Field(
        default="", description="Network interface for --shaper tc or --radio iw."
    )
    shaping_state: Path | None = Field(
        default=None,
        description="The links.json that a shaper process beside this host follows. `collapipe status` then says why links are not "
        "shaped as it says.",
    )
    state_dir: Path | None = Field(
        default=None,
        description="Directory of its state. A device keeps only frozen weights there; without it, it fetches them again "
        "after a restart.",
    )
    data_root: Path | None = Field(
        default=None,
        description="Jobs may read files on this host only in this folder and in --model-dir, and relative names of data files begin in "
        "this folder. The default is the folder data in --state-dir. With --insecure, or without --state-dir, jobs may read any file.",
    )
    model_dir: Path | None = Field(
        default=None,
        description="Folder of pretrained directories. If one has the name of the job's, frozen weights are read there instead "
        "of fetched.",
    )
    cache_bytes: int = Field(
        default=16_000_000_000,
        ge=0,
        description="Disk that frozen weights may take before unused ones are deleted. An edge server keeps all.",
    )


def frozen_weights(settings: StageHostSettings, *, keeps_all: bool = False) -> BlobCache:
    """Returns the frozen weights that a host keeps on its disk."""
    directory = settings.state_dir / "frozen" if settings.state_dir else None
    return BlobCache(directory, None if keeps_all else settings.cache_bytes)


def describe_resources(
    host: scheduler_pb2.Host, settings: StageHostSettings, emulated: DeviceProfile | None
) -> None:
    """Fills in what the host offers. The profile of an emulated device replaces missing settings."""
    memory_bytes = settings.memory_bytes
    if memory_bytes is None:
        memory_bytes = emulated.memory_bytes if emulated else 0
    host.memory_bytes = memory_bytes
    host.speed = settings.speed
    host.energy_budget_joules = settings.energy_budget_joules
    host.busy_watts = settings.busy_watts or (emulated.busy_watts if emulated else 0.0)
    host.idle_watts = settings.idle_watts
    host.max_transmit_watts = settings.max_transmit_watts


def data_root(settings: StageHostSettings) -> Path | None:
    """Returns the folder outside of which no job reads files; `None` for no bound."""
    if settings.data_root is not None or settings.security.is_insecure or not settings.state_dir:
        return settings.data_root
    return settings.state_dir / "data"


def make_data_root(settings: StageHostSettings) -> None:
    """Makes the default folder for data, and refuses another one that this user may not read; raises `InvalidInputError`."""
    folder = data_root(settings)
    if folder is None:
        return
    if settings.data_root is None:
        folder.mkdir(parents=True, exist_ok=True)
    try:
        os.stat(os.path.join(folder, "."))
    except PermissionError as error:
        raise InvalidInputError(f"--data-root: {no_permission(folder, error)}") from error
    except OSError as error:
        logger.warning("--data-root %s cannot be read now (%s)", folder, error.strerror)


def start_stage_host(
    settings: StageHostSettings,
    metrics_address: str,
    host: scheduler_pb2.Host,
    stores: JobStores | None,
    frozen: BlobCache,
    add_services: Callable[[grpc.Server, HostResources, str], None],
) -> Running:
    """Serves blobs, profiles, link probes, spans, metrics and the services of a role, and registers with the scheduler.

    Args:
        host: The entry to register, with its role and cluster. This function fills in the rest.
        stores: The jobs on the disk of the host; `None` if it keeps none.
        frozen: The frozen weights on its disk.
        add_services: Adds the services of the role to a server, given the host's resources and address.

    Raises:
        InvalidInputError: This machine cannot do what the settings ask for.
    """
    _check_machine(settings)
    torch.set_num_threads(settings.threads)
    emulation = EmulationFile(settings.emulation)
    # Refuses a file that cannot be used.
    device = emulation.current().devices.get(settings.host_id)
    host.incarnation = uuid.uuid4().hex
    describe_resources(host, settings, device_profile(device.profile) if device else None)
    shaper, radio = choose_shaper(settings), choose_radio(settings, emulation)
    links = OutgoingLinks(settings.host_id, emulation, shaper, radio)
    channels = ChannelPool(settings.security, links)

    def add_all_services(server: grpc.Server, address: str) -> None:
        host.address = settings.advertise or address
        host.host_id = settings.host_id or f"host-{host.address}"
        host.metrics_address = _reachable(metrics_address, host.address)
        links.host_id = host.host_id
        processor = choose_device(settings.device)
        resources = HostResources(
            processor,
            channels,
            links,
            frozen,
            stores,
            host.busy_watts,
            settings.model_dir,
            data_root(settings),
        )
        find_for_outsider = partial(resources.find_blob, for_outsider=True)
        has_cluster = host.role != scheduler_pb2.HOST_ROLE_EDGE_SERVER
        cluster = host.cluster_index if has_cluster else None
        blobs = BlobServicer(resources.find_blob, links, find_for_outsider, cluster)
        blob_pb2_grpc.add_BlobServiceServicer_to_server(blobs, server)
        link_pb2_grpc.add_LinkServiceServicer_to_server(LinkServicer(links, channels), server)
        profile_pb2_grpc.add_ProfileServiceServicer_to_server(ProfileServicer(resources), server)
        trace_pb2_grpc.add_TraceServiceServicer_to_server(TraceServicer(), server)
        telemetry = TelemetryServicer()
        telemetry_pb2_grpc.add_TelemetryServiceServicer_to_server(telemetry, server)
        add_services(server, resources, host.address)

    server = serve(
        settings.listen,
        settings.security,
        add_all_services,
        links=links,
        process=host.incarnation,
    )
    links.link_to(Role.SCHEDULER.value, settings.scheduler)
    unshaped: Callable[[], str] = str
    if settings.shaping_state is not None:
        unshaped = partial(why_unshaped, settings.shaping_state, host.host_id)
        metrics.LINKS_UNSHAPED.set_function(lambda: bool(unshaped()))
    registration = Registration(host, settings.scheduler, channels, stores, unshaped)
    # The sensors of this machine do not measure what an emulated device would draw.
    sensors = None if host.host_id in emulation.current().devices else SensorReader()

    def drain() -> None:
        if sensors is not None:
            sensors.close()
        registration.close()
        server.drain()
        channels.close()
        shaper.close()

    return Running(server.address, drain)


def _check_machine(settings: StageHostSettings) -> None:
    if settings.device == "cuda" and not torch.cuda.is_available():
        raise InvalidInputError(
            f"--device cuda: torch {torch.__version__} finds no CUDA device here; install a build of torch for "
            "it, or use --device cpu"
        )
    if not settings.advertise and settings.listen.startswith(("0.0.0.0:", "[::]:")):
        raise InvalidInputError(
            f"--listen {settings.listen} means every address of this machine, and no peer can call that: add "
            "--advertise HOST:PORT with the address that peers can reach"
        )


def _reachable(metrics_address: str, address: str) -> str:
    """Returns the address of the metrics with the name of this host instead of a wildcard such as 0.0.0.0.

    Returns "" if other machines reach this host, but not its metrics.
    """
    host, _, port = metrics_address.rpartition(":")
    own_host = address.rpartition(":")[0]
    if host in ("0.0.0.0", "[::]", ""):
        return f"{own_host}:{port}" if port else ""
    return "" if _is_local(host) and not _is_local(own_host) else metrics_address


def _is_local(host: str) -> bool:
    return host.strip("[]") in OF_THIS_MACHINE or host.startswith("127.")


def choose_shaper(settings: StageHostSettings) -> Shaper:
    """Returns the shaper that the settings name, or pacing with a warning if the kernel refuses."""
    if settings.shaper == "pacing":
        return PacedShaper()
    _check_interface(settings, "--shaper tc")
    try:
        return TrafficControlShaper(settings.interface)
    except InvalidInputError as error:
        logger.warning("links are paced inside this process instead: %s", error)
        return PacedShaper()


def choose_radio(settings: StageHostSettings, emulation: EmulationFile) -> RadioDriver | None:
    """Returns the radio that the settings name; raises `InvalidInputError` if the interface has none."""
    if settings.radio == "iw":
        _check_interface(settings, "--radio iw")
        return WifiRadioDriver(settings.interface)
    return EmulatedRadioDriver(emulation) if settings.radio == "emulated" else None


def _check_interface(settings: StageHostSettings, option: str) -> None:
    if not settings.interface:
        raise InvalidInputError(f"{option} needs --interface NAME: `ip link` lists the interfaces")
