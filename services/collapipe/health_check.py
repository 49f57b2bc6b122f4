"""`python -m collapipe.health_check`: asks the service of this container whether it serves; the health check of deployments.

Takes the settings of the service from where the service takes them.
"""

import sys

from grpc_health.v1 import health_pb2, health_pb2_grpc
from pydantic_settings import SettingsConfigDict

from collapipe.errors import CollapipeError, InvalidInputError, PeerLostError
from collapipe.rpc import call, open_channel
from collapipe.service_process import ServiceSettings, parse_settings

_DEADLINE_SECONDS = 5.0


class ProbeSettings(ServiceSettings):
    """What of a service's settings tells how to reach it; the others are no concern of a probe."""

    model_config = SettingsConfigDict(extra="ignore")


def probe(settings: ServiceSettings) -> None:
    """Asks grpc.health.v1.

    Raises:
        PeerLostError: The service does not serve, or did not answer in time.
        InvalidInputError: The settings do not say where it is.
    """
    host, _, port = settings.listen.rpartition(":")
    if port in ("", "0"):
        raise InvalidInputError(
            f"the service listens on {settings.listen!r}, a port that a probe cannot know: give --listen HOST:PORT"
        )
    address = f"{'127.0.0.1' if host in ('0.0.0.0', '[::]') else host}:{port}"
    with open_channel(address, settings.security) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        answer = call(stub.Check, health_pb2.HealthCheckRequest(), address, _DEADLINE_SECONDS)
    if answer.status != health_pb2.HealthCheckResponse.SERVING:
        status = health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status)
        raise PeerLostError(address, f"the service at {address} is {status}: see its log")


def main() -> None:
    """Exits with 0 when the service serves, with 1 and the reason when it does not."""
    try:
        probe(parse_settings(ProbeSettings))
    except CollapipeError as error:
        sys.exit(f"probe: {error}")


if __name__ == "__main__":
    main()
