"""The settings of the service that a box runs, read as the service reads them.

The services' own classes stay with the services: a client imports none of them.
"""

import os
from pathlib import Path
from typing import Literal

from pydantic import ValidationError
from pydantic_settings import (
    BaseSettings,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
    TomlConfigSettingsSource,
)

from collapipe.errors import InvalidInputError
from collapipe.service_process import ServiceSettings

Role = Literal["scheduler", "edge-server", "control-unit", "device-agent"]

DEPLOYED_LISTEN = "0.0.0.0:7100"
"""Where the services of every deployment listen."""
DEPLOYED_METRICS_LISTEN = "0.0.0.0:9100"


class BoxSettings(ServiceSettings):
    """What an examination needs of a service's settings; what else there is, the service judges."""

    model_config = SettingsConfigDict(extra="ignore", cli_parse_args=False)

    scheduler: str = ""
    cluster_index: int = 0
    device: str = "cpu"
    state_dir: Path | None = None
    shaper: str = "pacing"

    @property
    def advertised_host(self) -> str:
        """The name or address by which peers call it; empty when the settings do not say."""
        return (self.advertise or "").rpartition(":")[0].strip("[]")


def read_box_settings(config: Path | None) -> BoxSettings:
    """Reads COLLAPIPE_* of the environment, then a settings file.

    Without a file, addresses that the environment leaves open are those of a deployment.

    Args:
        config: What the service is given as --config.

    Raises:
        InvalidInputError: The file cannot be read, or a value is of the wrong kind.
    """
    if config is not None and not os.path.isfile(config):
        raise InvalidInputError(
            f"--config {config}: there is no such file, which `collapipe join` writes, or this user may not look for "
            "it: run this with sudo"
        )

    class FromFile(BoxSettings):
        @classmethod
        def settings_customise_sources(
            cls,
            settings_cls: type[BaseSettings],
            init_settings: PydanticBaseSettingsSource,
            env_settings: PydanticBaseSettingsSource,
            dotenv_settings: PydanticBaseSettingsSource,
            file_secret_settings: PydanticBaseSettingsSource,
        ) -> tuple[PydanticBaseSettingsSource, ...]:
            return env_settings, TomlConfigSettingsSource(settings_cls, config)

    try:
        settings = FromFile()
    except ValidationError as error:
        mistakes = (
            f"{'.'.join(map(str, mistake['loc']))}: {mistake['msg']}" for mistake in error.errors()
        )
        raise InvalidInputError(f"{config or 'COLLAPIPE_*'}: {'; '.join(mistakes)}") from None
    except (OSError, ValueError) as error:  # no permission, or no TOML
        raise InvalidInputError(f"--config {config}: {error}") from None
    if config is None:
        left_open = {"listen": DEPLOYED_LISTEN, "metrics_listen": DEPLOYED_METRICS_LISTEN}
        given = settings.model_fields_set
        return settings.model_copy(
            update={name: value for name, value in left_open.items() if name not in given}
        )
    return settings
