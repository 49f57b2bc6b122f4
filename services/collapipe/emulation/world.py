"""An emulated world for hosts on one machine: slower processors, narrower links, radios.

A testbed writes one JSON file; every host is given its path, reads its own part, and looks again when the file
changes, so that a link or a processor can be slowed while a job runs.
"""

import logging
import threading
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field, field_validator

from collapipe.emulation.device_profiles import device_profile
from collapipe.errors import InvalidInputError

logger = logging.getLogger(__name__)


class _Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)


class EmulatedDevice(_Section):
    """A processor that is slower than this machine's.

    A stage computes for real, then waits until the emulated device would have been done.
    """

    profile: str
    """Name of a device profile, for example `raspberry-pi-4`."""
    slowdown: float = Field(default=1.0, gt=0)
    """Times the profile's seconds; 4 is a processor at a quarter of its speed."""

    @field_validator("profile")
    @classmethod
    def _known(cls, profile: str) -> str:
        try:
            device_profile(profile)
        except InvalidInputError as error:
            raise ValueError(str(error)) from None
        return profile


class EmulatedLink(_Section):
    """One direction of a wired link."""

    rate_bps: float | None = Field(default=None, gt=0)
    """What it carries, in bit/s; not set: whatever this machine does."""
    delay_seconds: float = Field(default=0.0, ge=0)
    """One-way delay."""


class EmulatedRadio(_Section):
    """One direction of a radio link: design (1)."""

    gain: float = Field(gt=0)
    """Power gain h from the sender to the receiver."""
    noise_watts_per_hertz: float = Field(gt=0)
    """Noise and interference density at the receiver, N0 + I0."""
    delay_seconds: float = Field(default=0.0, ge=0)


class Emulation(_Section):
    """The whole world. Keys of links are "sender>receiver", host ids; "*" stands for any other."""

    devices: dict[str, EmulatedDevice] = Field(default_factory=dict)
    links: dict[str, EmulatedLink] = Field(default_factory=dict)
    radios: dict[str, EmulatedRadio] = Field(default_factory=dict)
    time_scale: float = Field(default=1.0, gt=0)
    """Every profile's seconds are multiplied by it, so that real work fits into emulated time."""

    def link(self, sender: str, receiver: str) -> EmulatedLink:
        """The wire from one host to another; unlimited when none is named."""
        for key in (f"{sender}>{receiver}", f"{sender}>*", f"*>{receiver}", "*"):
            if key in self.links:
                return self.links[key]
        return EmulatedLink()

    def radio(self, sender: str, receiver: str) -> EmulatedRadio | None:
        """The radio link from one host to another; `None` when they have none."""
        for key in (f"{sender}>{receiver}", f"{sender}>*", f"*>{receiver}", "*"):
            if key in self.radios:
                return self.radios[key]
        return None

    def delay_seconds(self, sender: str, receiver: str) -> float:
        """One-way delay from one host to another: a wire and a radio follow one another."""
        radio = self.radio(sender, receiver)
        return self.link(sender, receiver).delay_seconds + (radio.delay_seconds if radio else 0.0)


class EmulationFile:
    """The emulation as its file says now; without a file nothing is emulated.

    Args:
        path: The file; `None` for none.
    """

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._lock = threading.Lock()
        self._stamp: tuple[int, int] | None = None
        self._current = Emulation()
        self._refused = ""

    def current(self) -> Emulation:
        """The emulation; cheap enough to ask before every micro-batch.

        A file that is being written, or went away, leaves the world as it was: no round fails for it.

        Raises:
            InvalidInputError: The file was never an emulation.
        """
        if self._path is None:
            return self._current
        with self._lock:
            try:
                status = self._path.stat()
                stamp = (status.st_mtime_ns, status.st_ino)
                if stamp != self._stamp:
                    self._current = Emulation.model_validate_json(self._path.read_text("utf-8"))
                    self._stamp, self._refused = stamp, ""
            except (OSError, ValueError) as error:  # pydantic's and Unicode's are ValueErrors
                refusal = (
                    f"the emulation file {self._path} cannot be used ({error}): it is JSON as "
                    "collapipe.emulation.world.Emulation says"
                )
                if self._stamp is None:
                    raise InvalidInputError(refusal) from None
                if refusal != self._refused:  # once, not with every micro-batch
                    logger.warning("%s; what it said before stays in force", refusal)
                    self._refused = refusal
            return self._current
