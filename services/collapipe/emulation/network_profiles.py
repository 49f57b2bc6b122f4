"""The conditions of a link, and the network profiles of network_profiles.toml."""

from collections.abc import Mapping
from pathlib import Path
from typing import Literal

from pydantic import Field, model_validator
from typing_extensions import Self

from collapipe.emulation.named_tables import StrictModel, find_table, read_toml

Direction = Literal["up", "down"]
"""Up is from a device into the network, down is from the network to the device."""

MAX_LOSS_RATIO = 0.9999
"""A link that loses every packet is not a link."""


class LinkConditions(StrictModel):
    """What one direction of a link does to packets. The default is an ideal link."""

    rate_bps: float | None = Field(default=None, gt=0)
    """Rate in bit/s of whole Ethernet frames, with their headers. `None` means no limit."""
    delay_seconds: float = Field(default=0.0, ge=0)
    """One-way delay."""
    jitter_seconds: float = Field(default=0.0, ge=0)
    """The largest deviation of a packet's delay, up or down. It is uniform, and packets stay in order."""
    loss_ratio: float = Field(default=0.0, ge=0, le=MAX_LOSS_RATIO)
    """The probability that a packet is lost, independent of other packets."""
    queue_seconds: float = Field(default=0.1, gt=0, le=60)
    """The time that a full queue takes to empty. Packets that do not fit into the queue are dropped."""

    @model_validator(mode="after")
    def _check_jitter(self) -> Self:
        if self.jitter_seconds > self.delay_seconds:
            raise ValueError(
                f"a jitter of {self.jitter_seconds:g} s is more than the delay of {self.delay_seconds:g} s: "
                "lower jitter_seconds"
            )
        return self

    @property
    def is_ideal(self) -> bool:
        """Whether the link neither limits, nor delays, nor loses packets."""
        return self.rate_bps is None and not self.delay_seconds and not self.loss_ratio


class NetworkProfile(StrictModel):
    """A kind of network."""

    description: str
    source: str
    """The source of its figures."""
    up: LinkConditions
    down: LinkConditions


def _read_profiles() -> Mapping[str, NetworkProfile]:
    profiles = {}
    for name, table in read_toml(Path(__file__).with_name("network_profiles.toml")).items():
        texts = {key: table.pop(key) for key in ("description", "source")}
        own = {direction: table.pop(direction, {}) for direction in ("up", "down")}
        # The values that remain in the table apply to both directions.
        directions = {direction: {**table, **values} for direction, values in own.items()}
        profiles[name] = NetworkProfile.model_validate({**texts, **directions})
    return profiles


NETWORK_PROFILES = _read_profiles()


def network_profile(name: str) -> NetworkProfile:
    """Returns the network profile with a name; raises `InvalidInputError`."""
    return find_table("network profile", name, NETWORK_PROFILES)
