"""What networks are like: profiles.toml, and what can be said of a single link."""

import sys
from collections.abc import Mapping
from functools import cache
from importlib import resources
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from typing_extensions import Self

from collapipe.errors import InvalidInputError

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

Direction = Literal["up", "down"]
"""From a device into the network, or to the device."""


class _Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


MOST_SECONDS = 60.0
"""Of delay, one way."""
MOST_LOSS = 0.9999
"""A link that loses everything is none."""


class LinkConditions(_Section):
    """What one direction of a link does to packets; by default nothing."""

    rate_bps: float | None = Field(default=None, ge=1000)
    """Of Ethernet frames, headers included; `None` is no limit."""
    delay_seconds: float = Field(default=0.0, ge=0, le=MOST_SECONDS)
    """One way."""
    jitter_seconds: float = Field(default=0.0, ge=0)
    """The most that a packet's delay is off, either way; all are equally likely, and packets stay in order."""
    loss_ratio: float = Field(default=0.0, ge=0, le=MOST_LOSS)
    """Of packets, each for itself."""
    queue_seconds: float = Field(default=0.1, gt=0, le=60)
    """How long a full queue takes to empty; what does not fit is dropped."""

    @model_validator(mode="after")
    def _no_packet_arrives_before_it_left(self) -> Self:
        if self.jitter_seconds > self.delay_seconds:
            raise ValueError(
                f"a jitter of {self.jitter_seconds:g} s is more than the delay of {self.delay_seconds:g} s"
            )
        return self

    @property
    def free(self) -> bool:
        """Whether nothing is shaped."""
        return self.rate_bps is None and not self.delay_seconds and not self.loss_ratio


class NetworkProfile(_Section):
    """A kind of network."""

    description: str
    source: str
    """Where its figures come from."""
    up: LinkConditions
    down: LinkConditions


def _read_profiles(text: str) -> dict[str, NetworkProfile]:
    profiles = {}
    for name, table in tomllib.loads(text).items():
        about = {key: table.pop(key) for key in ("description", "source")}
        directions = {direction: table.pop(direction, {}) for direction in ("up", "down")}
        both = {direction: {**table, **own} for direction, own in directions.items()}
        profiles[name] = NetworkProfile.model_validate({**about, **both})
    return profiles


@cache
def network_profiles() -> Mapping[str, NetworkProfile]:
    """All profiles, by name."""
    data = resources.files("collapipe.traffic_shaping.netem") / "profiles.toml"
    return _read_profiles(data.read_text("utf-8"))


def network_profile(name: str) -> NetworkProfile:
    """Finds a profile by its name; raises `InvalidInputError`."""
    profiles = network_profiles()
    if name not in profiles:
        raise InvalidInputError(
            f"there is no network profile {name!r}: use one of {', '.join(profiles)}"
        )
    return profiles[name]


class LinkValues(_Section):
    """What is said of a link: a profile, values, or both, where the values count."""

    profile: str | None = None
    rate_bps: float | None = None
    delay_seconds: float | None = None
    jitter_seconds: float | None = None
    loss_ratio: float | None = None
    queue_seconds: float | None = None

    @model_validator(mode="after")
    def _usable(self) -> Self:
        try:
            for direction in ("up", "down"):
                self.in_direction(direction)
        except ValidationError as error:
            raise ValueError("; ".join(say_mistakes(error))) from None
        except InvalidInputError as error:
            raise ValueError(str(error)) from None
        return self

    def in_direction(self, direction: Direction) -> LinkConditions:
        """What it means for one direction.

        Raises:
            InvalidInputError: The profile is not known.
        """
        if self.profile is None:
            base: dict[str, Any] = {}
        else:
            base = getattr(network_profile(self.profile), direction).model_dump()
        own = self.model_dump(include=set(LinkConditions.model_fields), exclude_none=True)
        return LinkConditions.model_validate({**base, **own})


def say_mistakes(error: ValidationError) -> list[str]:
    """What is wrong with a document, a text for each mistake."""
    return [
        ": ".join(filter(None, (".".join(map(str, mistake["loc"])), _plain(mistake["msg"]))))
        for mistake in error.errors()
    ]


def _plain(message: str) -> str:
    return message.removeprefix("Value error, ")
