"""The status of a shaper process: applied/HOST.json beside links.json."""

from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from collapipe.emulation.network_profiles import LinkConditions
from collapipe.errors import CorruptDataError, InvalidInputError
from collapipe.traffic_shaping.shaper_process.links_file import LinksFile


class AppliedLink(LinkConditions):
    """The conditions of one link that leaves the host."""

    model_config = ConfigDict(extra="ignore")

    keys: list[str]
    """The keys of links.json that the conditions come from."""
    addresses: list[str] = Field(default_factory=list)
    """The addresses of the receiver; empty while its name has none."""


class ShaperStatus(BaseModel):
    """What the shaper process of a host has applied. A later version may write more fields."""

    model_config = ConfigDict(extra="ignore")

    host: str
    interface: str
    running: bool
    digest: str
    """Digest of the links.json that this status is about."""
    in_force: bool
    """Whether the kernel shapes as links.json says, for all receivers whose address is known."""
    at: float
    """When this status was written, in seconds since 1970."""
    netem: bool | None = None
    """Whether the kernel has netem; `None` before the first link was shaped."""
    links: dict[str, AppliedLink] = Field(default_factory=dict)
    """The shaped links by receiver."""
    problems: list[str] = Field(default_factory=list)
    """Differences from links.json, with their reasons."""
    segmentation: list[str] = Field(default_factory=list)
    """Offloads that the shaper process switched off, and switches on when it ends."""

    @property
    def lacks_netem(self) -> bool:
        """Whether links have a delay or a loss in links.json that this kernel cannot emulate."""
        asked = any(link.delay_seconds or link.loss_ratio for link in self.links.values())
        return self.netem is False and asked


def status_folder(links_path: Path) -> Path:
    """Returns where the shaper processes that follow a links.json write their status."""
    return links_path.parent / "applied"


def status_path(links_path: Path, host: str, folder: Path | None = None) -> Path:
    """Returns the file with the status of the shaper process of a host."""
    return (folder or status_folder(links_path)) / f"{host}.json"


def why_unshaped(links_path: Path, host: str) -> str:
    """Returns why the links of a host differ from links.json, in words; "" if they do not."""
    try:
        status = read_status(status_path(links_path, host))
        digest = LinksFile.read(links_path).digest
    except (CorruptDataError, InvalidInputError) as error:
        return str(error)
    if status is None or not status.running:
        return (
            f"no shaper process of {host} follows {links_path}: start the host with `python -m collapipe.traffic_shaping "
            "COMMAND`, and see its log"
        )
    if status.lacks_netem or not status.in_force:
        return "; ".join(status.problems)
    if status.digest != digest:
        return f"the shaper process of {host} has not taken over the last change of {links_path}: see whether it runs"
    return ""


def read_status(path: Path) -> ShaperStatus | None:
    """Reads the status of a shaper process, if there is one; raises `CorruptDataError`."""
    try:
        return ShaperStatus.model_validate_json(path.read_bytes())
    except FileNotFoundError:
        return None
    except (OSError, ValidationError) as error:
        raise CorruptDataError(f"{path} cannot be read ({error}): delete it") from error
