"""links.json: the links of a testbed whose hosts have shaper processes.

    {"hosts": ["control-unit-0", "device-0-0", ...],
     "links": {"device-0-0>*": {"profile": "wifi"},
               "*>device-0-0": {"profile": "wifi", "direction": "down"},
               "device-0-1>device-0-2": {"rate_bps": 20e6, "delay_seconds": 0.01},
               "device-1-0>*": {"trace": "walk-away", "started_at": 1767225600.0}}}

`collapipe.emulation.links` explains the keys. If a link has an entry of its own, only this entry counts.
Otherwise the link consists of two parts: the entry of its sender, then the entry of its receiver. So a phone
behind a slow radio is slow for every server. The entry "*" counts for links without any other entry. (In
emulation.json, only the first matching entry counts.) A link without an entry is not shaped. The sending host
shapes the link.
"""

import hashlib
import math
from collections.abc import Iterable
from pathlib import Path

from pydantic import Field, ValidationError, field_validator, model_validator
from typing_extensions import Self

from collapipe.emulation.links import (
    LinkDescription,
    LinkKey,
    LinkValues,
    describe_mistakes,
    matching_links,
)
from collapipe.emulation.named_tables import StrictModel
from collapipe.emulation.network_profiles import MAX_LOSS_RATIO, LinkConditions
from collapipe.errors import InvalidInputError
from collapipe.traffic_shaping.shaper_process.traces import Trace, named_trace

INITIAL = "initial.json"
"""This file beside links.json describes the links until links.json exists."""

_MIN_RATE_BPS = 1000
_MAX_DELAY_SECONDS = 60.0


class LinkEntry(LinkDescription):
    """An entry of links.json: a profile and values, or a trace."""

    trace: str | Trace | None = None
    """The name of a trace in the package, or a whole trace."""
    started_at: float = 0.0
    """When the trace began, in seconds since 1970."""

    @model_validator(mode="after")
    def _check_trace(self) -> Self:
        if self.trace is None:
            return self
        values = self.model_dump(include=set(LinkValues.model_fields), exclude_none=True)
        if values:
            raise ValueError(
                f"a link has a trace or {', '.join(values)}, not both: put them into the steps of the trace"
            )
        if isinstance(self.trace, str):
            try:
                named_trace(self.trace)
            except InvalidInputError as error:
                raise ValueError(str(error)) from None
        return self

    @model_validator(mode="after")
    def _check_limits_of_tc(self) -> Self:
        trace = self._trace
        for values in (self,) if trace is None else trace.steps:
            if values.rate_bps is not None and values.rate_bps < _MIN_RATE_BPS:
                raise ValueError(
                    f"rate_bps is {values.rate_bps:g}: it must be greater than or equal to {_MIN_RATE_BPS}"
                )
            if values.delay_seconds is not None and values.delay_seconds > _MAX_DELAY_SECONDS:
                raise ValueError(
                    f"delay_seconds is {values.delay_seconds:g}: it must be less than or equal to {_MAX_DELAY_SECONDS:g}"
                )
        return self

    def conditions_at(self, now: float) -> LinkConditions:
        """Returns the conditions at a time in seconds since 1970."""
        trace = self._trace
        values = self if trace is None else trace.step_at(now - self.started_at)
        return values.in_direction(self.direction)

    def next_change(self, now: float) -> float | None:
        """Returns when the trace changes the conditions next, in seconds since 1970; `None` for never."""
        trace = self._trace
        after = None if trace is None else trace.next_change(now - self.started_at)
        return None if after is None else self.started_at + after

    @property
    def _trace(self) -> Trace | None:
        return named_trace(self.trace) if isinstance(self.trace, str) else self.trace


class LinksFile(StrictModel):
    """The content of links.json."""

    hosts: tuple[str, ...] = ()
    """All hosts of the testbed. A "*" in a key stands for any of them."""
    links: dict[str, LinkEntry] = Field(default_factory=dict)

    @field_validator("links")
    @classmethod
    def _check_keys(cls, links: dict[str, LinkEntry]) -> dict[str, LinkEntry]:
        try:
            return {str(LinkKey.parse(key)): entry for key, entry in links.items()}
        except InvalidInputError as error:
            raise ValueError(str(error)) from None

    @classmethod
    def read(cls, path: Path) -> Self:
        """Reads links.json, else initial.json, else describes no link; raises `InvalidInputError`."""
        for candidate in (path, path.with_name(INITIAL)):
            try:
                return cls.model_validate_json(candidate.read_bytes())
            except FileNotFoundError:
                continue
            except ValidationError as error:
                reason = describe_mistakes(error)
            except OSError as error:
                reason = str(error)
            raise InvalidInputError(
                f"{candidate} cannot be used ({reason}): write JSON with the fields of "
                "collapipe.traffic_shaping.shaper_process.links_file.LinksFile"
            )
        return cls()

    @property
    def text(self) -> str:
        return self.model_dump_json(indent=1, exclude_defaults=True) + "\n"

    @property
    def digest(self) -> str:
        """Identifies the content, so that a shaper process can report which content it has applied."""
        return hashlib.sha256(self.text.encode()).hexdigest()[:16]

    @property
    def all_hosts(self) -> list[str]:
        """The hosts in `hosts` and in the keys of links, sorted."""
        named = {host for key in self.links for host in LinkKey.parse(key).hosts}
        return sorted(named.union(self.hosts))

    def links_from(self, sender: str) -> dict[str, dict[str, LinkEntry]]:
        """Returns the shaped links that leave a host, by receiver: the entries of their parts, by key."""
        matching = {
            receiver: matching_links(self.links, sender, receiver)
            for receiver in self.all_hosts
            if receiver != sender
        }
        return {receiver: parts for receiver, parts in matching.items() if parts}


def combine(parts: Iterable[LinkConditions]) -> LinkConditions:
    """Returns the conditions of a link that consists of several parts."""
    parts = list(parts)
    # Packets queue at the slowest part.
    slowest = min(parts, key=lambda part: part.rate_bps or math.inf)
    return LinkConditions(
        rate_bps=slowest.rate_bps,
        # Each part is within the limits, but the sum may exceed them.
        delay_seconds=min(sum(part.delay_seconds for part in parts), _MAX_DELAY_SECONDS),
        jitter_seconds=min(sum(part.jitter_seconds for part in parts), _MAX_DELAY_SECONDS),
        loss_ratio=min(1 - math.prod(1 - part.loss_ratio for part in parts), MAX_LOSS_RATIO),
        queue_seconds=slowest.queue_seconds,
    )
