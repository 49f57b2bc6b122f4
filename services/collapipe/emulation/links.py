"""Descriptions of links, in emulation.json (local testbeds) and links.json (testbeds with shaper processes).

Both files map keys to descriptions. A key is "sender>receiver" for one link, "sender>*" for all links that
leave a host, "*>receiver" for all links that lead to a host, or "*" for every link.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeVar

from pydantic import ValidationError, model_validator
from typing_extensions import Self

from collapipe.emulation.named_tables import StrictModel
from collapipe.emulation.network_profiles import Direction, LinkConditions, network_profile
from collapipe.errors import InvalidInputError

ANY_HOST = "*"

_Link = TypeVar("_Link")


class LinkValues(StrictModel):
    """A network profile, values, or both. A value replaces the same value of the profile."""

    profile: str | None = None
    """Name of a network profile, for example `wifi`."""
    rate_bps: float | None = None
    """Rate in bit/s."""
    delay_seconds: float | None = None
    """One-way delay."""
    jitter_seconds: float | None = None
    """The largest deviation of a packet's delay, up or down. Needs netem."""
    loss_ratio: float | None = None
    """The probability that a packet is lost. Needs netem."""
    queue_seconds: float | None = None
    """The time that a full queue takes to empty. Needs tc."""

    @model_validator(mode="after")
    def _check_conditions(self) -> Self:
        try:
            self.in_direction("up")
            self.in_direction("down")
        except ValidationError as error:
            raise ValueError(describe_mistakes(error)) from None
        except InvalidInputError as error:
            raise ValueError(str(error)) from None
        return self

    def in_direction(self, direction: Direction) -> LinkConditions:
        """Returns the conditions in one direction of the profile; raises `InvalidInputError`."""
        values: dict[str, Any] = {}
        if self.profile is not None:
            profile = network_profile(self.profile)
            values = (profile.up if direction == "up" else profile.down).model_dump()
        values |= self.model_dump(include=set(LinkConditions.model_fields), exclude_none=True)
        return LinkConditions.model_validate(values)


class LinkDescription(LinkValues):
    """One direction of a link. A value replaces the same value of the network profile."""

    direction: Direction = "up"
    """The direction of the network profile: from a device into the network, or to the device."""

    @cached_property  # hosts ask for it with every frame
    def conditions(self) -> LinkConditions:
        return self.in_direction(self.direction)


@dataclass(frozen=True)
class LinkKey:
    """The links between two hosts, each of which may be `ANY_HOST`."""

    sender: str
    receiver: str

    @classmethod
    def parse(cls, text: str) -> "LinkKey":
        """Reads a key, for example "device-0-0>*"; raises `InvalidInputError`."""
        if text == ANY_HOST:
            return cls(ANY_HOST, ANY_HOST)
        sender, arrow, receiver = text.partition(">")
        ends = (sender.strip(), receiver.strip())
        if not arrow or not all(ends) or ">" in receiver:
            raise InvalidInputError(
                f"{text!r} is not a link: give sender>receiver, for example device-0-0>*, where * is any host, or * "
                "for every link"
            )
        return cls(*ends)

    def __str__(self) -> str:
        ends = (self.sender, self.receiver)
        return ANY_HOST if ends == (ANY_HOST, ANY_HOST) else ">".join(ends)

    @property
    def reverse(self) -> "LinkKey":
        """The key of the opposite direction."""
        return LinkKey(self.receiver, self.sender)

    @property
    def hosts(self) -> set[str]:
        """The hosts that the key names."""
        return {self.sender, self.receiver} - {ANY_HOST}

    def matches(self, sender: str, receiver: str) -> bool:
        """Returns whether the key includes the link between two hosts."""
        return self.sender in (sender, ANY_HOST) and self.receiver in (receiver, ANY_HOST)


def matching_links(links: Mapping[str, _Link], sender: str, receiver: str) -> dict[str, _Link]:
    """Returns the entries with the most specific keys that include a link, by key.

    These are the entry of the link itself, else the entries of its sender and of its receiver (in this
    order), else the entry for every link, else none.
    """
    own, of_ends = f"{sender}>{receiver}", (f"{sender}>{ANY_HOST}", f"{ANY_HOST}>{receiver}")
    for keys in ((own,), of_ends, (ANY_HOST,)):
        if found := {key: links[key] for key in keys if key in links}:
            return found
    return {}


def describe_mistakes(error: ValidationError) -> str:
    """Returns the mistakes in a document, each with its place, as one text."""
    mistakes = []
    for mistake in error.errors():
        place = ".".join(map(str, mistake["loc"]))
        text = mistake["msg"].removeprefix("Value error, ")
        mistakes.append(f"{place}: {text}" if place else text)
    return "; ".join(mistakes)
