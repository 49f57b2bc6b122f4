"""The options that describe a local testbed."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, TypeVar

import typer

from collapipe.emulation.device_profiles import DEVICE_PROFILES, device_profile
from collapipe.emulation.emulation_file import EmulatedDevice, Emulation, EmulationFile
from collapipe.errors import InvalidInputError
from collapipe_client.quantities import read_bytes
from collapipe_client.testbed_processes import Device, device_name

T = TypeVar("T")

NOT_EMULATED = "none"
"""The value of --emulate for a device that computes as fast as this machine."""
_MOST_DEVICES = 1000


@dataclass(frozen=True)
class LocalTestbedOptions:
    """The options as they were given on the command line.

    In the methods, `counts` is the number of devices of each cluster.
    """

    devices: Annotated[
        str | None,
        typer.Option(
            metavar="K,K...",
            help="Number of devices of each cluster, or one number for all clusters.",
        ),
    ] = None
    device_memory: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE,...",
            help="Memory that devices may use for training, for example 200MB. Give one size, or a list. "
            "A list has a size for each device of a cluster, or for each device of the testbed. 0 means no limit.",
        ),
    ] = None
    device_speed: Annotated[
        str | None,
        typer.Option(
            metavar="X,...",
            help="Samples a second that one block processes on a device; as many values as for --device-memory. "
            "0 means that the device measures its speed.",
        ),
    ] = None
    emulate: Annotated[
        str | None,
        typer.Option(
            metavar="PROFILE,...",
            help=f"Emulate devices: {', '.join(DEVICE_PROFILES)}, or {NOT_EMULATED} for the speed of this machine; "
            "as many values as for --device-memory. An emulated device waits after each computation.",
        ),
    ] = None
    emulation: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Emulate the devices, links and radios of this JSON file. Not with --emulate.",
        ),
    ] = None

    @property
    def describe_devices(self) -> bool:
        """Whether an option says how many devices there are, or what they are."""
        return not (
            self.devices is None and self.device_memory is None and self.device_speed is None
        )

    def read_counts(self, num_clusters: int) -> list[int] | None:
        """Returns the number of devices of each cluster; `None` without --devices."""
        if self.devices is None:
            return None
        parts = self.devices.split(",")
        if not all(part.strip().isdigit() and int(part) > 0 for part in parts):
            raise InvalidInputError(
                f"--devices {self.devices}: give positive numbers with commas between them, for example 3,3"
            )
        counts = [int(part) for part in parts]
        if len(counts) not in (1, num_clusters):
            raise InvalidInputError(
                f"--devices {self.devices} has {len(counts)} numbers for {num_clusters} clusters: give one "
                "number for each cluster, or one for all"
            )
        return counts * num_clusters if len(counts) == 1 else counts

    def read_clusters(self, counts: Sequence[int]) -> list[list[Device]]:
        """Returns the devices of each cluster."""
        if sum(counts) > _MOST_DEVICES:
            raise InvalidInputError(
                f"a testbed of {sum(counts)} devices is wanted, but each is a process on this machine, and at most {_MOST_DEVICES} may be: "
                "lower --clusters and --devices, or `clusters` and `devices_per_cluster` of the job"
            )
        memory = [_read_memory(text) for text in (self.device_memory or "0").split(",")]
        speeds = [_read_speed(text) for text in (self.device_speed or "0").split(",")]
        memory_by_cluster = share_out(memory, counts, "--device-memory")
        speed_by_cluster = share_out(speeds, counts, "--device-speed")
        return [
            [Device(memory_bytes, speed) for memory_bytes, speed in zip(*cluster, strict=True)]
            for cluster in zip(memory_by_cluster, speed_by_cluster, strict=True)
        ]

    def read_emulation(self, counts: Sequence[int]) -> Emulation | None:
        """Returns the emulation; `None` without --emulate and --emulation.

        Raises:
            InvalidInputError: A profile is unknown, or the file is invalid.
        """
        if self.emulation is not None:
            if self.emulate is not None:
                raise InvalidInputError(
                    f"--emulate {self.emulate} and --emulation {self.emulation} both describe the devices: "
                    "give one of them"
                )
            return EmulationFile(self.emulation).current()
        if self.emulate is None:
            return None
        profiles = [name.strip() for name in self.emulate.split(",")]
        for profile in set(profiles) - {NOT_EMULATED}:
            device_profile(profile)  # Raises InvalidInputError for an unknown name.
        return Emulation(
            devices={
                device_name(cluster_index, device_index): EmulatedDevice(profile=profile)
                for cluster_index, cluster in enumerate(share_out(profiles, counts, "--emulate"))
                for device_index, profile in enumerate(cluster)
                if profile != NOT_EMULATED
            }
        )


def share_out(values: Sequence[T], counts: Sequence[int], option: str) -> list[list[T]]:
    """Gives every device its value of an option.

    Args:
        values: One value for all devices, one for each device of a cluster, or one for every device.
        counts: Number of devices of each cluster.
        option: Name of the option, for the error message.

    Raises:
        InvalidInputError: The number of values fits none of the three forms.
    """
    if len(values) == 1:
        return [[values[0]] * count for count in counts]
    if len(values) == sum(counts):
        remaining = iter(values)
        return [[next(remaining) for _ in range(count)] for count in counts]
    if all(count == len(values) for count in counts):
        return [list(values) for _ in counts]
    same_count = f", {counts[0]} for each cluster" if len(set(counts)) == 1 else ""
    raise InvalidInputError(
        f"{option} has {len(values)} values for clusters of {', '.join(map(str, counts))} device{'s' * (list(counts) != [1])}: "
        f"give 1 for all{same_count}, or {sum(counts)} for every device"
    )


def _read_memory(text: str) -> int:
    try:
        return read_bytes(text)
    except InvalidInputError as error:
        raise InvalidInputError(f"--device-memory: {error}") from error


def _read_speed(text: str) -> float:
    try:
        speed = float(text)
    except ValueError:
        speed = -1.0
    if not 0 <= speed < float("inf"):
        raise InvalidInputError(
            f"--device-speed: {text!r} is not a positive number: give samples a second, for example 40"
        )
    return speed
