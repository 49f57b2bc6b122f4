"""Options that several commands share, and how their values are read."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from collapipe.emulation.device_profiles import DEVICE_PROFILES, device_profile
from collapipe.emulation.world import EmulatedDevice, Emulation, EmulationFile
from collapipe.errors import InvalidInputError
from collapipe.rpc import Security
from collapipe_client.client import CollaPipeClient
from collapipe_client.local_testbed import LocalTestbed
from collapipe_client.processes import last_lines
from collapipe_client.reporting import complain, say
from collapipe_client.testbed_processes import SCHEDULER, Device, device_name, share_out
from collapipe_client.workspace import Workspace, WorkspaceRecord

REAL = "none"
"""Among the profiles of `--emulate`: this machine as it is."""

_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9}
_UNITS |= {"KIB": 2**10, "MIB": 2**20, "GIB": 2**30}

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]
WorkspaceOption = Annotated[
    Path, typer.Option("--workspace", metavar="DIR", help="Folder of the local testbed.")
]
SchedulerOption = Annotated[
    str | None,
    typer.Option(
        "--scheduler",
        metavar="HOST:PORT",
        envvar="COLLAPIPE_SCHEDULER",
        help="Use this scheduler. Without it: the testbed of `collapipe up`.",
    ),
]
Insecure = Annotated[
    bool,
    typer.Option(
        "--insecure", envvar="COLLAPIPE_INSECURE", help="Speak plain text to --scheduler."
    ),
]
TlsCa = Annotated[
    Path | None,
    typer.Option(metavar="FILE", envvar="COLLAPIPE_TLS_CA", help="Certificate of the authority."),
]
TlsCert = Annotated[
    Path | None,
    typer.Option(metavar="FILE", envvar="COLLAPIPE_TLS_CERT", help="Certificate of this client."),
]
TlsKey = Annotated[
    Path | None,
    typer.Option(metavar="FILE", envvar="COLLAPIPE_TLS_KEY", help="Key of this client."),
]
DevicesOption = Annotated[
    str | None,
    typer.Option(
        "--devices", metavar="K,K...", help="Devices of each cluster, or one number for all."
    ),
]
DeviceMemory = Annotated[
    str | None,
    typer.Option(
        metavar="SIZE,...",
        help="Memory of the devices for training, for example 200MB: one for all, one for each "
        "device of a cluster, or one for every device. 0 is no limit.",
    ),
]
DeviceSpeed = Annotated[
    str | None,
    typer.Option(
        metavar="X,...",
        help="Samples a second that one block processes on the devices, in the same way. 0 "
        "measures.",
    ),
]
EmulateOption = Annotated[
    str | None,
    typer.Option(
        "--emulate",
        metavar="PROFILE,...",
        help=f"What the devices compute like: {', '.join(DEVICE_PROFILES)}, or {REAL} for as fast "
        "as this machine; given like --device-memory. They are slowed by waiting.",
    ),
]
EmulationOption = Annotated[
    Path | None,
    typer.Option(
        "--emulation",
        metavar="FILE",
        help="Instead of --emulate: JSON of devices, links and radios.",
    ),
]


@dataclass(frozen=True)
class TestbedOptions:
    """What shapes a testbed that a command starts, as it was given."""

    devices: str | None = None
    device_memory: str | None = None
    device_speed: str | None = None
    emulate: str | None = None
    emulation: Path | None = None


@dataclass(frozen=True)
class Endpoint:
    """Where a scheduler is, and how to talk to it.

    Args:
        address: "host:port".
        security: Plain text or TLS.
        testbed: The testbed of `collapipe up`, if it is that one; `None` for any other.
    """

    address: str
    security: Security
    testbed: WorkspaceRecord | None = None

    def client(self) -> CollaPipeClient:
        """Opens a client."""
        return CollaPipeClient(self.address, self.security)


def find_endpoint(
    scheduler: str | None,
    insecure: bool,
    tls_ca: Path | None,
    tls_cert: Path | None,
    tls_key: Path | None,
    workspace: Path,
) -> Endpoint | None:
    """Finds the scheduler to use: the one given, else the one of `collapipe up`.

    Returns:
        `None` when there is neither.

    Raises:
        InvalidInputError: The options contradict each other.
    """
    if scheduler is None:
        record = testbed_up(workspace)
        if record is None:
            return None
        process = record.process(SCHEDULER)
        if process is None or not process.alive:
            log = Workspace(workspace).log_file(SCHEDULER)
            raise InvalidInputError(
                f"the scheduler of the testbed in {workspace} has ended; last lines of {log}:\n"
                f"{last_lines(log)}\n"
                "Start it again with `collapipe up`, or end the rest with `collapipe down`"
            )
        return Endpoint(process.address, Security.insecure(), record)
    if not re.fullmatch(r"\S+:\d{1,5}", scheduler):
        raise InvalidInputError(
            f"--scheduler {scheduler}: is not HOST:PORT, for example 192.168.1.10:7070"
        )
    return Endpoint(scheduler, Security.of(insecure, tls_ca, tls_cert, tls_key))


def testbed_up(workspace: Path) -> WorkspaceRecord | None:
    """The record of the testbed of `collapipe up`, if any of it runs."""
    record = Workspace(workspace).read_record()
    return record if record is not None and record.detached and record.alive else None


def read_clusters(
    counts: list[int], device_memory: str | None, device_speed: str | None
) -> list[list[Device]]:
    """Makes the devices of each cluster from the options."""
    memory = [read_bytes(text) for text in (device_memory or "0").split(",")]
    speed = [_read_speed(text) for text in (device_speed or "0").split(",")]
    return [
        [Device(m, s) for m, s in zip(memories, speeds, strict=True)]
        for memories, speeds in zip(
            share_out(memory, counts, "--device-memory"),
            share_out(speed, counts, "--device-speed"),
            strict=True,
        )
    ]


def read_emulation(
    counts: list[int], emulate: str | None, emulation_file: Path | None
) -> Emulation | None:
    """Makes the emulated world from the options.

    Returns:
        `None` when nothing is to be emulated.

    Raises:
        InvalidInputError: A profile is not known, or the file is no emulation.
    """
    if emulation_file is not None:
        if emulate is not None:
            raise InvalidInputError(
                f"--emulate {emulate} and --emulation {emulation_file} both say what the devices "
                "are: give one of them"
            )
        return EmulationFile(emulation_file).current()
    if emulate is None:
        return None
    names = [name.strip() for name in emulate.split(",")]
    for name in set(names) - {REAL}:
        device_profile(name)
    return Emulation(
        devices={
            device_name(cluster_index, device_index): EmulatedDevice(profile=name)
            for cluster_index, cluster in enumerate(share_out(names, counts, "--emulate"))
            for device_index, name in enumerate(cluster)
            if name != REAL
        }
    )


def read_counts(devices: str, num_clusters: int) -> list[int]:
    """Reads `--devices`: one number for all clusters, or one for each."""
    parts = devices.split(",")
    if not all(part.strip().isdigit() and int(part) > 0 for part in parts):
        raise InvalidInputError(
            f"--devices {devices}: give positive numbers with commas between, for example 3,3"
        )
    counts = [int(part) for part in parts]
    if len(counts) == 1:
        return counts * num_clusters
    if len(counts) != num_clusters:
        raise InvalidInputError(
            f"--devices {devices}: {len(counts)} numbers for {num_clusters} clusters: give one for "
            "each, or one for all"
        )
    return counts


def read_bytes(text: str) -> int:
    """Reads a size: "200MB", "1.5 GiB", "0"."""
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]*)", text.strip())
    if match is None or match[2].upper() not in _UNITS:
        raise InvalidInputError(
            f"{text!r} is not a size: give a number with B, KB, MB, GB, KiB, MiB or GiB, for "
            "example 200MB"
        )
    return int(float(match[1]) * _UNITS[match[2].upper()])


def _read_speed(text: str) -> float:
    try:
        speed = float(text)
    except ValueError:
        speed = -1.0
    if not 0 <= speed < float("inf"):
        raise InvalidInputError(
            f"--device-speed: {text!r} is not a positive number: give samples a second, for "
            "example 40"
        )
    return speed


@contextmanager
def client_for_records(
    endpoint: Endpoint | None, workspace: Path, as_json: bool
) -> Iterator[CollaPipeClient]:
    """Gives a client to what past jobs left.

    With nothing up, the scheduler and the edge server are started for it.
    """
    if endpoint is not None:
        with endpoint.client() as client:
            yield client
        return
    if not workspace.exists():
        raise InvalidInputError(
            f"there is no testbed in {workspace.absolute()}: run this where you trained, or give "
            "--workspace DIR or --scheduler HOST:PORT"
        )
    tell = complain if as_json else say
    with LocalTestbed([], workspace, progress=tell) as testbed, testbed.client() as client:
        testbed.wait_until_registered()
        yield client
