"""What a shaper tells about itself: applied/HOST.json beside links.json."""

from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from collapipe.errors import CorruptDataError


class AppliedLink(BaseModel):
    """One link that leaves the host, as it is in force."""

    model_config = ConfigDict(extra="ignore")

    keys: list[str]
    """Which entries of links.json say so."""
    addresses: list[str] = Field(default_factory=list)
    """Of the receiver; none while its name is not known yet."""
    rate_bps: float | None = None
    delay_seconds: float = 0.0
    jitter_seconds: float = 0.0
    loss_ratio: float = 0.0


class Applied(BaseModel):
    """What a host's shaper has in force."""

    model_config = ConfigDict(extra="ignore")

    host: str
    interface: str
    running: bool
    digest: str
    """Names the content of links.json that this tells about."""
    in_force: bool
    """Whether that content is what the kernel does, as far as names are known; if not, `problems` says why."""
    at: float
    """Since when, in seconds since 1970."""
    netem: bool | None = None
    """Whether the kernel has it; `None` while nothing had to be shaped."""
    links: dict[str, AppliedLink] = Field(default_factory=dict)
    """By receiver."""
    problems: list[str] = Field(default_factory=list)
    """What is not as links.json says, and why."""
    segmentation: list[str] = Field(default_factory=list)
    """Offloads that the shaper switched off, to be switched on when it goes."""


def applied_folder(state: Path) -> Path:
    """Where shapers of a state file tell what they applied."""
    return state.parent / "applied"


def read_applied(path: Path) -> Applied | None:
    """Reads what a shaper told; `None` where there is nothing.

    Raises:
        CorruptDataError: It is not what a shaper writes.
    """
    try:
        return Applied.model_validate_json(path.read_bytes())
    except FileNotFoundError:
        return None
    except (OSError, ValidationError) as error:
        raise CorruptDataError(f"{path} cannot be read ({error}): delete it") from error
