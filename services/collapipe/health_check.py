"""`python -m collapipe.health_check` asks the service of this container whether it serves.

It reads the same settings as the service: the environment, --config and flags.
"""

import sys

from pydantic_settings import SettingsConfigDict

from collapipe.errors import CollapipeError, InvalidInputError
from collapipe.rpc import check_serves, open_channel
from collapipe.service_process import ServiceSettings, parse_settings

_DEADLINE_SECONDS = 5.0


class HealthCheckSettings(ServiceSettings):
    """The settings that every service has. Settings of one kind of service are ignored."""

    model_config = SettingsConfigDict(extra="ignore")


def check_health(settings: ServiceSettings) -> None:
    """Asks the health service (grpc.health.v1).

    Raises:
        PeerLostError: The service does not serve, or does not answer in time.
        InvalidInputError: The settings do not say at which port the service listens.
    """
    host, _, port = settings.listen.rpartition(":")
    if port in ("", "0"):
        raise InvalidInputError(
            f"the service listens on {settings.listen!r}, which names no fixed port: set --listen HOST:PORT"
        )
    address = f"{'127.0.0.1' if host in ('0.0.0.0', '[::]') else host}:{port}"
    with open_channel(address, settings.security) as channel:
        check_serves(channel, address, _DEADLINE_SECONDS)


def main() -> None:
    """Exits with 0 if the service serves, else with 1 and the reason."""
    try:
        check_health(parse_settings(HealthCheckSettings))
    except CollapipeError as error:
        sys.exit(f"health check: {error}")


if __name__ == "__main__":
    main()
