"""emulation.json: the processors, links and radios that the hosts of a local testbed emulate.

The testbed writes this file. Each host reads its own part, and reads the file again when it changes. So a
link or a processor can become slower while a job runs.
"""

import logging
import threading
from pathlib import Path

from pydantic import Field, ValidationError
from typing_extensions import Self

from collapipe.emulation.device_profiles import ProfileName
from collapipe.emulation.links import LinkDescription, describe_mistakes, matching_links
from collapipe.emulation.named_tables import StrictModel
from collapipe.emulation.network_profiles import LinkConditions
from collapipe.errors import InvalidInputError

logger = logging.getLogger(__name__)


class EmulatedDevice(StrictModel):
    """A processor that is slower than the one of this machine.

    A stage computes for real, and then waits until the emulated device would have finished.
    """

    profile: ProfileName
    """Name of a device profile, for example `raspberry-pi-4`."""
    slowdown: float = Field(default=1.0, gt=0)
    """Factor on the times of the profile. With 4, the processor has a quarter of its speed."""


class EmulatedRadio(StrictModel):
    """One direction of a radio link, as in docs/scheduling.md (1)."""

    gain: float = Field(gt=0)
    """Power gain h from the sender to the receiver."""
    noise_watts_per_hertz: float = Field(gt=0)
    """Density of noise and interference at the receiver, N0 + I0."""
    delay_seconds: float = Field(default=0.0, ge=0)
    """One-way delay."""


class Emulation(StrictModel):
    """The content of emulation.json. Pacing emulates only the rate and the delay of a network profile.

    The keys of devices are host ids. The keys of links and radios are "sender>receiver", where * is any
    host, or "*" for every link. The scheduler is the host `scheduler`. Clients are no hosts, and the links
    between them and the hosts are not emulated.
    """

    devices: dict[str, EmulatedDevice] = Field(default_factory=dict)
    links: dict[str, LinkDescription] = Field(default_factory=dict)
    radios: dict[str, EmulatedRadio] = Field(default_factory=dict)
    time_scale: float = Field(default=1.0, gt=0)
    """Factor on the times of every device profile. A larger factor leaves more time for the real work."""

    @classmethod
    def read(cls, path: Path) -> Self:
        """Reads an emulation file; raises `InvalidInputError`."""
        try:
            return cls.model_validate_json(path.read_text("utf-8"))
        except ValidationError as error:
            reason = describe_mistakes(error)
        except (OSError, UnicodeDecodeError) as error:
            reason = str(error)
        raise InvalidInputError(
            f"the emulation file {path} cannot be used ({reason}): write JSON with the fields of "
            "collapipe.emulation.emulation_file.Emulation"
        )

    def link(self, sender: str, receiver: str) -> LinkConditions:
        """Returns the conditions of the wire between two hosts. Only the first matching entry counts."""
        for description in matching_links(self.links, sender, receiver).values():
            return description.conditions
        return LinkConditions()

    def radio(self, sender: str, receiver: str) -> EmulatedRadio | None:
        """Returns the radio link between two hosts, or `None`. Only the first matching entry counts."""
        return next(iter(matching_links(self.radios, sender, receiver).values()), None)

    def delay_seconds(self, sender: str, receiver: str) -> float:
        """Returns the one-way delay between two hosts: a packet takes the wire and then the radio."""
        radio = self.radio(sender, receiver)
        return self.link(sender, receiver).delay_seconds + (radio.delay_seconds if radio else 0.0)

    def warnings(self) -> list[str]:
        """Describes the conditions of links that pacing cannot emulate."""
        return [
            f"{key}: jitter and loss are not emulated: pacing emulates the rate and the delay of a link"
            for key, link in self.links.items()
            if link.conditions.jitter_seconds or link.conditions.loss_ratio
        ]


class EmulationFile:
    """Follows an emulation file while it changes. Without a path, nothing is emulated."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._lock = threading.Lock()
        self._version: tuple[int, int] | None = None
        """Modification time and inode of the file that was read last."""
        self._current = Emulation()
        self._last_error = ""

    @property
    def is_given(self) -> bool:
        """Whether there is an emulation file."""
        return self._path is not None

    def current(self) -> Emulation:
        """Returns the emulation. The call is cheap enough to make before every micro-batch.

        If the file becomes unusable, the last usable content stays in force, so that no round fails.

        Raises:
            InvalidInputError: The file has never been usable.
        """
        if self._path is None:
            return self._current
        with self._lock:
            try:
                self._read_if_changed(self._path)
            except InvalidInputError as error:
                if self._version is None:
                    raise
                if str(error) != self._last_error:  # log it once, not before every micro-batch
                    logger.warning("%s; its last usable content stays in force", error)
                    self._last_error = str(error)
            return self._current

    def _read_if_changed(self, path: Path) -> None:
        try:
            status = path.stat()
        except OSError as error:
            raise InvalidInputError(
                f"the emulation file {path} cannot be used ({error.strerror}): restore it, or give another"
            ) from None
        version = (status.st_mtime_ns, status.st_ino)
        if version == self._version:
            return
        self._current = Emulation.read(path)
        self._version, self._last_error = version, ""
        for warning in self._current.warnings():
            logger.warning("emulated link %s", warning)
