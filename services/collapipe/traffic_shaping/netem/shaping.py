"""The network of a testbed as its operator wrote it: links.json.

    {"hosts": ["control-unit-0", "device-0-0", ...],
     "links": {"device-0-0>*": {"profile": "wifi"},
               "*>device-0-0": {"profile": "wifi", "direction": "down"},
               "device-0-1>device-0-2": {"rate_bps": 20e6, "delay_seconds": 0.01},
               "device-1-0>*": {"trace": "walk-away", "started_at": 1767225600.0}}}

A key is "sender>receiver" for one link; "sender>*" or "*>receiver" for the way from a host into the network or to it; or "*".
One link's own key counts before all others. Without, the way is both: what its sender has towards the network, then what its
receiver has from it, for a phone is as slow behind a fast server as behind a slow one. "*" counts where there is neither.
(In `links.emulation`, where no link is the way of another, only the first of them counts.)
A link is shaped where it leaves its sender; what no key fits is not shaped.
"""

import hashlib
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from pydantic import Field, ValidationError, field_validator, model_validator
from typing_extensions import Self

from collapipe.errors import InvalidInputError
from collapipe.traffic_shaping.netem.profiles import (
    MOST_LOSS,
    MOST_SECONDS,
    Direction,
    LinkConditions,
    LinkValues,
    _Section,
    say_mistakes,
)
from collapipe.traffic_shaping.netem.traces import Trace, named_trace

ANY = "*"
INITIAL = "initial.json"
"""Beside links.json: what holds until somebody changes it."""


class LinkShape(LinkValues):
    """What one link is like."""

    direction: Direction = "up"
    """Which direction of the profile it is, where the two are unlike."""
    trace: str | Trace | None = None
    """Instead of a profile and values: a trace of the package by its name, or a whole one."""
    started_at: float = 0.0
    """When the trace began, in seconds since 1970."""

    @model_validator(mode="after")
    def _trace_or_values(self) -> Self:
        if self.trace is None:
            return self
        said = self.model_dump(include=set(LinkValues.model_fields), exclude_none=True)
        if said:
            raise ValueError(
                f"a link has a trace or {', '.join(said)}, not both: put them into its steps"
            )
        if isinstance(self.trace, str):
            try:
                named_trace(self.trace)
            except InvalidInputError as error:
                raise ValueError(str(error)) from None
        return self

    def conditions(self, now: float) -> LinkConditions:
        """What it does to packets at a moment, in seconds since 1970."""
        trace = self._trace
        values = self if trace is None else trace.at(now - self.started_at)
        return values.in_direction(self.direction)

    def next_change(self, now: float) -> float | None:
        """When it changes by itself next, in seconds since 1970; `None` for never."""
        trace = self._trace
        after = None if trace is None else trace.next_step_after(now - self.started_at)
        return None if after is None else self.started_at + after

    @property
    def _trace(self) -> Trace | None:
        return named_trace(self.trace) if isinstance(self.trace, str) else self.trace


@dataclass(frozen=True)
class Way:
    """From one host to another.

    Args:
        shapes: What it leads through, by key.
    """

    shapes: Mapping[str, LinkShape]

    def conditions(self, now: float) -> LinkConditions:
        """What it does to packets at a moment, in seconds since 1970."""
        parts = [shape.conditions(now) for shape in self.shapes.values()]
        # the narrowest part has the queue
        narrowest = min(parts, key=lambda part: part.rate_bps or math.inf)
        return LinkConditions(
            rate_bps=narrowest.rate_bps,
            # parts that are each within the limits may not be so together
            delay_seconds=min(sum(part.delay_seconds for part in parts), MOST_SECONDS),
            jitter_seconds=min(sum(part.jitter_seconds for part in parts), MOST_SECONDS),
            loss_ratio=min(1 - math.prod(1 - part.loss_ratio for part in parts), MOST_LOSS),
            queue_seconds=narrowest.queue_seconds,
        )

    def next_change(self, now: float) -> float | None:
        """When it changes by itself next, in seconds since 1970; `None` for never."""
        changes = [shape.next_change(now) for shape in self.shapes.values()]
        return min((change for change in changes if change is not None), default=None)


@dataclass(frozen=True)
class LinkKey:
    """Which links are meant; either end may be any.

    Raises:
        InvalidInputError: Of `parse`: the text is no key.
    """

    sender: str
    receiver: str

    @classmethod
    def parse(cls, text: str) -> "LinkKey":
        """Reads "sender>receiver", where either may be "*", or "*"."""
        if text == ANY:
            return cls(ANY, ANY)
        sender, arrow, receiver = text.partition(">")
        parts = (sender.strip(), receiver.strip())
        if not arrow or not all(parts) or ">" in receiver:
            raise InvalidInputError(
                f"{text!r} is no link: give sender>receiver, for example device-0-0>*, where * is any host, or * for "
                "every link"
            )
        return cls(*parts)

    def __str__(self) -> str:
        return ANY if self.sender == self.receiver == ANY else f"{self.sender}>{self.receiver}"

    @property
    def reverse(self) -> "LinkKey":
        """The other direction."""
        return LinkKey(self.receiver, self.sender)

    @property
    def hosts(self) -> set[str]:
        """The hosts that it names."""
        return {self.sender, self.receiver} - {ANY}


class Shaping(_Section):
    """The whole network."""

    hosts: tuple[str, ...] = ()
    """The hosts of the testbed: those that "*" stands for."""
    links: dict[str, LinkShape] = Field(default_factory=dict)

    @field_validator("links")
    @classmethod
    def _keys(cls, links: dict[str, LinkShape]) -> dict[str, LinkShape]:
        try:
            return {str(LinkKey.parse(key)): shape for key, shape in links.items()}
        except InvalidInputError as error:
            raise ValueError(str(error)) from None

    @property
    def all_hosts(self) -> list[str]:
        """The hosts that are listed, and those that links name."""
        named = {host for key in self.links for host in LinkKey.parse(key).hosts}
        return sorted(named.union(self.hosts))

    def from_host(self, sender: str) -> dict[str, Way]:
        """The shaped ways that leave a host, by receiver."""
        ways = {}
        for receiver in self.all_hosts:
            if receiver == sender:
                continue
            for keys in ((f"{sender}>{receiver}",), (f"{sender}>*", f"*>{receiver}"), (ANY,)):
                if known := {key: self.links[key] for key in keys if key in self.links}:
                    ways[receiver] = Way(known)
                    break
        return ways


@dataclass(frozen=True)
class ShapingText:
    """What a file says, with the name of its content."""

    shaping: Shaping
    digest: str


def read_shaping(path: Path) -> ShapingText:
    """Reads links.json; where there is none yet, initial.json beside it; where there is neither, nothing is shaped.

    Raises:
        InvalidInputError: The file cannot be used.
    """
    for candidate in (path, path.with_name(INITIAL)):
        try:
            text = candidate.read_bytes()
            return ShapingText(Shaping.model_validate_json(text), digest(text))
        except FileNotFoundError:
            continue
        except ValidationError as error:
            reason = "; ".join(say_mistakes(error))
        except OSError as error:
            reason = str(error)
        raise InvalidInputError(
            f"{candidate} cannot be used ({reason}): it is JSON as collapipe.traffic_shaping.netem.shaping.Shaping says"
        )
    return ShapingText(Shaping(), digest(b""))


def digest(text: bytes) -> str:
    """Names a content."""
    return hashlib.sha256(text).hexdigest()[:16]
