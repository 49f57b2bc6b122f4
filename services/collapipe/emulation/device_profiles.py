"""The device profiles of device_profiles.toml."""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator

from collapipe.emulation.named_tables import StrictModel, find_table, read_toml
from collapipe.errors import InvalidInputError

MAX_OVERRUN_RATIO = 0.02
"""Largest ratio of overrun to busy time with which the times of emulated devices count."""


class DeviceProfile(StrictModel):
    """A kind of device."""

    short_name: str
    """Another name, for command lines."""
    flops_per_second: float
    """Sustained single-precision operations per second in training, forward and backward."""
    threads: int
    """Compute threads of the device for which the figures stand. The process that imitates it computes with one."""
    memory_bytes_per_second: float
    """Sustained rate of plain streaming. It limits optimizer steps and gradients of embedding tables."""
    seconds_per_micro_batch: float
    """Time of a micro-batch that does not depend on its size: o in docs/scheduling.md (2)."""
    memory_bytes: int
    """Memory that training may use: G in docs/scheduling.md (10)."""
    busy_watts: float
    """Power above idle while the device computes: docs/scheduling.md (8)."""
    idle_watts: float
    """Power of the idle board with its network interface."""


DEVICE_PROFILES: Mapping[str, DeviceProfile] = {
    name: DeviceProfile.model_validate(table)
    for name, table in read_toml(Path(__file__).with_name("device_profiles.toml")).items()
}


def device_profile(name: str) -> DeviceProfile:
    """Returns the device profile with a name or a short name; raises `InvalidInputError`."""
    for profile in DEVICE_PROFILES.values():
        if name == profile.short_name:
            return profile
    return find_table("device profile", name, DEVICE_PROFILES)


def _check_profile(name: str) -> str:
    try:
        device_profile(name)
    except InvalidInputError as error:
        raise ValueError(str(error)) from None
    return name


ProfileName = Annotated[str, AfterValidator(_check_profile)]
"""Name or short name of a device profile, in a model of pydantic."""
