"""Reads the settings of the service of a box, with the same precedence as the service.

A client must not import a service, so this module has its own class for the settings that the checks need.
"""

from pathlib import Path
from typing import Any, Literal

from pydantic import ValidationError
from pydantic_settings import PydanticBaseSettingsSource, SettingsConfigDict

from collapipe.errors import InvalidInputError
from collapipe.mistakes import explain_mistakes
from collapipe.service_process import ServiceSettings
from collapipe_client.job_files import read_toml

Role = Literal["scheduler", "edge-server", "control-unit", "device-agent"]

_DEPLOYED = {"listen": "0.0.0.0:7100", "metrics_listen": "0.0.0.0:9100"}
"""The addresses of services in all deployments of deploy/."""


class BoxSettings(ServiceSettings):
    """The settings that the checks need. All others are ignored."""

    model_config = SettingsConfigDict(extra="ignore", cli_parse_args=False)

    scheduler: str = ""
    cluster_index: int = 0
    device: str = "cpu"
    state_dir: Path | None = None

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: Any,
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        *args: Any,
        **kwargs: Any,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Lets the environment override the constructor's arguments, which are the settings of the file."""
        return env_settings, init_settings

    @property
    def advertised_host(self) -> str:
        """The name or address that peers use for this box; empty if unknown."""
        return (self.advertise or "").rpartition(":")[0].strip("[]")


def read_box_settings(config: Path | None) -> BoxSettings:
    """Reads a settings file, and the variables COLLAPIPE_* of the environment, which override it.

    Args:
        config: The file of the service's option --config. `None` stands for the addresses of deploy/.

    Raises:
        InvalidInputError: The file cannot be read, or a value has the wrong type.
    """
    document: dict[str, Any] = dict(_DEPLOYED)
    if config is not None:
        document = read_toml(config, "`collapipe join` writes this file; only root may read it")
    try:
        return BoxSettings(**document)
    except ValidationError as error:
        origin = str(config or "COLLAPIPE_* in the environment")
        raise InvalidInputError(explain_mistakes(error, origin, BoxSettings)) from None
